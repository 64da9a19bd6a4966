#include "kernels/ops/elementwise.h"

#include <gtest/gtest.h>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

double Silu(double x) { return x / (1.0 + std::exp(-x)); }

Doubles ReferenceSwiGlu(const Doubles& gate, const Doubles& up) {
  Doubles out(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) out[i] = Silu(gate[i]) * up[i];
  return out;
}

TEST(SwiGlu, MatchesReference) {
  std::mt19937 rng = TestRng(40);
  const Context ctx = TestContext();
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {2, 1536}, {5, 33}, {40, 300}, {0, 5}}) {
    for (bool strided : {false, true}) {
      for (double scale : {1.0, 30.0}) {
        const Doubles gate = RandomValues(rng, rows * width, scale), up = RandomValues(rng, rows * width);
        const Tensor out = strided ? StridedEmpty(ctx, {rows, width}) : PoisonedEmpty(ctx, {rows, width});
        ctx.kernels().SwiGlu(*ctx.backend, {ToTensor(ctx, gate, {rows, width}, strided),
                                            ToTensor(ctx, up, {rows, width}, strided), out});
        EXPECT_LE(RelativeError(out, ReferenceSwiGlu(gate, up)), kForwardTolerance) << rows << " " << width;
      }
    }
  }
}

// Each value alone within 4 ulp where the result is a normal number: nothing overflows on the way.
TEST(SwiGlu, EveryMagnitude) {
  const Context ctx = TestContext();
  Doubles gate;
  for (double x = 1e-30; x < 1e4; x *= 1.7) {
    gate.push_back(static_cast<float>(x));
    gate.push_back(static_cast<float>(-x));
  }
  gate.push_back(0.0);
  const int64_t n = static_cast<int64_t>(gate.size());
  const Doubles out =
      ToDoubles(SwiGlu(ctx, ToTensor(ctx, gate, {1, n}), ToTensor(ctx, Doubles(gate.size(), 1.0), {1, n})));
  for (int64_t i = 0; i < n; ++i) {
    EXPECT_NEAR(out[i], Silu(gate[i]), 5e-7 * std::fabs(Silu(gate[i])) + 1e-36) << gate[i];
  }
  const Doubles special = {NAN, INFINITY, -1e38};
  const Doubles odd = ToDoubles(SwiGlu(ctx, ToTensor(ctx, special, {1, 3}), ToTensor(ctx, Doubles(3, 1.0), {1, 3})));
  EXPECT_TRUE(std::isnan(odd[0]));
  EXPECT_EQ(odd[1], INFINITY);
  EXPECT_EQ(odd[2], 0.0f);
}

TEST(SwiGlu, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(41);
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {4, 9}, {3, 50}}) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    Doubles gate = RandomValues(rng, rows * width, 3.0), up = RandomValues(rng, rows * width);
    const Doubles w = RandomValues(rng, rows * width);
    // Halves of one product: both gradients land in the same storage.
    const Tensor both = StridedEmpty(ctx, {rows, 2 * width});
    const Tensor tg = both.Slice(1, 0, width), tu = both.Slice(1, width, 2 * width);
    ctx.backend->Copy(ToTensor(ctx, gate, {rows, width}), tg);
    ctx.backend->Copy(ToTensor(ctx, up, {rows, width}), tu);
    tape.Watch(both);
    PoisonNext(ctx, {rows, width});
    const Tensor out = SwiGlu(ctx, tg, tu);
    tape.BackwardFrom({out}, {ToTensor(ctx, w, {rows, width})});
    auto loss = [&] { return Inner(w, ReferenceSwiGlu(gate, up)); };
    EXPECT_LE(RelativeError(tape.Grad(tg), CentralDifferences(gate, loss)), kGradientTolerance);
    EXPECT_LE(RelativeError(tape.Grad(tu), CentralDifferences(up, loss)), kGradientTolerance);
  }
}

TEST(Add, MatchesReferenceAlsoInPlace) {
  std::mt19937 rng = TestRng(42);
  const Context ctx = TestContext();
  for (const Shape& shape : {Shape{1}, Shape{3, 5}, Shape{2, 3, 17}, Shape{300, 577}, Shape{0, 4}}) {
    const Doubles a = RandomValues(rng, Count(shape)), b = RandomValues(rng, Count(shape));
    Doubles want(a.size());
    for (size_t i = 0; i < a.size(); ++i) want[i] = a[i] + b[i];
    PoisonNext(ctx, shape);
    const Tensor ta = ToTensor(ctx, a, shape), tb = ToTensor(ctx, b, shape);
    EXPECT_LE(RelativeError(Add(ctx, ta, tb), want), 1e-7);
    ctx.kernels().Add(*ctx.backend, {ta, tb, ta});
    EXPECT_LE(RelativeError(ta, want), 1e-7);
  }
}

TEST(Add, GradientsPassThroughToBothAndAccumulate) {
  std::mt19937 rng = TestRng(43);
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const Tensor a = ToTensor(ctx, RandomValues(rng, 35), {5, 7}), b = ToTensor(ctx, RandomValues(rng, 35), {5, 7});
  tape.Watch(a);
  const Tensor out = Add(ctx, Add(ctx, a, b), a);  // 2a + b; b is not wanted
  const Doubles w = RandomValues(rng, 35);
  tape.BackwardFrom({out}, {ToTensor(ctx, w, {5, 7})});
  Doubles want(w);
  for (double& v : want) v *= 2.0;
  EXPECT_LE(RelativeError(tape.Grad(a), want), 1e-7);
  EXPECT_FALSE(tape.Grad(b).defined());
}

TEST(CopyRows, AppendsToAPage) {
  std::mt19937 rng = TestRng(44);
  const Context ctx = TestContext();
  const int64_t rows = 7, heads = 3, width = 5, slots = 11;
  const Doubles x = RandomValues(rng, rows * heads * width), before = RandomValues(rng, heads * slots * width);
  for (bool strided : {false, true}) {
    for (const auto& [row_begin, row_count, slot_begin] :
         {std::array<int64_t, 3>{0, 7, 4}, {2, 3, 0}, {6, 1, 10}, {3, 0, 11}}) {
      const Tensor to = ToTensor(ctx, before, {heads, slots, width}, strided);
      CopyRows(ctx, {ToTensor(ctx, x, {rows, heads, width}, strided), to, row_begin, row_count, slot_begin});
      Doubles want = before;
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < row_count; ++i) {
          for (int64_t d = 0; d < width; ++d) {
            want[(h * slots + slot_begin + i) * width + d] = x[((row_begin + i) * heads + h) * width + d];
          }
        }
      }
      EXPECT_EQ(RelativeError(to, want), 0.0);
    }
  }
}

TEST(CopyRowsDeathTest, RefusesRowsPastThePage) {
  const Context ctx = TestContext();
  const Tensor rows = PoisonedEmpty(ctx, {7, 3, 5}), page = PoisonedEmpty(ctx, {3, 11, 5});
  EXPECT_DEATH(CopyRows(ctx, {rows, page, 0, 7, 5}), "check failed");
}

}  // namespace
}  // namespace stillhouse::testing
