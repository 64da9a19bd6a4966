#include "kernels/ops/softmax_state.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace stillhouse {
namespace {

struct Partition {
  SoftmaxState<double> state;
  double o = 0.0;
};

Partition Of(const std::vector<double>& logits, const std::vector<double>& values) {
  Partition p;
  for (double s : logits) p.state.m = std::max(p.state.m, s);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double w = SoftmaxWeight(logits[i], p.state.m);
    p.state.l += w;
    p.o += w * values[i];
  }
  return p;
}

Partition Merge(Partition a, const Partition& b) {
  const auto w = MergeSoftmax(a.state, b.state);
  a.o = w.first * a.o + w.second * b.o;
  return a;
}

void ExpectSame(const Partition& a, const Partition& b) {
  EXPECT_EQ(a.state.m, b.state.m);
  EXPECT_NEAR(a.state.l, b.state.l, 1e-12 * std::abs(b.state.l));
  EXPECT_NEAR(a.o, b.o, 1e-12 * (1 + std::abs(b.o)));
}

struct Parts {
  Partition a, b, c, all;
};

Parts RandomParts(std::mt19937& rng, double scale) {
  std::normal_distribution<double> normal(0.0, scale);
  std::vector<std::vector<double>> logits(3), values(3);
  std::vector<double> all_logits, all_values;
  for (int i = 0; i < 3; ++i) {
    const int n = static_cast<int>(rng() % 5);  // often empty
    for (int j = 0; j < n; ++j) {
      logits[i].push_back(rng() % 7 == 0 ? -INFINITY : normal(rng));
      values[i].push_back(normal(rng) / scale);
      all_logits.push_back(logits[i].back());
      all_values.push_back(values[i].back());
    }
  }
  return {Of(logits[0], values[0]), Of(logits[1], values[1]), Of(logits[2], values[2]), Of(all_logits, all_values)};
}

TEST(SoftmaxState, MergeIsAssociativeCommutativeAndEqualsOneShot) {
  std::mt19937 rng(1);
  for (double scale : {1.0, 30.0, 1e4}) {
    for (int i = 0; i < 300; ++i) {
      const Parts p = RandomParts(rng, scale);
      ExpectSame(Merge(Merge(p.a, p.b), p.c), p.all);
      ExpectSame(Merge(p.a, Merge(p.b, p.c)), p.all);
      ExpectSame(Merge(Merge(p.c, p.a), p.b), p.all);
    }
  }
}

TEST(SoftmaxState, EmptyIsNeutral) {
  const Partition empty;
  const Partition both = Merge(empty, empty);
  EXPECT_EQ(both.state.m, -INFINITY);
  EXPECT_EQ(both.state.l, 0.0);
  EXPECT_EQ(both.o, 0.0);
  EXPECT_EQ(LogSumExp(both.state), -INFINITY);
  EXPECT_EQ(InverseSum(both.state), 0.0);

  const Partition one = Of({3.0, 5.0}, {1.0, -1.0});
  ExpectSame(Merge(one, empty), one);
  ExpectSame(Merge(empty, one), one);
  EXPECT_NEAR(LogSumExp(one.state), 5.0 + std::log1p(std::exp(-2.0)), 1e-14);
}

TEST(SoftmaxState, FullyMaskedPartitionIsEmpty) {
  const Partition masked = Of({-INFINITY, -INFINITY}, {1.0, 2.0});
  EXPECT_EQ(masked.state.l, 0.0);
  EXPECT_EQ(LogSumExp(masked.state), -INFINITY);
  ExpectSame(Merge(masked, Of({0.0}, {4.0})), Of({0.0}, {4.0}));
}

TEST(SoftmaxState, ExtremesStayFinite) {
  const Partition far = Merge(Of({1e4}, {1.0}), Of({-1e4}, {7.0}));
  EXPECT_EQ(far.o, 1.0);
  EXPECT_EQ(LogSumExp(far.state), 1e4);
  SoftmaxState<float> f{-1e4f, 1.0f};
  const auto w = MergeSoftmax(f, {1e4f, 2.0f});
  EXPECT_EQ(w.first, 0.0f);
  EXPECT_EQ(w.second, 1.0f);
  EXPECT_EQ(f.l, 2.0f);
}

}  // namespace
}  // namespace stillhouse
