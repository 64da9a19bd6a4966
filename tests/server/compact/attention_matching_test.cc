#include "server/compact/attention_matching.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "tests/support/test_backend.h"

namespace stillhouse {
namespace {

using ::testing::ElementsAre;

class AttentionMatchingTest : public ::testing::Test {
 protected:
  AttentionMatchingTest() {
    CpuBackendOptions options;
    options.threads = 2;
    backend_ = testing::MakeTestBackend(options);
    ctx_.backend = backend_.get();
  }

  Tensor Random(Shape shape, uint32_t seed, double scale = 1.0) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal(0.0, scale);
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = static_cast<float>(normal(rng));
    return ctx_.Floats(values, std::move(shape));
  }

  // Keys with a strong first token (a sink) and queries that lean to it, as in a model.
  MatchPart RandomPart(int64_t heads, int64_t kv_heads, int64_t tokens, int64_t queries, int64_t width, uint32_t seed) {
    MatchPart part;
    part.k = Random({kv_heads, tokens, width}, seed);
    part.v = Random({kv_heads, tokens, width}, seed + 1);
    part.queries = Random({queries, heads, width}, seed + 2);
    ctx_.backend->Copy(
        ctx_.Floats(std::vector<float>(static_cast<size_t>(kv_heads * width), 2.0f), {kv_heads, 1, width}),
        part.k.Slice(1, 0, 1));
    std::vector<float> leaning = ctx_.ToFloats(part.queries);
    for (float& q : leaning) q += 0.5f;
    ctx_.backend->Upload(leaning.data(), part.queries);
    part.keep_first = true;
    return part;
  }

  // Attention of every query over slots, in fp64.
  std::vector<double> Outputs(const Tensor& queries, const Tensor& k, const Tensor& v, const Tensor& beta,
                              float scale) {
    const std::vector<float> q = ctx_.ToFloats(queries), kk = ctx_.ToFloats(k), vv = ctx_.ToFloats(v);
    const std::vector<float> b = beta ? ctx_.ToFloats(beta) : std::vector<float>();
    const int64_t n = queries.dim(0), heads = queries.dim(1), d = queries.dim(2), kv = k.dim(0), slots = k.dim(1);
    std::vector<double> out(static_cast<size_t>(n * heads * d));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv);
        std::vector<double> s(static_cast<size_t>(slots));
        double top = -1e300, sum = 0.0;
        for (int64_t j = 0; j < slots; ++j) {
          double dot = 0.0;
          for (int64_t x = 0; x < d; ++x) {
            dot += static_cast<double>(q[(i * heads + h) * d + x]) * kk[(g * slots + j) * d + x];
          }
          s[j] = dot * scale + (b.empty() ? 0.0 : b[g * slots + j]);
          top = std::max(top, s[j]);
        }
        for (double& x : s) sum += x = std::exp(x - top);
        for (int64_t j = 0; j < slots; ++j) {
          for (int64_t x = 0; x < d; ++x) out[(i * heads + h) * d + x] += s[j] / sum * vv[(g * slots + j) * d + x];
        }
      }
    }
    return out;
  }

  static double Distance(const std::vector<double>& a, const std::vector<double>& b) {
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
      error += (a[i] - b[i]) * (a[i] - b[i]);
      norm += b[i] * b[i];
    }
    return error / norm;
  }

  std::unique_ptr<Backend> backend_;
  Context ctx_;
};

TEST_F(AttentionMatchingTest, EachStepIsNoWorseThanTheOneBefore) {
  const float scale = 0.25f;
  for (const auto& [tokens, queries, slots] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{97, 61, 11}, {64, 200, 16}, {130, 33, 5}, {5, 16, 2}}) {
    MatchPart part = RandomPart(6, 2, tokens, queries, 16, static_cast<uint32_t>(tokens));
    part.slots = slots;
    AttentionMatchingOptions options;
    options.measure = true;
    const LayerMatch match = *MatchLayer(ctx_, {part}, scale, options);
    EXPECT_LE(match.errors.biases_mass, match.errors.selection_mass * 1.0001) << tokens;
    EXPECT_LE(match.errors.values, match.errors.biases * 1.0001) << tokens;
    // The measured errors are the true ones.
    const std::vector<double> exact = Outputs(part.queries, part.k, part.v, Tensor(), scale);
    const double error = Distance(Outputs(part.queries, match.kv.k, match.kv.v, match.kv.beta, scale), exact);
    // Per head means of ratios against one ratio of sums: near, not equal.
    EXPECT_NEAR(error, match.errors.values, 0.2 * match.errors.values + 1e-6) << tokens;
    // Without the fits the same slots do worse.
    options.fit_beta = options.fit_values = false;
    const LayerMatch plain = *MatchLayer(ctx_, {part}, scale, options);
    EXPECT_EQ(plain.tokens, match.tokens);
    EXPECT_FALSE(plain.kv.beta.defined());
    EXPECT_LT(error, Distance(Outputs(part.queries, plain.kv.k, plain.kv.v, Tensor(), scale), exact)) << tokens;
  }
}

TEST_F(AttentionMatchingTest, AllSlotsAreTheWholeDocument) {
  MatchPart part = RandomPart(4, 2, 37, 50, 8, 7);
  part.slots = 37;
  const LayerMatch match = *MatchLayer(ctx_, {part}, 0.35f, AttentionMatchingOptions());
  EXPECT_EQ(ctx_.ToFloats(match.kv.k), ctx_.ToFloats(part.k));
  const std::vector<double> exact = Outputs(part.queries, part.k, part.v, Tensor(), 0.35f);
  EXPECT_LT(Distance(Outputs(part.queries, match.kv.k, match.kv.v, match.kv.beta, 0.35f), exact), 1e-6);
}

TEST_F(AttentionMatchingTest, KeepsTheSinkAndTheOrderOfTime) {
  MatchPart part = RandomPart(3, 1, 50, 40, 8, 11);
  // A sink that no query looks at is kept all the same.
  ctx_.backend->Copy(ctx_.Floats(std::vector<float>(8, -3.0f), {1, 1, 8}), part.k.Slice(1, 0, 1));
  part.slots = 9;
  const LayerMatch match = *MatchLayer(ctx_, {part}, 0.35f, AttentionMatchingOptions());
  EXPECT_EQ(match.tokens[0], 0);
  EXPECT_TRUE(std::is_sorted(match.tokens.begin(), match.tokens.end()));
  EXPECT_EQ(std::adjacent_find(match.tokens.begin(), match.tokens.end()), match.tokens.end());
}

TEST_F(AttentionMatchingTest, SelectionIsByMeanSquaredShare) {
  MatchPart part = RandomPart(2, 1, 40, 30, 8, 13);
  part.slots = 7;
  part.keep_first = false;
  AttentionMatchingOptions options;
  options.tile_bytes = 1;  // many small tiles: sums run over all of them
  const LayerMatch match = *MatchLayer(ctx_, {part}, 0.35f, options);
  // fp64 scores.
  const std::vector<float> q = ctx_.ToFloats(part.queries), k = ctx_.ToFloats(part.k);
  std::vector<double> score(40);
  for (int r = 0; r < 60; ++r) {
    std::vector<double> s(40);
    double sum = 0.0;
    for (int j = 0; j < 40; ++j) {
      double dot = 0.0;
      for (int x = 0; x < 8; ++x) dot += static_cast<double>(q[r * 8 + x]) * k[j * 8 + x];
      sum += s[j] = std::exp(dot * 0.35);
    }
    for (int j = 0; j < 40; ++j) score[j] += s[j] / sum * s[j] / sum;
  }
  std::vector<int32_t> order(40);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return score[a] > score[b]; });
  order.resize(7);
  std::sort(order.begin(), order.end());
  EXPECT_EQ(match.tokens, order);
}

TEST_F(AttentionMatchingTest, PartsAreFittedTogether) {
  // Two windows; each window's queries meet the slots of both.
  std::vector<MatchPart> parts = {RandomPart(4, 2, 60, 80, 16, 21), RandomPart(4, 2, 60, 80, 16, 31)};
  parts[0].slots = 12;
  parts[1].slots = 10;
  parts[1].first_candidate = 4;
  parts[1].keep_first = false;
  const LayerMatch match = *MatchLayer(ctx_, parts, 0.25f, AttentionMatchingOptions());
  EXPECT_EQ(match.kv.k.dim(1), 22);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 12; i < 22; ++i) EXPECT_GE(match.tokens[h * 22 + i], 4);
  }
  // Apart, then put together.
  const LayerMatch first = *MatchLayer(ctx_, {parts[0]}, 0.25f, AttentionMatchingOptions());
  const LayerMatch second = *MatchLayer(ctx_, {parts[1]}, 0.25f, AttentionMatchingOptions());
  const Tensor k = ctx_.EmptyF32({2, 22, 16}), v = ctx_.EmptyF32({2, 22, 16}), beta = ctx_.EmptyF32({2, 22});
  for (const auto& [from, begin] : {std::pair<const LayerMatch*, int64_t>{&first, 0}, {&second, 12}}) {
    const int64_t end = begin + from->kv.k.dim(1);
    ctx_.backend->Copy(from->kv.k, k.Slice(1, begin, end));
    ctx_.backend->Copy(from->kv.v, v.Slice(1, begin, end));
    ctx_.backend->Copy(from->kv.beta, beta.Slice(1, begin, end));
  }
  double together = 0.0, apart = 0.0;
  for (const MatchPart& part : parts) {
    const std::vector<double> exact = Outputs(part.queries, part.k, part.v, Tensor(), 0.25f);
    together += Distance(Outputs(part.queries, match.kv.k, match.kv.v, match.kv.beta, 0.25f), exact);
    apart += Distance(Outputs(part.queries, k, v, beta, 0.25f), exact);
  }
  EXPECT_LT(together, apart);
}

TEST_F(AttentionMatchingTest, RefusesWhatCannotBe) {
  MatchPart part = RandomPart(2, 1, 10, 4, 8, 1);
  part.slots = 11;
  EXPECT_EQ(MatchLayer(ctx_, {part}, 1.0f, AttentionMatchingOptions()).status().code(),
            absl::StatusCode::kInvalidArgument);
  part.slots = 3;
  part.queries = Tensor();
  EXPECT_EQ(MatchLayer(ctx_, {part}, 1.0f, AttentionMatchingOptions()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(AttentionMatchingTest, CollectsChosenRows) {
  QueryCollector collector(2);
  const Tensor q = Random({5, 3, 4}, 1);
  auto observe = collector.Observer(ctx_, {1, 4});
  observe(0, q);
  observe(1, q);
  collector.Observer(ctx_, {0})(0, q);
  EXPECT_EQ(collector.count(), 3);
  const std::vector<float> all = ctx_.ToFloats(q), kept = ctx_.ToFloats(collector.Layer(ctx_, 0));
  ASSERT_EQ(kept.size(), 36u);
  EXPECT_TRUE(std::equal(kept.begin(), kept.begin() + 12, all.begin() + 12));
  EXPECT_TRUE(std::equal(kept.begin() + 12, kept.begin() + 24, all.begin() + 48));
  EXPECT_TRUE(std::equal(kept.begin() + 24, kept.end(), all.begin()));
}

TEST(AllotSlots, SplitsByLength) {
  EXPECT_THAT(AllotSlots(10, {100}, {100}), ElementsAre(10));
  EXPECT_THAT(AllotSlots(10, {100, 100}, {100, 100}), ElementsAre(5, 5));
  EXPECT_THAT(AllotSlots(10, {100, 50}, {100, 50}), ElementsAre(7, 3));
  EXPECT_THAT(AllotSlots(3, {1000, 1, 1}, {1000, 1, 1}), ElementsAre(1, 1, 1));
  EXPECT_THAT(AllotSlots(500, {100, 10}, {100, 5}), ElementsAre(100, 5));
  EXPECT_THAT(AllotSlots(1, {10, 10}, {10, 10}), ElementsAre(1, 0));
}

TEST_F(AttentionMatchingTest, RotatedKeysStandAtTheirNewPositions) {
  RopeConfig rope;
  rope.layout = RopeLayout::kInterleaved;
  rope.rope_dim = 8;
  rope.inv_freq = RopeFrequencies(10000.0, 8);
  const Tensor plain = Random({3, 2, 8}, 5);  // [tokens, heads, width]
  const std::vector<int32_t> from = {0, 1, 2}, to = {70, 71, 500};
  auto at = [&](const std::vector<int32_t>& positions) {
    const Tensor turned = Rope(ctx_, plain, ctx_.Ints(positions, {3}), rope);
    Tensor k = ctx_.EmptyF32({2, 3, 8});
    ctx_.backend->Copy(turned.Transpose(0, 1), k);
    return k;
  };
  const std::vector<float> moved = ctx_.ToFloats(RotateKeys(ctx_, rope, at(from), from, to));
  const std::vector<float> wanted = ctx_.ToFloats(at(to));
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(moved[i], wanted[i], 1e-5);
}

}  // namespace
}  // namespace stillhouse
