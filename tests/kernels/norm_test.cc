#include "kernels/ops/norm.h"

#include <gtest/gtest.h>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

Doubles Reference(const Doubles& x, const Doubles& weight, int64_t width, double eps) {
  Doubles out(x.size());
  for (size_t r = 0; r < x.size() / static_cast<size_t>(width); ++r) {
    const double* in = &x[r * static_cast<size_t>(width)];
    double sum = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += in[i] * in[i];
    const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (int64_t i = 0; i < width; ++i) {
      out[r * static_cast<size_t>(width) + static_cast<size_t>(i)] =
          in[i] * rstd * (weight.empty() ? 1.0 : weight[static_cast<size_t>(i)]);
    }
  }
  return out;
}

constexpr float kEps = 1e-5f;

TEST(RmsNorm, MatchesReferenceForAllWidths) {
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{5, 64}, Shape{33, 576}, Shape{2, 1023}, Shape{4, 3, 65},
                             Shape{19}, Shape{0, 8}, Shape{2, 3, 2, 9}}) {
    for (bool strided : {false, true}) {
      for (bool weighted : {false, true}) {
        const int64_t width = shape.back();
        const Doubles x = RandomValues(rng, Count(shape), 3.0);
        const Doubles weight = weighted ? RandomValues(rng, width) : Doubles();
        const Tensor out = strided ? StridedEmpty(ctx, shape) : PoisonedEmpty(ctx, shape);
        ctx.kernels().RmsNorm(*ctx.backend, {ToTensor(ctx, x, shape, strided),
                                             weighted ? ToTensor(ctx, weight, {width}) : Tensor(), out, kEps});
        EXPECT_LE(RelativeError(out, Reference(x, weight, width, kEps)), kForwardTolerance)
            << out.DebugString() << weighted;
      }
    }
  }
}

TEST(RmsNorm, ExtremeValues) {
  const Context ctx = TestContext();
  // Zeros give zeros (eps), large values neither overflow nor vanish.
  const Tensor zero = RmsNorm(ctx, ToTensor(ctx, Doubles(16, 0.0), {1, 16}), Tensor(), kEps);
  for (double v : ToDoubles(zero)) EXPECT_EQ(v, 0.0);
  const Tensor large = RmsNorm(ctx, ToTensor(ctx, Doubles(16, 1e15), {1, 16}), Tensor(), kEps);
  for (double v : ToDoubles(large)) EXPECT_NEAR(v, 1.0, 1e-6);
}

TEST(RmsNorm, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(2);
  for (const Shape& shape : {Shape{3, 1}, Shape{5, 9}, Shape{4, 2, 17}, Shape{2, 70}}) {
    for (bool strided : {false, true}) {
      Tape tape(BackendForTests());
      const Context ctx = TestContext(&tape);
      const int64_t width = shape.back();
      Doubles x = RandomValues(rng, Count(shape)), weight = RandomValues(rng, width);
      const Doubles w = RandomValues(rng, Count(shape));
      const Tensor tx = ToTensor(ctx, x, shape, strided), tw = ToTensor(ctx, weight, {width});
      tape.Watch(tx);
      tape.Watch(tw);
      PoisonNext(ctx, shape);
      const Tensor out = RmsNorm(ctx, tx, tw, kEps);
      tape.BackwardFrom({out}, {ToTensor(ctx, w, shape)});
      auto loss = [&] { return Inner(w, Reference(x, weight, width, kEps)); };
      if (width > 1) {
        EXPECT_LE(RelativeError(tape.Grad(tx), CentralDifferences(x, loss)), kGradientTolerance) << tx.DebugString();
      } else {
        // One element alone is ±1 whatever it is: all but eps cancels, in fp32 as far as fp32 goes. Near 0 that bends
        // too much for differences.
        const Doubles got = ToDoubles(tape.Grad(tx));
        for (size_t i = 0; i < got.size(); ++i) {
          const double want = w[i] * weight[0] * kEps * std::pow(x[i] * x[i] + kEps, -1.5);
          EXPECT_NEAR(got[i], want, 1e-6 * std::fabs(w[i] * weight[0] / x[i]));
        }
      }
      EXPECT_LE(RelativeError(tape.Grad(tw), CentralDifferences(weight, loss)), kGradientTolerance);
    }
  }
}

TEST(RmsNorm, GradientsAccumulate) {
  std::mt19937 rng = TestRng(3);
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Tensor x = ToTensor(ctx, RandomValues(rng, 12), {3, 4});
  tape.Watch(x);
  // The same input twice: the gradient is the sum of both uses.
  const Tensor a = RmsNorm(ctx, x, Tensor(), kEps), b = RmsNorm(ctx, x, Tensor(), kEps);
  const Tensor ones = ToTensor(ctx, Doubles{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {3, 4});
  tape.BackwardFrom({a, b}, {ones, ones});
  const Doubles twice = ToDoubles(tape.Grad(x));
  Tape single(BackendForTests());
  const Context once = TestContext(&single);
  single.Watch(x);
  single.BackwardFrom({RmsNorm(once, x, Tensor(), kEps)}, {ones});
  const Doubles base = ToDoubles(single.Grad(x));
  for (size_t i = 0; i < base.size(); ++i) EXPECT_NEAR(twice[i], 2 * base[i], 1e-6 + 1e-5 * std::fabs(base[i]));
}

}  // namespace
}  // namespace stillhouse::testing
