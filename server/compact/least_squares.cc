#include "server/compact/least_squares.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/base/logging.h"
#include "server/compact/vector_clones.h"

namespace stillhouse {
namespace {

// y += a·x.
STILLHOUSE_VECTOR_CLONES void Axpy(int64_t n, float a, const float* __restrict x, float* __restrict y) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

// row[j] −= Σ_k f[k]·u_k[j] over four rows of the factor: one pass over memory for four eliminations.
STILLHOUSE_VECTOR_CLONES void Eliminate4(int64_t n, const double* f, const double* __restrict u0,
                                         const double* __restrict u1, const double* __restrict u2,
                                         const double* __restrict u3, double* __restrict row) {
  const double a = f[0], b = f[1], c = f[2], d = f[3];
  for (int64_t j = 0; j < n; ++j) row[j] -= a * u0[j] + b * u1[j] + c * u2[j] + d * u3[j];
}

STILLHOUSE_VECTOR_CLONES void Eliminate1(int64_t n, double f, const double* __restrict u, double* __restrict row) {
  for (int64_t j = 0; j < n; ++j) row[j] -= f * u[j];
}

}  // namespace

int SolveNonNegative(absl::Span<const float> gram, absl::Span<const float> linear, const NonNegativeOptions& options,
                     absl::Span<float> w) {
  const int64_t n = static_cast<int64_t>(w.size());
  STILLHOUSE_CHECK_EQ(static_cast<int64_t>(gram.size()), n * n);
  STILLHOUSE_CHECK_EQ(static_cast<int64_t>(linear.size()), n);
  std::vector<float> gradient(static_cast<size_t>(n));
  float scale = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    w[i] = std::max(w[i], options.floor);
    scale = std::max(scale, std::abs(linear[i]));
  }
  if (scale == 0.0f) scale = 1.0f;
  int sweep = 0;
  while (sweep < options.max_sweeps) {
    if (sweep % 32 == 0) {
      // The running gradient drifts by rounding: made new now and then, in fp64.
      std::vector<double> exact(static_cast<size_t>(n));
      for (int64_t j = 0; j < n; ++j) {
        const float* row = gram.data() + j * n;
        if (w[j] == 0.0f) continue;
        for (int64_t i = 0; i < n; ++i) exact[i] += static_cast<double>(w[j]) * row[i];
      }
      for (int64_t i = 0; i < n; ++i) gradient[i] = static_cast<float>(exact[i] - linear[i]);
    }
    ++sweep;
    double largest = 0.0;
    for (int64_t j = 0; j < n; ++j) {
      const float diagonal = gram[j * n + j];
      const float next = diagonal > 0.0f ? std::max(options.floor, w[j] - gradient[j] / diagonal) : options.floor;
      const float delta = next - w[j];
      if (delta == 0.0f) continue;
      w[j] = next;
      Axpy(n, delta, gram.data() + j * n, gradient.data());
      largest = std::max(largest, static_cast<double>(std::abs(delta) * diagonal));
    }
    if (largest <= options.tolerance * scale) break;
  }
  return sweep;
}

bool SolveRidge(absl::Span<const float> gram, double ridge, int64_t columns, absl::Span<float> b) {
  const int64_t n = columns > 0 ? static_cast<int64_t>(b.size()) / columns : 0;
  STILLHOUSE_CHECK_EQ(static_cast<int64_t>(gram.size()), n * n);
  // a's upper triangle becomes the factor U, a = UᵀU. Right-looking over blocks of four rows.
  std::vector<double> a(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) a[i * n + j] = gram[i * n + j];
    a[i * n + i] += ridge;
  }
  constexpr int64_t kBlock = 4;
  for (int64_t k = 0; k < n; k += kBlock) {
    const int64_t end = std::min(n, k + kBlock);
    // The block's own rows.
    for (int64_t r = k; r < end; ++r) {
      double* row = a.data() + r * n;
      for (int64_t s = k; s < r; ++s) Eliminate1(n - r, a[s * n + r], a.data() + s * n + r, row + r);
      if (!(row[r] > 0.0) || !std::isfinite(row[r])) return false;
      const double inverse = 1.0 / std::sqrt(row[r]);
      for (int64_t j = r; j < n; ++j) row[j] *= inverse;
    }
    // The rows below.
    for (int64_t i = end; i < n; ++i) {
      double* row = a.data() + i * n + i;
      if (end - k == kBlock) {
        const double f[kBlock] = {a[k * n + i], a[(k + 1) * n + i], a[(k + 2) * n + i], a[(k + 3) * n + i]};
        Eliminate4(n - i, f, a.data() + k * n + i, a.data() + (k + 1) * n + i, a.data() + (k + 2) * n + i,
                   a.data() + (k + 3) * n + i, row);
      } else {
        for (int64_t s = k; s < end; ++s) Eliminate1(n - i, a[s * n + i], a.data() + s * n + i, row);
      }
    }
  }
  std::vector<double> x(b.begin(), b.end());
  for (int64_t i = 0; i < n; ++i) {
    double* row = x.data() + i * columns;
    const double inverse = 1.0 / a[i * n + i];
    for (int64_t c = 0; c < columns; ++c) row[c] *= inverse;
    for (int64_t j = i + 1; j < n; ++j) {
      const double f = a[i * n + j];
      if (f != 0.0) Eliminate1(columns, f, row, x.data() + j * columns);
    }
  }
  for (int64_t i = n - 1; i >= 0; --i) {
    double* row = x.data() + i * columns;
    for (int64_t j = i + 1; j < n; ++j) {
      const double f = a[i * n + j];
      if (f != 0.0) Eliminate1(columns, f, x.data() + j * columns, row);
    }
    const double inverse = 1.0 / a[i * n + i];
    for (int64_t c = 0; c < columns; ++c) row[c] *= inverse;
  }
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(x[i]);
  return true;
}

}  // namespace stillhouse
