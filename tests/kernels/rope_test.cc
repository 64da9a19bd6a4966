#include "kernels/ops/rope.h"

#include <gtest/gtest.h>

#include <numbers>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

struct Case {
  int64_t rows, heads, width, rope_dim;
  RopeLayout layout;
};

Doubles Reference(const Case& c, const Doubles& x, const std::vector<int32_t>& positions,
                  const std::vector<double>& inv_freq, double scale = 1.0) {
  Doubles out = x;
  const int64_t pairs = c.rope_dim / 2;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const size_t base = static_cast<size_t>((r * c.heads + h) * c.width);
      for (int64_t j = 0; j < pairs; ++j) {
        const double angle = positions[static_cast<size_t>(r)] * inv_freq[static_cast<size_t>(j)];
        const size_t a = base + static_cast<size_t>(c.layout == RopeLayout::kHalf ? j : 2 * j);
        const size_t b = base + static_cast<size_t>(c.layout == RopeLayout::kHalf ? j + pairs : 2 * j + 1);
        out[a] = scale * (x[a] * std::cos(angle) - x[b] * std::sin(angle));
        out[b] = scale * (x[b] * std::cos(angle) + x[a] * std::sin(angle));
      }
    }
  }
  return out;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (RopeLayout layout : {RopeLayout::kHalf, RopeLayout::kInterleaved}) {
    cases.push_back({1, 1, 2, 2, layout});
    cases.push_back({5, 3, 64, 64, layout});
    cases.push_back({3, 2, 10, 6, layout});  // partial
    cases.push_back({70, 4, 128, 96, layout});
    cases.push_back({2, 1, 7, 4, layout});
    cases.push_back({0, 2, 8, 8, layout});
  }
  return cases;
}

std::vector<int32_t> SomePositions(std::mt19937& rng, int64_t count) {
  // Neither sorted nor consecutive, and past any table: positions are data.
  std::vector<int32_t> positions;
  const int32_t special[] = {131072, 0, 17, 1 << 20, 65535, 65536, 3};
  for (int64_t i = 0; i < count; ++i) {
    positions.push_back(i < 7 ? special[i] : static_cast<int32_t>(rng() % 140000));
  }
  return positions;
}

TEST(Rope, MatchesReference) {
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  for (const Case& c : Cases()) {
    for (bool strided : {false, true}) {
      RopeConfig config{c.layout, c.rope_dim, RopeFrequencies(100000.0, c.rope_dim)};
      const Shape shape{c.rows, c.heads, c.width};
      const Doubles x = RandomValues(rng, Count(shape));
      const auto positions = SomePositions(rng, c.rows);
      const Tensor out = strided ? StridedEmpty(ctx, shape) : PoisonedEmpty(ctx, shape);
      ctx.kernels().Rope(*ctx.backend, {ToTensor(ctx, x, shape, strided), ctx.Ints(positions, {c.rows}), out, &config});
      // cos and sin are rounded to fp32 once: 6e-8 relative to the pair's length, at any position.
      EXPECT_LE(RelativeError(out, Reference(c, x, positions, config.inv_freq)), 1e-6);
    }
  }
}

TEST(Rope, InverseUndoesForwardAlsoInPlaceAndScaled) {
  std::mt19937 rng = TestRng(2);
  const Context ctx = TestContext();
  for (const Case& c : Cases()) {
    for (float scale : {1.0f, 1.25f}) {
      RopeConfig config{c.layout, c.rope_dim, RopeFrequencies(10000.0, c.rope_dim), scale};
      const Shape shape{c.rows, c.heads, c.width};
      const Doubles x = RandomValues(rng, Count(shape));
      const auto positions = SomePositions(rng, c.rows);
      const Tensor ids = ctx.Ints(positions, {c.rows});
      const Tensor t = ToTensor(ctx, x, shape);
      ctx.kernels().Rope(*ctx.backend, {t, ids, t, &config});
      EXPECT_LE(RelativeError(t, Reference(c, x, positions, config.inv_freq, scale)), 1e-6);
      ctx.kernels().Rope(*ctx.backend, {t, ids, t, &config, true});
      EXPECT_LE(RelativeError(t, x), 1e-6);
    }
  }
}

TEST(Rope, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(3);
  for (const Case& c : Cases()) {
    for (bool inverse : {false, true}) {
      Tape tape(BackendForTests());
      const Context ctx = TestContext(&tape);
      RopeConfig config{c.layout, c.rope_dim, RopeFrequencies(10000.0, c.rope_dim), 1.5f};
      const Shape shape{std::min<int64_t>(c.rows, 4), c.heads, std::min<int64_t>(c.width, 10)};
      if (c.rope_dim > shape[2]) continue;
      const Case small{shape[0], shape[1], shape[2], c.rope_dim, c.layout};
      Doubles x = RandomValues(rng, Count(shape));
      const Doubles w = RandomValues(rng, Count(shape));
      std::vector<int32_t> positions;
      for (int64_t r = 0; r < shape[0]; ++r) positions.push_back(static_cast<int32_t>(3 * r + 1));
      std::vector<int32_t> signed_positions = positions;
      if (inverse) {
        for (int32_t& p : signed_positions) p = -p;
      }
      const Tensor tx = ToTensor(ctx, x, shape, true);
      tape.Watch(tx);
      PoisonNext(ctx, shape);
      const Tensor out = Rope(ctx, tx, ctx.Ints(positions, {shape[0]}), config, inverse);
      tape.BackwardFrom({out}, {ToTensor(ctx, w, shape)});
      const double scale = inverse ? 1 / 1.5 : 1.5;
      // Pairs are scaled by the config, the elements past rope_dim are not: the reference does the same.
      auto loss = [&] { return Inner(w, Reference(small, x, signed_positions, config.inv_freq, scale)); };
      EXPECT_LE(RelativeError(tape.Grad(tx), CentralDifferences(x, loss)), kGradientTolerance);
    }
  }
}

TEST(Rope, ScoresDependOnDistanceOnly) {
  // <R(p) q, R(p') k> is a function of p − p', also far out: fp32 angles would lose this at 128k.
  std::mt19937 rng = TestRng(4);
  const Context ctx = TestContext();
  RopeConfig config{RopeLayout::kHalf, 64, RopeFrequencies(10000.0, 64)};
  const Doubles q = RandomValues(rng, 64), k = RandomValues(rng, 64);
  auto score = [&](int32_t a, int32_t b) {
    const Doubles x = ToDoubles(Rope(ctx, ToTensor(ctx, q, {1, 1, 64}), ctx.Ints({a}, {1}), config));
    const Doubles y = ToDoubles(Rope(ctx, ToTensor(ctx, k, {1, 1, 64}), ctx.Ints({b}, {1}), config));
    return Inner(x, y);
  };
  EXPECT_NEAR(score(10, 3), score(131072 + 7, 131072), 1e-5);
}

TEST(RopeFrequencies, Formulas) {
  const std::vector<double> f = RopeFrequencies(10000.0, 8);
  ASSERT_EQ(f.size(), 4u);
  EXPECT_DOUBLE_EQ(f[0], 1.0);
  EXPECT_NEAR(f[1], 0.1, 1e-15);
  EXPECT_NEAR(f[3], 0.001, 1e-15);

  std::vector<double> linear = f;
  ApplyLinearScaling(4.0, linear);
  EXPECT_DOUBLE_EQ(linear[0], 0.25);

  // NTK: the lowest frequency is divided by the factor, the highest stays.
  const std::vector<double> ntk = NtkFrequencies(10000.0, 4.0, 8);
  EXPECT_DOUBLE_EQ(ntk[0], 1.0);
  EXPECT_NEAR(ntk[3], f[3] / 4.0, 1e-15);
}

TEST(RopeFrequencies, Llama3) {
  // Llama 3.1: factor 8, low 1, high 4, original context 8192, theta 500000, 128-wide heads.
  std::vector<double> f = RopeFrequencies(500000.0, 128);
  const std::vector<double> plain = f;
  ApplyLlama3Scaling(8.0, 1.0, 4.0, 8192.0, f);
  int kept = 0, divided = 0, between = 0;
  for (size_t j = 0; j < f.size(); ++j) {
    const double wavelength = 2 * std::numbers::pi / plain[j];
    if (wavelength < 2048.0) {
      EXPECT_EQ(f[j], plain[j]);
      ++kept;
    } else if (wavelength > 8192.0) {
      EXPECT_DOUBLE_EQ(f[j], plain[j] / 8.0);
      ++divided;
    } else {
      const double s = (8192.0 / wavelength - 1.0) / 3.0;
      EXPECT_NEAR(f[j] / ((1 - s) * plain[j] / 8.0 + s * plain[j]), 1.0, 1e-12);
      EXPECT_GT(f[j], plain[j] / 8.0);
      EXPECT_LT(f[j], plain[j]);
      ++between;
    }
  }
  // By hand: 2π·500000^(j/64) passes 2048 at j = 28.2 and 8192 at j = 34.98.
  EXPECT_EQ(kept, 29);
  EXPECT_EQ(between, 6);
  EXPECT_EQ(divided, 29);
}

TEST(RopeFrequencies, Yarn) {
  RopeConfig config{RopeLayout::kHalf, 128, RopeFrequencies(10000.0, 128)};
  const std::vector<double> plain = config.inv_freq;
  ApplyYarnScaling(10000.0, 4.0, 32.0, 1.0, 4096.0, config);
  EXPECT_NEAR(config.attention_scale, 0.1 * std::log(4.0) + 1.0, 1e-6);
  // More than 32 turns in 4096 positions: untouched. Less than one: interpolated. Never outside of the two.
  EXPECT_EQ(config.inv_freq.front(), plain.front());
  EXPECT_NEAR(config.inv_freq.back(), plain.back() / 4.0, 1e-18);
  for (size_t j = 0; j < plain.size(); ++j) {
    EXPECT_LE(config.inv_freq[j], plain[j] * (1 + 1e-15));
    EXPECT_GE(config.inv_freq[j], plain[j] / 4.0 * (1 - 1e-15));
    const double turns = 4096.0 * plain[j] / (2 * std::numbers::pi);
    if (turns > 40.0) {
      EXPECT_EQ(config.inv_freq[j], plain[j]) << j;
    } else if (turns < 0.8) {
      EXPECT_NEAR(config.inv_freq[j], plain[j] / 4.0, 1e-15) << j;
    }
  }
}

TEST(RopeConfig, FingerprintTellsConfigsApart) {
  const RopeConfig a{RopeLayout::kHalf, 8, RopeFrequencies(10000.0, 8)};
  RopeConfig b = a;
  EXPECT_EQ(a.Fingerprint(), b.Fingerprint());
  b.layout = RopeLayout::kInterleaved;
  EXPECT_NE(a.Fingerprint(), b.Fingerprint());
  b = a;
  b.inv_freq[3] *= 1 + 1e-15;
  EXPECT_NE(a.Fingerprint(), b.Fingerprint());
  b = a;
  b.attention_scale = 1.1f;
  EXPECT_NE(a.Fingerprint(), b.Fingerprint());
}

}  // namespace
}  // namespace stillhouse::testing
