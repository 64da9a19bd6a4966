// Generated values: parameters of models that exist for their shape alone.
#ifndef STILLHOUSE_KERNELS_OPS_RANDOM_FILL_H_
#define STILLHOUSE_KERNELS_OPS_RANDOM_FILL_H_

#include <cstdint>

#include "kernels/ops/context.h"

namespace stillhouse {

// out[i] = uniform in ±√3·scale, so that the standard deviation is `scale`. f32 or bf16, contiguous. Element i depends
// on (seed, i) alone: the same on every backend.
struct RandomFillArgs {
  Tensor out;
  float scale = 1.0f;
  uint64_t seed = 0;
};
void RandomFill(const Context& ctx, const RandomFillArgs& args);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_RANDOM_FILL_H_
