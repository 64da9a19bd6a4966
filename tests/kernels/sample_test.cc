#include "kernels/ops/sample.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

SampledToken SampleOne(const std::vector<float>& logits, const SampleRow& row, int64_t vocabulary = 0) {
  const Context ctx = TestContext();
  const int64_t n = static_cast<int64_t>(logits.size());
  const Tensor t = ctx.Floats(logits, {1, n});
  return Sample(ctx, t, vocabulary ? vocabulary : n, {row})[0];
}

std::vector<float> RandomLogits(std::mt19937& rng, int64_t n, double scale) {
  const Doubles values = RandomValues(rng, n, scale);
  return std::vector<float>(values.begin(), values.end());
}

// The settings by the book: sort everything, cut, and return the distribution (by id) that is drawn from.
Doubles NaiveDistribution(const std::vector<float>& logits, const SampleRow& row, int64_t vocabulary) {
  const size_t n = static_cast<size_t>(vocabulary);
  Doubles z(logits.begin(), logits.begin() + vocabulary);
  for (const auto& [id, count] : row.history) {
    z[id] = z[id] > 0 ? z[id] / row.repetition_penalty : z[id] * row.repetition_penalty;
    z[id] -= row.frequency_penalty * count + row.presence_penalty;
  }
  for (int32_t id : row.banned) z[id] = -INFINITY;
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return z[a] > z[b]; });
  const double best = z[order[0]];
  for (double& v : z) v = std::exp((v - best) / row.temperature);
  size_t keep = n;
  if (row.top_k > 0) keep = std::min<size_t>(keep, row.top_k);
  double total = 0.0;
  for (size_t i = 0; i < keep; ++i) total += z[order[i]];
  double mass = 0.0;
  size_t nucleus = 0;
  while (nucleus < keep && (nucleus == 0 || mass < row.top_p * total)) mass += z[order[nucleus++]];
  keep = nucleus;
  while (keep > 1 && z[order[keep - 1]] < row.min_p) --keep;
  Doubles p(n, 0.0);
  total = 0.0;
  for (size_t i = 0; i < keep; ++i) total += z[order[i]];
  for (size_t i = 0; i < keep; ++i) p[order[i]] = z[order[i]] / total;
  return p;
}

int32_t NaiveDraw(const Doubles& p, double u) {
  double sum = 0.0;
  int32_t last = -1;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] <= 0.0) continue;
    sum += p[i];
    last = static_cast<int32_t>(i);
    if (sum > u) break;
  }
  return last;
}

TEST(Sample, GreedyTakesTheBestAndTiesTheLowerId) {
  EXPECT_EQ(SampleOne({1, 5, 3}, {}).id, 1);
  EXPECT_EQ(SampleOne({1, 5, 5, 5}, {}).id, 1);
  EXPECT_EQ(SampleOne({-INFINITY, -1e30f}, {}).id, 1);
  EXPECT_EQ(SampleOne({7}, {}).id, 0);
  std::mt19937 rng = TestRng(1);
  for (int64_t n : {1, 7, 8, 31, 64, 1000, 49152}) {
    std::vector<float> z = RandomLogits(rng, n, 3.0);
    const size_t best = rng() % static_cast<size_t>(n);
    z[best] = 100.0f;
    for (size_t i = best + 1; i < z.size(); ++i) {
      if (rng() % 3 == 0) z[i] = 100.0f;
    }
    EXPECT_EQ(SampleOne(z, {}).id, static_cast<int32_t>(best));
    EXPECT_FLOAT_EQ(SampleOne(z, {}).logprob, 0.0f);  // not asked for
  }
}

TEST(Sample, IdsPastTheVocabularyAreMasked) {
  std::vector<float> z = {1, 2, 3, 50, std::nanf("")};
  EXPECT_EQ(SampleOne(z, {}, 3).id, 2);
  SampleRow row;
  row.temperature = 5.0f;
  row.logprobs = 2;
  for (uint64_t step = 0; step < 50; ++step) {
    row.step = step;
    EXPECT_LT(SampleOne(z, row, 3).id, 3);
  }
  const SampledToken token = SampleOne(z, row, 3);
  ASSERT_EQ(token.top.size(), 2u);
  EXPECT_EQ(token.top[0].first, 2);
  EXPECT_NEAR(token.top[0].second, 3 - std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0)), 1e-5);
}

TEST(Sample, InvalidRowsAreFlagged) {
  for (float temperature : {0.0f, 1.0f}) {
    SampleRow row;
    row.temperature = temperature;
    std::vector<float> z(100, 1.0f);
    for (size_t at : {size_t{0}, size_t{37}, size_t{99}}) {
      std::vector<float> bad = z;
      bad[at] = std::nanf("");
      EXPECT_TRUE(SampleOne(bad, row).invalid);
      EXPECT_EQ(SampleOne(bad, row).id, -1);
      bad[at] = INFINITY;
      EXPECT_TRUE(SampleOne(bad, row).invalid);
    }
    EXPECT_TRUE(SampleOne(std::vector<float>(9, -INFINITY), row).invalid);
    row.banned = {0, 1};
    EXPECT_TRUE(SampleOne({1, 2}, row).invalid);
    EXPECT_EQ(SampleOne({1, 2, 0}, row).id, 2);
    // Only the bad row fails.
    const Context ctx = TestContext();
    const Tensor two = ctx.Floats({1.0f, std::nanf(""), 3.0f, 2.0f}, {2, 2});
    const auto out = Sample(ctx, two, 2, {SampleRow{}, SampleRow{}});
    EXPECT_TRUE(out[0].invalid);
    EXPECT_EQ(out[1].id, 0);
  }
}

TEST(Sample, MatchesNaiveImplementation) {
  std::mt19937 rng = TestRng(2);
  int tokens = 0;
  for (int64_t n : {1, 5, 100, 1000, 5003}) {
    for (int round = 0; round < 120; ++round) {
      SampleRow row;
      const float temperatures[] = {0.3f, 0.7f, 1.0f, 2.0f, 10.0f};
      row.temperature = temperatures[rng() % 5];
      if (rng() % 2) row.top_k = static_cast<int32_t>(1 + rng() % static_cast<size_t>(2 * n));  // may exceed V
      if (rng() % 2) row.top_p = static_cast<float>(1 + rng() % 100) / 100.0f;
      if (rng() % 3 == 0) row.min_p = static_cast<float>(rng() % 60) / 100.0f;
      if (rng() % 2) {
        row.repetition_penalty = 1.3f;
        row.frequency_penalty = 0.25f;
        row.presence_penalty = 0.5f;
        for (int i = 0; i < 5 && i < n; ++i) {
          row.history.emplace_back(static_cast<int32_t>(i * (n / 5 + (n < 5))), static_cast<int32_t>(1 + rng() % 3));
        }
      }
      if (n > 5 && rng() % 3 == 0) row.banned = {1, static_cast<int32_t>(n - 1)};
      row.seed = rng();
      row.step = rng();
      std::vector<float> z = RandomLogits(rng, n, 2.0);
      if (rng() % 3 == 0) {
        for (float& v : z) v = std::round(v);  // ties at every cut
      }
      const Doubles p = NaiveDistribution(z, row, n);
      const SampledToken token = SampleOne(z, row);
      ASSERT_FALSE(token.invalid);
      // A token whose mass lies within rounding of a cut may be kept or not.
      bool at_a_cut = false;
      for (float scale : {1.0f - 4e-6f, 1.0f + 4e-6f}) {
        SampleRow moved = row;
        moved.top_p *= scale;
        moved.min_p *= scale;
        const Doubles q = NaiveDistribution(z, moved, n);
        for (int64_t i = 0; i < n; ++i) at_a_cut = at_a_cut || (q[i] > 0.0) != (p[i] > 0.0);
      }
      if (at_a_cut) continue;
      EXPECT_GT(p[token.id], 0.0) << "token outside of the kept set";
      // A draw within rounding of a boundary may fall on either side.
      const double u = UniformDraw(row.seed, row.step);
      if (NaiveDraw(p, u - 1e-6) == NaiveDraw(p, u + 1e-6)) {
        EXPECT_EQ(token.id, NaiveDraw(p, u)) << n << " round " << round;
        ++tokens;
      }
    }
  }
  EXPECT_GT(tokens, 500);
}

TEST(Sample, ExtremeSettings) {
  std::mt19937 rng = TestRng(3);
  const std::vector<float> z = RandomLogits(rng, 49152, 3.0);
  const int32_t best = static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
  for (uint64_t step = 0; step < 20; ++step) {
    SampleRow row;
    row.seed = 5;
    row.step = step;
    row.temperature = 1e-4f;
    EXPECT_EQ(SampleOne(z, row).id, best);
    row.temperature = 1.0f;
    row.top_p = 1e-4f;
    EXPECT_EQ(SampleOne(z, row).id, best);
    row.top_p = 1.0f;
    row.top_k = 1;
    EXPECT_EQ(SampleOne(z, row).id, best);
    row.top_k = 1 << 30;
    EXPECT_GE(SampleOne(z, row).id, 0);
    row.top_k = 0;
    row.min_p = 1.0f;
    EXPECT_EQ(SampleOne(z, row).id, best);
    row.min_p = 0.0f;
    row.temperature = 1e6f;  // nearly uniform, also through a nucleus
    row.top_p = 0.9f;
    EXPECT_GE(SampleOne(z, row).id, 0);
  }
  // Logits of ±1e4.
  SampleRow row;
  row.temperature = 1.0f;
  EXPECT_EQ(SampleOne({-1e4f, 1e4f, 0.0f}, row).id, 1);
  // A temperature whose whole band is below the last place of the best logit.
  row.temperature = 1e-4f;
  row.top_p = 0.5f;
  EXPECT_EQ(SampleOne({-1e4f, 1e4f, 0.0f}, row).id, 1);
}

TEST(Sample, DrawsDoNotDependOnTheBatch) {
  std::mt19937 rng = TestRng(4);
  const Context ctx = TestContext();
  const int64_t n = 500, rows = 17;
  const std::vector<float> z = RandomLogits(rng, n * rows, 2.0);
  std::vector<SampleRow> settings(static_cast<size_t>(rows));
  for (size_t r = 0; r < settings.size(); ++r) {
    settings[r].temperature = 1.0f;
    settings[r].top_p = r % 2 ? 0.9f : 1.0f;
    settings[r].seed = r;
    settings[r].step = 3;
  }
  const auto together = Sample(ctx, ctx.Floats(z, {rows, n}), n, settings);
  for (size_t r = 0; r < settings.size(); ++r) {
    const std::vector<float> own(z.begin() + static_cast<int64_t>(r) * n, z.begin() + static_cast<int64_t>(r + 1) * n);
    EXPECT_EQ(SampleOne(own, settings[r]).id, together[r].id);
    EXPECT_EQ(SampleOne(own, settings[r]).id, together[r].id) << "and repeats";
  }
}

TEST(Sample, FrequenciesFollowTheDistribution) {
  const std::vector<float> z = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f, -INFINITY, 1.5f};
  for (int variant = 0; variant < 3; ++variant) {
    SampleRow row;
    row.temperature = 0.8f;
    row.seed = 11;
    if (variant == 1) row.top_k = 4;
    if (variant == 2) row.top_p = 0.85f;
    const Doubles p = NaiveDistribution(z, row, static_cast<int64_t>(z.size()));
    constexpr int kDraws = 20000;
    std::map<int32_t, int> counts;
    for (int i = 0; i < kDraws; ++i) {
      row.step = static_cast<uint64_t>(i);
      ++counts[SampleOne(z, row).id];
    }
    double chi_square = 0.0;
    for (size_t i = 0; i < p.size(); ++i) {
      const double expected = p[i] * kDraws;
      if (expected == 0.0) {
        EXPECT_EQ(counts[static_cast<int32_t>(i)], 0);
        continue;
      }
      chi_square += std::pow(counts[static_cast<int32_t>(i)] - expected, 2) / expected;
    }
    EXPECT_LT(chi_square, 20.5);  // 0.1 % for 5 degrees of freedom; the seed is fixed
  }
}

TEST(Sample, ReportsLogprobsOfUnmodifiedLogits) {
  std::mt19937 rng = TestRng(5);
  const std::vector<float> z = RandomLogits(rng, 1234, 3.0);
  double sum = 0.0;
  for (float v : z) sum += std::exp(static_cast<double>(v));
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  SampleRow row;
  row.temperature = 0.7f;
  row.top_k = 3;
  row.banned = {order[0]};
  row.repetition_penalty = 2.0f;
  row.history = {{order[1], 1}};
  row.logprobs = 20;
  const SampledToken token = SampleOne(z, row);
  EXPECT_NE(token.id, order[0]);
  EXPECT_NEAR(token.logprob, z[token.id] - std::log(sum), 1e-5);
  ASSERT_EQ(token.top.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(token.top[i].first, order[i]);
    EXPECT_NEAR(token.top[i].second, z[order[i]] - std::log(sum), 1e-5);
  }
}

TEST(Sample, PenaltiesMoveLogitsAsTheySay) {
  SampleRow row;
  row.history = {{0, 2}};
  row.repetition_penalty = 2.0f;
  EXPECT_EQ(SampleOne({4.0f, 2.5f}, row).id, 1);    // 4 / 2 < 2.5
  EXPECT_EQ(SampleOne({-1.0f, -1.5f}, row).id, 1);  // −1 · 2 < −1.5
  row.repetition_penalty = 1.0f;
  row.frequency_penalty = 0.6f;
  EXPECT_EQ(SampleOne({4.0f, 2.9f}, row).id, 1);  // 4 − 2 · 0.6 = 2.8
  EXPECT_EQ(SampleOne({4.0f, 2.7f}, row).id, 0);
  row.frequency_penalty = 0.0f;
  row.presence_penalty = 0.6f;
  EXPECT_EQ(SampleOne({4.0f, 3.5f}, row).id, 1);
  EXPECT_EQ(SampleOne({4.0f, 3.3f}, row).id, 0);
  row.history = {{7, 1}, {-3, 1}};  // ids that the vocabulary lacks are passed over
  EXPECT_EQ(SampleOne({4.0f, 3.3f}, row).id, 0);
}

TEST(UniformDraw, IsPhilox4x32) {
  // Known answers of Random123 for counter 0, key 0: 6627e8d5 e169c58d …; and for all bits set: the low half of the
  // counter is our step, so only the first of the published vectors can be asked for.
  const uint64_t bits = (uint64_t{0x6627e8d5u >> 5} << 26) | (0xe169c58du >> 6);
  EXPECT_EQ(UniformDraw(0, 0), static_cast<double>(bits) * 0x1.0p-53);
  double sum = 0.0, low = 1.0, high = 0.0;
  for (uint64_t step = 0; step < 10000; ++step) {
    const double u = UniformDraw(42, step);
    sum += u;
    low = std::min(low, u);
    high = std::max(high, u);
    EXPECT_NE(u, UniformDraw(43, step));
  }
  EXPECT_GE(low, 0.0);
  EXPECT_LT(high, 1.0);
  EXPECT_NEAR(sum / 10000, 0.5, 0.01);
}

}  // namespace
}  // namespace stillhouse::testing
