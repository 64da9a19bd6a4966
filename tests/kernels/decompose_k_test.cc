#include "kernels/ops/decompose_k.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

constexpr DecomposeKDesign kDesigns[] = {DecomposeKDesign::kTwoLaunches, DecomposeKDesign::kCluster,
                                         DecomposeKDesign::kExchange};

enum class Lie { kRows, kColumns, kEverySecond };  // row-major, column-major, base[:, ::2]

float Bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

// Values that the dtype holds exactly, scaled so that products are of about 1.
Doubles Operand(std::mt19937& rng, int64_t count, DType dtype, double scale) {
  Doubles values = RandomValues(rng, count, scale);
  if (dtype == DType::kBF16) {
    for (double& v : values) v = static_cast<double>(Bf16(static_cast<float>(v)));
  }
  return values;
}

// A [rows, columns] view of the values; what lies between its elements is NaN.
Tensor Lay(const Context& ctx, const Doubles& values, int64_t rows, int64_t columns, DType dtype, Lie lie) {
  const int64_t step = lie == Lie::kEverySecond ? 2 : 1;
  std::vector<float> floats(static_cast<size_t>(rows * columns * step), std::nanf(""));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      floats[lie == Lie::kColumns ? j * rows + i : (i * columns + j) * step] =
          static_cast<float>(values[i * columns + j]);
    }
  }
  const Shape shape = lie == Lie::kColumns ? Shape{columns, rows} : Shape{rows, columns, step};
  Tensor t = ctx.Empty(dtype, shape);
  if (dtype == DType::kBF16) {
    std::vector<uint16_t> halves;
    for (float f : floats) {
      uint32_t bits;
      std::memcpy(&bits, &f, sizeof(bits));
      halves.push_back(static_cast<uint16_t>(bits >> 16));
    }
    ctx.backend->Upload(halves.data(), t);
  } else {
    ctx.backend->Upload(floats.data(), t);
  }
  return lie == Lie::kColumns ? t.Transpose(0, 1) : t.Select(2, 0);
}

struct Problem {
  int64_t m, n, k;
  Doubles a, b, c;
};

Problem MakeProblem(std::mt19937& rng, int64_t m, int64_t n, int64_t k, DType a, DType b) {
  Problem p{m, n, k, Operand(rng, m * k, a, 1.0), Operand(rng, k * n, b, 1.0 / std::sqrt(static_cast<double>(k))), {}};
  p.c.assign(static_cast<size_t>(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      for (int64_t j = 0; j < n; ++j) p.c[i * n + j] += p.a[i * k + l] * p.b[l * n + j];
    }
  }
  return p;
}

double Apply(Epilogue epilogue, double c, double scale, double bias) {
  switch (epilogue) {
    case Epilogue::kRelu:
      return std::max(c, 0.0);
    case Epilogue::kSilu:
      return c / (1.0 + std::exp(-c));
    case Epilogue::kSigmoid:
      return 1.0 / (1.0 + std::exp(-c));
    case Epilogue::kScaleBias:
      return scale * c + bias;
    default:
      return c;
  }
}

struct Size {
  int64_t m, n, k;
};
const Size kSizes[] = {{1, 1, 1},     {1, 16, 8},     {16, 16, 2048}, {3, 5, 31},     {17, 24, 1000}, {16, 64, 4101},
                       {33, 40, 520}, {64, 64, 1024}, {70, 31, 777},  {1, 256, 1792}, {65, 136, 264}, {2, 3, 0}};

class DecomposeKSizes : public ::testing::TestWithParam<std::tuple<size_t, DType>> {};

TEST_P(DecomposeKSizes, MatchesReferenceHoweverOperandsLie) {
  const auto [m, n, k] = kSizes[std::get<0>(GetParam())];
  const DType dtype = std::get<1>(GetParam());
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  const Problem p = MakeProblem(rng, m, n, k, dtype, dtype);
  // A sanitizer needs no count of parts beside one of each kind.
  const std::vector<int32_t> all_splits = SmallTests() ? std::vector<int32_t>{0, 3} : std::vector<int32_t>{0, 1, 3, 16};
  for (Lie a : {Lie::kRows, Lie::kColumns, Lie::kEverySecond}) {
    for (Lie b : {Lie::kRows, Lie::kColumns, Lie::kEverySecond}) {
      // For a sanitizer each lie on each side at one size or another.
      if (SmallTests() && (static_cast<size_t>(a) != std::get<0>(GetParam()) % 3 ||
                           (static_cast<int>(a) + 1) % 3 != static_cast<int>(b)))
        continue;
      const Tensor ta = Lay(ctx, p.a, m, k, dtype, a), tb = Lay(ctx, p.b, k, n, dtype, b);
      for (DecomposeKDesign design : kDesigns) {
        for (int32_t splits : all_splits) {
          // The CPU has one way.
          const bool again = design != DecomposeKDesign::kTwoLaunches || splits != 0;
          if (again && ctx.backend->device() == DeviceType::kCpu) continue;
          DecomposeKOptions options;
          options.design = design;
          options.splits = splits;
          PoisonNext(ctx, {m, n});
          EXPECT_LE(RelativeError(DecomposeK(ctx, ta, tb, options), p.c), kForwardTolerance)
              << m << "x" << n << "x" << k << " " << DTypeName(dtype) << " lie " << int(a) << int(b) << " design "
              << int(design) << " splits " << splits;
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, DecomposeKSizes,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kSizes)),
                                            ::testing::Values(DType::kBF16, DType::kF32)),
                         [](const auto& info) {
                           const Size& size = kSizes[std::get<0>(info.param)];
                           return std::to_string(size.m) + "x" + std::to_string(size.n) + "x" + std::to_string(size.k) +
                                  "_" + DTypeName(std::get<1>(info.param));
                         });

TEST(DecomposeK, TakesOperandsOfTwoTypes) {
  std::mt19937 rng = TestRng(2);
  const Context ctx = TestContext();
  for (DType a : {DType::kBF16, DType::kF32}) {
    const DType b = a == DType::kF32 ? DType::kBF16 : DType::kF32;
    const Problem p = MakeProblem(rng, 5, 33, 700, a, b);
    const Tensor out = DecomposeK(ctx, Lay(ctx, p.a, 5, 700, a, Lie::kRows), Lay(ctx, p.b, 700, 33, b, Lie::kColumns));
    EXPECT_LE(RelativeError(out, p.c), kForwardTolerance);
  }
}

TEST(DecomposeK, LargeProducts) {
  std::mt19937 rng = TestRng(6);
  const Context ctx = TestContext();
  const int64_t m = 100, n = 200, k = 8000;
  const Problem p = MakeProblem(rng, m, n, k, DType::kBF16, DType::kBF16);
  Doubles want;
  for (double c : p.c) want.push_back(Apply(Epilogue::kSilu, c, 1.0, 0.0));
  DecomposeKOptions options;
  options.epilogue = Epilogue::kSilu;
  for (Lie b : {Lie::kRows, Lie::kColumns, Lie::kEverySecond}) {
    const Tensor out =
        DecomposeK(ctx, Lay(ctx, p.a, m, k, DType::kBF16, Lie::kRows), Lay(ctx, p.b, k, n, DType::kBF16, b), options);
    EXPECT_LE(RelativeError(out, want), kForwardTolerance) << int(b);
  }
}

TEST(DecomposeK, EpiloguesOfElements) {
  std::mt19937 rng = TestRng(3);
  const Context ctx = TestContext();
  for (const auto& [m, n, k] : {Size{16, 16, 2048}, Size{5, 70, 333}, Size{64, 64, 640}}) {
    const Problem p = MakeProblem(rng, m, n, k, DType::kBF16, DType::kBF16);
    const Tensor a = Lay(ctx, p.a, m, k, DType::kBF16, Lie::kRows), b = Lay(ctx, p.b, k, n, DType::kBF16, Lie::kRows);
    const Doubles bias = RandomValues(rng, n);
    for (Epilogue epilogue :
         {Epilogue::kNone, Epilogue::kRelu, Epilogue::kSilu, Epilogue::kSigmoid, Epilogue::kScaleBias}) {
      if (SmallTests() && (m == 16) == (epilogue == Epilogue::kScaleBias)) continue;
      for (DecomposeKDesign design : kDesigns) {
        DecomposeKOptions options;
        options.epilogue = epilogue;
        options.design = design;
        options.scale = 0.75f;
        Doubles want;
        for (int64_t i = 0; i < m * n; ++i) want.push_back(Apply(epilogue, p.c[i], 0.75, bias[i % n]));
        const Tensor out =
            DecomposeK(ctx, a, b, options, epilogue == Epilogue::kScaleBias ? ToTensor(ctx, bias, {n}) : Tensor());
        EXPECT_LE(RelativeError(out, want), kForwardTolerance) << int(epilogue) << " " << int(design);
      }
    }
  }
}

TEST(DecomposeK, EpiloguesOfRows) {
  std::mt19937 rng = TestRng(4);
  const Context ctx = TestContext();
  for (const auto& [m, n, k] : {Size{7, 256, 640}, Size{1, 24, 2048}, Size{3, 1, 50}}) {
    const Problem p = MakeProblem(rng, m, n, k, DType::kBF16, DType::kBF16);
    const Tensor a = Lay(ctx, p.a, m, k, DType::kBF16, Lie::kRows), b = Lay(ctx, p.b, k, n, DType::kBF16, Lie::kRows);
    DecomposeKOptions options;
    options.epilogue = Epilogue::kSoftmax;
    Doubles want(p.c);
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0.0;
      for (int64_t j = 0; j < n; ++j) sum += std::exp(p.c[i * n + j]);
      for (int64_t j = 0; j < n; ++j) want[i * n + j] = std::exp(p.c[i * n + j]) / sum;
    }
    EXPECT_LE(RelativeError(DecomposeK(ctx, a, b, options), want), kForwardTolerance);

    const int32_t best = static_cast<int32_t>(std::min<int64_t>(n, 8));
    const TopKOfRows top = DecomposeKTopK(ctx, a, b, best);
    const std::vector<int32_t> ids = ctx.ToInts(top.ids);
    const std::vector<float> values = ctx.ToFloats(top.values);
    for (int64_t i = 0; i < m; ++i) {
      std::vector<int64_t> order(static_cast<size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t x, int64_t y) { return p.c[i * n + x] > p.c[i * n + y]; });
      for (int32_t j = 0; j < best; ++j) {
        // Values that rounding may exchange lie as close as rounding.
        EXPECT_NEAR(p.c[i * n + ids[i * best + j]], p.c[i * n + order[j]], 1e-5);
        EXPECT_NEAR(values[i * best + j], p.c[i * n + order[j]], 1e-5);
      }
    }

    if (n < 16) continue;
    options.epilogue = Epilogue::kSinkhorn;
    options.sinkhorn_n = 4;
    const Doubles got = ToDoubles(DecomposeK(ctx, a, b, options));
    Doubles plain(p.c);
    for (int64_t i = 0; i < m; ++i) {
      double* x = &plain[i * n + n - 16];
      for (int e = 0; e < 16; ++e) x[e] = std::exp(x[e]);
      for (int round = 0; round < 20; ++round) {
        for (int columns = 1; columns >= 0; --columns) {
          for (int line = 0; line < 4; ++line) {
            double sum = 0.0;
            for (int e = 0; e < 4; ++e) sum += x[columns ? e * 4 + line : line * 4 + e];
            for (int e = 0; e < 4; ++e) x[columns ? e * 4 + line : line * 4 + e] /= sum;
          }
        }
      }
    }
    EXPECT_LE(RelativeError(got, plain), 1e-4);  // eps = 1e-6 in forty divisions
  }
}

TEST(DecomposeK, RepeatsItsBits) {
  std::mt19937 rng = TestRng(5);
  const Context ctx = TestContext();
  const Problem p = MakeProblem(rng, 33, 64, 3000, DType::kBF16, DType::kBF16);
  const Tensor a = Lay(ctx, p.a, 33, 3000, DType::kBF16, Lie::kRows),
               b = Lay(ctx, p.b, 3000, 64, DType::kBF16, Lie::kRows);
  for (DecomposeKDesign design : kDesigns) {
    DecomposeKOptions options;
    options.design = design;
    const std::vector<float> first = ctx.ToFloats(DecomposeK(ctx, a, b, options));
    for (int run = 0; run < (SmallTests() ? 1 : 10); ++run) {
      const std::vector<float> again = ctx.ToFloats(DecomposeK(ctx, a, b, options));
      ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0) << int(design);
    }
  }
}

TEST(DecomposeKDeathTest, RefusesWhatItCannotDo) {
  const Context ctx = TestContext();
  const Tensor a = ctx.EmptyF32({2, 8}), b = ctx.EmptyF32({8, 4});
  DecomposeKOptions options;
  options.epilogue = Epilogue::kSinkhorn;
  options.sinkhorn_n = 3;
  EXPECT_DEATH(DecomposeK(ctx, a, b, options), "3 in 4");
  options.epilogue = Epilogue::kSoftmax;
  options.design = DecomposeKDesign::kCluster;
  EXPECT_DEATH(DecomposeK(ctx, a, b, options), "two launches");
  EXPECT_DEATH(DecomposeKTopK(ctx, a, b, 5), "");
}

}  // namespace
}  // namespace stillhouse::testing
