#include "kernels/ops/optimizer.h"

#include <gtest/gtest.h>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

TEST(AdamW, MatchesReferenceOverSteps) {
  std::mt19937 rng = TestRng(50);
  const Context ctx = TestContext();
  const AdamWOptions options{.lr = 0.02f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-6f, .weight_decay = 0.1f};
  for (const Shape& shape : {Shape{1}, Shape{7}, Shape{3, 40}, Shape{3, 11, 64}}) {
    for (bool strided : {false, true}) {
      const size_t n = static_cast<size_t>(Count(shape));
      Doubles p = RandomValues(rng, Count(shape)), m(n, 0.0), v(n, 0.0);
      const Tensor tp = ToTensor(ctx, p, shape, strided), tm = ToTensor(ctx, m, shape, strided),
                   tv = ToTensor(ctx, v, shape, strided);
      for (int64_t step = 1; step <= 5; ++step) {
        const Doubles g = RandomValues(rng, Count(shape), step == 3 ? 100.0 : 1.0);
        const float grad_scale = step == 3 ? 0.01f : 1.0f;
        AdamW(ctx, {tp, ToTensor(ctx, g, shape, strided), tm, tv, options, step, grad_scale});
        for (size_t i = 0; i < n; ++i) {
          const double grad = static_cast<double>(grad_scale) * g[i];
          const double b1 = options.beta1, b2 = options.beta2;
          m[i] = b1 * m[i] + (1 - b1) * grad;
          v[i] = b2 * v[i] + (1 - b2) * grad * grad;
          const double mean = m[i] / (1 - std::pow(b1, step)), variance = v[i] / (1 - std::pow(b2, step));
          p[i] -= options.lr * (mean / (std::sqrt(variance) + options.eps) + options.weight_decay * p[i]);
        }
      }
      // A single parameter or mean may end near zero, where its terms do not.
      EXPECT_LE(RelativeError(ToDoubles(tp), p, 1.0), kForwardTolerance) << tp.DebugString();
      EXPECT_LE(RelativeError(ToDoubles(tm), m, 0.1), kForwardTolerance);
      EXPECT_LE(RelativeError(tv, v), kForwardTolerance);
    }
  }
}

// The first slots of a cartridge are frozen by leaving them out of the slice.
TEST(AdamW, LeavesOtherRowsAlone) {
  const Context ctx = TestContext();
  const Shape shape{2, 5, 3};
  const auto fill = [&](double value) { return ToTensor(ctx, Doubles(30, value), shape); };
  const Tensor p = fill(1.0), g = fill(1.0), m = fill(0.0), v = fill(0.0);
  const auto tail = [](const Tensor& t) { return t.Slice(1, 2, 5); };
  AdamW(ctx, {tail(p), tail(g), tail(m), tail(v), {.lr = 0.5f}, 1, 1.0f});
  const Doubles got = ToDoubles(p);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t s = 0; s < 5; ++s) {
      for (int64_t d = 0; d < 3; ++d) EXPECT_NEAR(got[(h * 5 + s) * 3 + d], s < 2 ? 1.0 : 0.5, 1e-6);
    }
  }
}

TEST(SumSquares, AddsToTheOutput) {
  std::mt19937 rng = TestRng(51);
  const Context ctx = TestContext();
  for (const Shape& shape : {Shape{1}, Shape{0}, Shape{3, 33}, Shape{4, 7, 64}, Shape{100, 1001}}) {
    for (bool strided : {false, true}) {
      const Doubles x = RandomValues(rng, Count(shape), 3.0);
      double want = 0.25;
      for (double value : x) want += value * value;
      const Tensor out = ToTensor(ctx, {0.25}, {1});
      SumSquares(ctx, {ToTensor(ctx, x, shape, strided), out});
      EXPECT_NEAR(ToDoubles(out)[0], want, 1e-6 * want);
    }
  }
}

}  // namespace
}  // namespace stillhouse::testing
