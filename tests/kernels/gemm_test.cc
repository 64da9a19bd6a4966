#include "kernels/cpu/gemm.h"

#include <gtest/gtest.h>

#include <thread>

#include "kernels/cpu/simd.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

struct Size {
  int64_t m, n, k;
};

constexpr Size kSizes[] = {{1, 1, 1},    {2, 3, 64},   {3, 100, 64}, {4, 16, 7},   {5, 31, 65},
                           {6, 32, 320}, {7, 17, 321}, {11, 1, 12},  {12, 48, 33}, {13, 33, 64},
                           {25, 5, 700}, {1, 300, 1},  {0, 4, 4},    {4, 0, 4},    {4, 4, 0}};

// Runs all three forms on padded matrices whose padding must stay untouched.
TEST(Gemm, AllFormsMatchReference) {
  STILLHOUSE_CPU_ONLY();
  std::mt19937 rng = TestRng(20);
  const cpu::SimdTable& simd = cpu::SimdOf(BackendForTests());
  for (const auto& [m, n, k] : kSizes) {
    for (int form = 0; form < 3; ++form) {
      for (bool accumulate : {false, true}) {
        const int64_t a_rows = form == 2 ? k : m, a_cols = form == 2 ? m : k;
        const int64_t b_rows = form == 0 ? n : k, b_cols = form == 0 ? k : n;
        const int64_t lda = a_cols + 3, ldb = b_cols + 5, ldc = n + 2;
        const Doubles a = RandomValues(rng, a_rows * lda), b = RandomValues(rng, b_rows * ldb);
        Doubles want = RandomValues(rng, m * ldc);
        std::vector<float> fa(a.begin(), a.end()), fb(b.begin(), b.end()), fc(want.begin(), want.end());
        const float alpha = 0.5f;
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0.0;
            for (int64_t l = 0; l < k; ++l) {
              sum += (form == 2 ? a[l * lda + i] : a[i * lda + l]) * (form == 0 ? b[j * ldb + l] : b[l * ldb + j]);
            }
            double& out = want[i * ldc + j];
            out = alpha * sum + (accumulate ? out : 0.0);
            if (!accumulate) fc[i * ldc + j] = NAN;
          }
        }
        const auto gemm = form == 0 ? cpu::GemmNT : form == 1 ? cpu::GemmNN : cpu::GemmTN;
        gemm(simd, m, n, k, alpha, fa.data(), lda, fb.data(), ldb, fc.data(), ldc, accumulate);
        EXPECT_LE(RelativeError(Doubles(fc.begin(), fc.end()), want), kForwardTolerance)
            << m << " " << n << " " << k << " form " << form << " accumulate " << accumulate;
      }
    }
  }
}

TEST(Gemm, RunsOnSeveralThreadsAtOnce) {
  STILLHOUSE_CPU_ONLY();
  std::mt19937 rng = TestRng(21);
  const cpu::SimdTable& simd = cpu::SimdOf(BackendForTests());
  const int64_t m = 9, n = 40, k = 500;
  const Doubles a = RandomValues(rng, m * k), b = RandomValues(rng, n * k);
  const std::vector<float> fa(a.begin(), a.end()), fb(b.begin(), b.end());
  std::vector<std::vector<float>> out(4, std::vector<float>(m * n));
  std::vector<std::thread> threads;
  for (auto& c : out) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        cpu::GemmNT(simd, m, n, k, 1.0f, fa.data(), k, fb.data(), k, c.data(), n);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const auto& c : out) EXPECT_EQ(c, out[0]);
}

// Vector kernels that ops use row by row: lengths around the width of every register.
TEST(SimdVectors, MatchReference) {
  STILLHOUSE_CPU_ONLY();
  std::mt19937 rng = TestRng(22);
  const cpu::SimdTable& simd = cpu::SimdOf(BackendForTests());
  for (int64_t n = 0; n < 140; ++n) {
    const Doubles x = RandomValues(rng, n), y = RandomValues(rng, n);
    const std::vector<float> fx(x.begin(), x.end());
    std::vector<float> fy(y.begin(), y.end());
    // One element past the end must survive.
    fy.push_back(7.0f);
    double dot = 0.0, squares = 0.0, size = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      dot += x[i] * y[i];
      size += std::fabs(x[i] * y[i]);
      squares += x[i] * x[i];
    }
    EXPECT_NEAR(simd.dot(fx.data(), fy.data(), n), dot, 1e-6 * (size + 1e-30)) << n;
    EXPECT_NEAR(simd.sum_squares(fx.data(), n), squares, 1e-6 * (squares + 1e-30)) << n;
    simd.axpy(-1.5f, fx.data(), fy.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(fy[i], y[i] - 1.5 * x[i], 1e-6) << n;
    simd.scale(0.5f, fy.data(), n);
    for (int64_t i = 0; i < n; ++i) EXPECT_NEAR(fy[i], 0.5 * (y[i] - 1.5 * x[i]), 1e-6) << n;
    EXPECT_EQ(fy[n], 7.0f);
  }
}

}  // namespace
}  // namespace stillhouse::testing
