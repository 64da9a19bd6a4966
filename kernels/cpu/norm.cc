#include "kernels/ops/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/row_view.h"

namespace stillhouse::cpu {

namespace {

float Rstd(const SimdTable& simd, const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(simd.dot(x, x, n) / static_cast<float>(n) + eps);
}

// Rows per loop task: enough work to be worth a hand-over.
int64_t Grain(int64_t width) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1)); }

}  // namespace

void RmsNorm(Backend& backend, const RmsNormArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView x(args.x), out(args.out);
  const float* weight = args.weight ? args.weight.f32() : nullptr;
  const int64_t n = x.width();
  backend.threads().ParallelRanges(x.rows(), Grain(n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = x.row(r);
      float* to = out.row(r);
      simd.scale_by_weight(in, Rstd(simd, in, n, args.eps), weight, to, n);
    }
  });
}

void RmsNormGrad(Backend& backend, const RmsNormGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView x(args.x), dout(args.dout);
  const int64_t n = x.width();
  const float* weight = args.weight ? args.weight.f32() : nullptr;
  if (args.dx) {
    const RowView dx(args.dx);
    // With g = dout ⊙ weight and x̂ = x·rstd: dx = rstd·(g − x̂·mean(g ⊙ x̂)).
    backend.threads().ParallelRanges(x.rows(), Grain(n), [&](int64_t begin, int64_t end, int) {
      std::vector<float> g(static_cast<size_t>(n));
      for (int64_t r = begin; r < end; ++r) {
        const float* in = x.row(r);
        const float* d = dout.row(r);
        float* to = dx.row(r);
        const float rstd = Rstd(simd, in, n, args.eps);
        for (int64_t i = 0; i < n; ++i) g[i] = weight ? d[i] * weight[i] : d[i];
        const float shift = simd.dot(g.data(), in, n) / static_cast<float>(n) * rstd * rstd;
        for (int64_t i = 0; i < n; ++i) to[i] += rstd * (g[i] - in[i] * shift);
      }
    });
  }
  if (args.dweight) {
    // Each column's sum runs over the rows in order: the result does not depend on the number of threads.
    const int64_t rows = x.rows();
    float* dweight = args.dweight.f32();
    std::vector<float> rstd(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) rstd[r] = Rstd(simd, x.row(r), n, args.eps);
    backend.threads().ParallelRanges(n, 64, [&](int64_t begin, int64_t end, int) {
      std::vector<float> sum(static_cast<size_t>(end - begin));
      for (int64_t r = 0; r < rows; ++r) {
        const float* in = x.row(r);
        const float* d = dout.row(r);
        for (int64_t i = begin; i < end; ++i) sum[i - begin] += d[i] * in[i] * rstd[r];
      }
      for (int64_t i = begin; i < end; ++i) dweight[i] += sum[i - begin];
    });
  }
}

}  // namespace stillhouse::cpu
