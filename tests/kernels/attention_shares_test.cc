#include "kernels/ops/attention_shares.h"

#include <gtest/gtest.h>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

struct Size {
  int64_t rows, n;
};
const Size kSizes[] = {{1, 1}, {3, 2}, {5, 7}, {4, 64}, {70, 33}, {2, 1500}, {300, 1025}, {600, 130}, {0, 4}};

struct Expected {
  Doubles shares, own, columns;
};

Expected Reference(const Doubles& z, int64_t rows, int64_t n, const Doubles& bias, const Doubles& reference,
                   const Doubles& columns, int power) {
  Expected out{Doubles(z.size()), Doubles(static_cast<size_t>(rows)), columns};
  for (int64_t r = 0; r < rows; ++r) {
    double top = -INFINITY, sum = 0.0;
    auto y = [&](int64_t j) { return z[r * n + j] + (bias.empty() ? 0.0 : bias[j]); };
    for (int64_t j = 0; j < n; ++j) top = std::max(top, y(j));
    for (int64_t j = 0; j < n && top > -INFINITY; ++j) sum += std::exp(y(j) - top);
    const double own = sum > 0.0 ? top + std::log(sum) : -INFINITY;
    double mass = 1.0;
    if (!reference.empty()) mass = std::min(std::exp(own - reference[r]), double{kMostAttentionShare});
    out.own[r] = own;
    for (int64_t j = 0; j < n; ++j) {
      const double share = own == -INFINITY ? 0.0 : std::exp(y(j) - own) * mass;
      out.shares[r * n + j] = share;
      if (!columns.empty()) out.columns[j] += power == 2 ? share * share : share;
    }
  }
  return out;
}

TEST(AttentionShares, MatchesReference) {
  std::mt19937 rng = TestRng(41);
  const Context ctx = TestContext();
  for (const auto& [rows, n] : kSizes) {
    for (int options = 0; options < 16; ++options) {
      const bool strided = options & 1, biased = options & 2, referred = options & 4;
      const int power = options & 8 ? 2 : 1;
      Doubles z = RandomValues(rng, rows * n, 3.0);
      if (rows > 2) {
        for (int64_t i = 0; i < n; ++i) z[n + i] = -INFINITY;  // a masked row
        z[0] = -INFINITY;
      }
      const Doubles bias = biased ? RandomValues(rng, n) : Doubles();
      Doubles reference = referred ? RandomValues(rng, rows, 2.0) : Doubles();
      if (referred && rows > 3) reference[3] = -60.0;  // more than the cap
      const Doubles columns = RandomValues(rng, n);
      const Expected want = Reference(z, rows, n, bias, reference, columns, power);
      AttentionSharesArgs args;
      args.z = ToTensor(ctx, z, {rows, n}, strided);
      if (biased) args.column_bias = ToTensor(ctx, bias, {n});
      if (referred) args.reference = ToTensor(ctx, reference, {rows});
      args.own = PoisonedEmpty(ctx, {rows});
      args.columns = ToTensor(ctx, columns, {n});
      args.power = power;
      AttentionShares(ctx, args);
      const std::string what =
          "rows " + std::to_string(rows) + ", n " + std::to_string(n) + ", options " + std::to_string(options);
      EXPECT_LT(RelativeError(args.z, want.shares), kForwardTolerance) << what;
      EXPECT_LT(RelativeError(args.own, want.own), kForwardTolerance) << what;
      EXPECT_LT(RelativeError(args.columns, want.columns), kForwardTolerance) << what;
    }
  }
}

TEST(AttentionShares, AddsTheSameBitsEveryTime) {
  std::mt19937 rng = TestRng(42);
  const Context ctx = TestContext();
  const int64_t rows = 1100, n = 700;
  const Doubles z = RandomValues(rng, rows * n, 2.0);
  Doubles first;
  for (int run = 0; run < 3; ++run) {
    AttentionSharesArgs args;
    args.z = ToTensor(ctx, z, {rows, n});
    args.columns = ToTensor(ctx, Doubles(static_cast<size_t>(n), 0.0), {n});
    args.power = 2;
    AttentionShares(ctx, args);
    if (run == 0) first = ToDoubles(args.columns);
    EXPECT_EQ(ToDoubles(args.columns), first);
  }
}

}  // namespace
}  // namespace stillhouse::testing
