// The two small solvers of attention matching, on normal equations of a few hundred unknowns. Host memory, one thread.
#ifndef STILLHOUSE_SERVER_COMPACT_LEAST_SQUARES_H_
#define STILLHOUSE_SERVER_COMPACT_LEAST_SQUARES_H_

#include <cstdint>

#include "absl/types/span.h"

namespace stillhouse {

struct NonNegativeOptions {
  float floor = 0.0f;  // the least value of every unknown
  int max_sweeps = 200;
  double tolerance = 1e-4;  // ends when no step changes the fit by more than this share
};

// Minimises ½ wᵀGw − cᵀw over w ≥ floor by cyclic coordinate descent from the given w. gram [n, n] symmetric positive
// semidefinite, linear [n], w [n] in and out. An unknown with a zero diagonal does not matter and becomes floor.
// Returns the number of sweeps.
int SolveNonNegative(absl::Span<const float> gram, absl::Span<const float> linear, const NonNegativeOptions& options,
                     absl::Span<float> w);

// Solves (gram + ridge·I) x = b by Cholesky in fp64. gram [n, n] symmetric positive semidefinite, b [n, columns]
// replaced by x. False if the matrix is not positive definite at this ridge (b is then undefined).
bool SolveRidge(absl::Span<const float> gram, double ridge, int64_t columns, absl::Span<float> b);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_COMPACT_LEAST_SQUARES_H_
