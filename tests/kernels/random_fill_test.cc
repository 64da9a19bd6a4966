#include "kernels/ops/random_fill.h"

#include <gtest/gtest.h>

#include "kernels/ops/quant.h"
#include "kernels/ops/random_unit.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

TEST(RandomFill, HasItsScaleAndIsOfSeedAndPlaceAlone) {
  const Context ctx = TestContext();
  const int64_t n = 100003;
  const Tensor a = ctx.EmptyF32({n}), b = ctx.EmptyF32({n}), part = ctx.EmptyF32({17});
  RandomFill(ctx, {a, 0.5f, 7});
  RandomFill(ctx, {b, 0.5f, 8});
  RandomFill(ctx, {part, 0.5f, 7});
  const std::vector<float> x = ctx.ToFloats(a), y = ctx.ToFloats(b), z = ctx.ToFloats(part);
  double sum = 0, squares = 0, cross = 0, most = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += x[i];
    squares += double{x[i]} * x[i];
    cross += double{x[i]} * y[i];
    most = std::max(most, std::fabs(double{x[i]}));
    // 0.5·√3 in fp32, rounded once more by the product.
    ASSERT_NEAR(x[i], 0.5 * std::sqrt(3.0) * RandomUnit(7, static_cast<uint64_t>(i)), 1e-6);
  }
  EXPECT_NEAR(sum / n, 0.0, 5 * 0.5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 0.25, 0.01);
  EXPECT_NEAR(cross / n, 0.0, 5 * 0.25 / std::sqrt(n));
  EXPECT_LE(most, 0.5 * std::sqrt(3.0) + 1e-6);
  EXPECT_TRUE(std::equal(z.begin(), z.end(), x.begin()));
}

TEST(RandomFill, RoundsToBf16AndTakesNothing) {
  const Context ctx = TestContext();
  RandomFill(ctx, {ctx.EmptyF32({0}), 1.0f, 1});
  const Tensor wide = ctx.EmptyF32({1000}), narrow = ctx.Empty(DType::kBF16, {1000});
  RandomFill(ctx, {wide, 1.0f, 3});
  RandomFill(ctx, {narrow, 1.0f, 3});
  const std::vector<float> x = ctx.ToFloats(wide);
  std::vector<uint16_t> y(1000);
  ctx.backend->Download(narrow, y.data());
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], FloatToBf16(x[i])) << i;
}

}  // namespace
}  // namespace stillhouse::testing
