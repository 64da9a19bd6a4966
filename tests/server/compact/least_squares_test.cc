#include "server/compact/least_squares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace stillhouse {
namespace {

struct Problem {
  int64_t n;
  std::vector<float> gram, linear;
};

// Normal equations of a random tall matrix with positive entries, as mass shares have.
Problem RandomProblem(int64_t rows, int64_t n, uint32_t seed, double correlation) {
  std::mt19937 rng(seed);
  std::exponential_distribution<double> exponential(1.0);
  std::vector<double> a(static_cast<size_t>(rows * n));
  for (int64_t i = 0; i < rows; ++i) {
    const double common = exponential(rng);
    for (int64_t j = 0; j < n; ++j) {
      a[i * n + j] = correlation * common + (1.0 - correlation) * exponential(rng) * (j % 3 == 0 ? 0.01 : 1.0);
    }
  }
  Problem p{n, std::vector<float>(n * n), std::vector<float>(n)};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0.0;
      for (int64_t r = 0; r < rows; ++r) sum += a[r * n + i] * a[r * n + j];
      p.gram[i * n + j] = static_cast<float>(sum);
    }
    double sum = 0.0;
    for (int64_t r = 0; r < rows; ++r) sum += a[r * n + i] * (r % 4 == 0 ? 2.0 : 1.0);
    p.linear[i] = static_cast<float>(sum);
  }
  return p;
}

double Objective(const Problem& p, const std::vector<double>& w) {
  double value = 0.0;
  for (int64_t i = 0; i < p.n; ++i) {
    double row = 0.0;
    for (int64_t j = 0; j < p.n; ++j) row += p.gram[i * p.n + j] * w[j];
    value += 0.5 * w[i] * row - p.linear[i] * w[i];
  }
  return value;
}

// Projected gradient in fp64, far past convergence: slow and plain.
std::vector<double> ReferenceSolution(const Problem& p, double floor) {
  double trace = 0.0;
  for (int64_t i = 0; i < p.n; ++i) trace += p.gram[i * p.n + i];
  std::vector<double> w(p.n, 1.0), y = w;
  double t = 1.0;
  for (int it = 0; it < 20000; ++it) {
    std::vector<double> next(p.n);
    for (int64_t i = 0; i < p.n; ++i) {
      double g = -p.linear[i];
      for (int64_t j = 0; j < p.n; ++j) g += p.gram[i * p.n + j] * y[j];
      next[i] = std::max(floor, y[i] - g / trace);
    }
    const double t2 = (1.0 + std::sqrt(1.0 + 4.0 * t * t)) / 2.0;
    for (int64_t i = 0; i < p.n; ++i) y[i] = next[i] + (t - 1.0) / t2 * (next[i] - w[i]);
    w = next;
    t = t2;
  }
  return w;
}

TEST(SolveNonNegative, ReachesTheReferenceObjective) {
  for (const auto& [n, correlation] :
       std::vector<std::pair<int64_t, double>>{{1, 0.0}, {2, 0.5}, {7, 0.0}, {33, 0.7}}) {
    const Problem p = RandomProblem(3 * n + 5, n, static_cast<uint32_t>(n), correlation);
    NonNegativeOptions options;
    options.floor = 1e-4f;
    options.max_sweeps = 2000;
    options.tolerance = 1e-7;
    std::vector<float> w(n, 1.0f);
    SolveNonNegative(p.gram, p.linear, options, absl::MakeSpan(w));
    const std::vector<double> reference = ReferenceSolution(p, options.floor);
    const double best = Objective(p, reference), ours = Objective(p, std::vector<double>(w.begin(), w.end()));
    EXPECT_LE(ours - best, 1e-5 * std::abs(best)) << n << " unknowns";
    for (float x : w) EXPECT_GE(x, options.floor);
  }
}

TEST(SolveNonNegative, DefaultSweepsAreNearTheReference) {
  const Problem p = RandomProblem(300, 90, 3, 0.6);
  NonNegativeOptions options;
  options.floor = 1e-4f;
  std::vector<float> w(90, 1.0f);
  EXPECT_LE(SolveNonNegative(p.gram, p.linear, options, absl::MakeSpan(w)), options.max_sweeps);
  const double best = Objective(p, ReferenceSolution(p, options.floor));
  EXPECT_LE(Objective(p, std::vector<double>(w.begin(), w.end())) - best, 1e-3 * std::abs(best));
}

TEST(SolveNonNegative, UnknownsWithoutWeightBecomeTheFloor) {
  const std::vector<float> gram = {2.0f, 0.0f, 0.0f, 0.0f}, linear = {3.0f, 0.0f};
  std::vector<float> w = {1.0f, 1.0f};
  NonNegativeOptions options;
  options.floor = 0.25f;
  SolveNonNegative(gram, linear, options, absl::MakeSpan(w));
  EXPECT_THAT(w, testing::ElementsAre(testing::FloatNear(1.5f, 1e-6f), 0.25f));
}

TEST(SolveRidge, SolvesSystemsOfEverySize) {
  for (int64_t n : {1, 2, 3, 4, 5, 8, 13, 64, 70}) {
    const Problem p = RandomProblem(2 * n + 3, n, static_cast<uint32_t>(100 + n), 0.2);
    const int64_t columns = 3;
    std::mt19937 rng(5);
    std::normal_distribution<double> normal;
    std::vector<double> x(static_cast<size_t>(n * columns));
    for (double& v : x) v = normal(rng);
    const double ridge = 0.05 * p.gram[0];
    std::vector<float> b(x.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < columns; ++c) {
        double sum = ridge * x[i * columns + c];
        for (int64_t j = 0; j < n; ++j) sum += p.gram[i * n + j] * x[j * columns + c];
        b[i * columns + c] = static_cast<float>(sum);
      }
    }
    ASSERT_TRUE(SolveRidge(p.gram, ridge, columns, absl::MakeSpan(b))) << n;
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(b[i], x[i], 1e-3) << "size " << n << ", element " << i;
  }
}

TEST(SolveRidge, RefusesAnIndefiniteMatrix) {
  std::vector<float> gram = {1.0f, 2.0f, 2.0f, 1.0f}, b = {1.0f, 1.0f};
  EXPECT_FALSE(SolveRidge(gram, 0.0, 1, absl::MakeSpan(b)));
  b = {1.0f, 1.0f};
  EXPECT_TRUE(SolveRidge(gram, 2.0, 1, absl::MakeSpan(b)));
}

}  // namespace
}  // namespace stillhouse
