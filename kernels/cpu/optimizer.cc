#include "kernels/ops/optimizer.h"

#include <cmath>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {
namespace {

// Offset of the r-th run of the last dimension of a strided tensor.
int64_t RunOffset(const Tensor& t, int64_t run) {
  int64_t offset = 0;
  for (int d = t.rank() - 2; d >= 0; --d) {
    offset += run % t.dim(d) * t.stride(d);
    run /= t.dim(d);
  }
  return offset;
}

int64_t RunLength(const Tensor& t) { return t.rank() ? t.dim(-1) : 1; }

}  // namespace

void AdamW(Backend& backend, const AdamWArgs& args) {
  const AdamWOptions& o = args.options;
  for (const Tensor* t : {&args.param, &args.grad, &args.m, &args.v}) {
    STILLHOUSE_CHECK(t->shape() == args.param.shape()) << t->DebugString() << " for " << args.param.DebugString();
    STILLHOUSE_CHECK(RunLength(*t) <= 1 || t->stride(-1) == 1) << t->DebugString();
  }
  STILLHOUSE_CHECK_GE(args.step, 1);
  const int64_t width = RunLength(args.param);
  if (args.param.elements() == 0) return;
  // Bias corrections in fp64; the update itself in fp32.
  const double correction1 = 1.0 - std::pow(static_cast<double>(o.beta1), static_cast<double>(args.step));
  const double correction2 = 1.0 - std::pow(static_cast<double>(o.beta2), static_cast<double>(args.step));
  const float step_size = static_cast<float>(o.lr / correction1);
  const float inverse_root = static_cast<float>(1.0 / std::sqrt(correction2));
  const float decay = 1.0f - o.lr * o.weight_decay;
  backend.threads().ParallelRanges(
      args.param.elements() / width, 1 + 16384 / width, [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) {
          float* p = args.param.f32() + RunOffset(args.param, r);
          const float* g = args.grad.f32() + RunOffset(args.grad, r);
          float* m = args.m.f32() + RunOffset(args.m, r);
          float* v = args.v.f32() + RunOffset(args.v, r);
          for (int64_t i = 0; i < width; ++i) {
            const float grad = args.grad_scale * g[i];
            m[i] = o.beta1 * m[i] + (1.0f - o.beta1) * grad;
            v[i] = o.beta2 * v[i] + (1.0f - o.beta2) * grad * grad;
            p[i] = decay * p[i] - step_size * m[i] / (std::sqrt(v[i]) * inverse_root + o.eps);
          }
        }
      });
}

void SumSquares(Backend& backend, const SumSquaresArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t width = RunLength(args.x);
  STILLHOUSE_CHECK(width <= 1 || args.x.stride(-1) == 1) << args.x.DebugString();
  STILLHOUSE_CHECK_EQ(args.out.elements(), 1);
  double total = 0;
  if (width > 0) {
    const int64_t runs = args.x.elements() / width;
    for (int64_t r = 0; r < runs; ++r) total += simd.sum_squares(args.x.f32() + RunOffset(args.x, r), width);
  }
  args.out.f32()[0] += static_cast<float>(total);
}

}  // namespace stillhouse::cpu
