#include "kernels/ops/matmul.h"

#include <gtest/gtest.h>

#include "tests/kernels/quant_reference.h"

namespace stillhouse::testing {
namespace {

// x [m, k] · weightᵀ [n, k] + bias.
Doubles ReferenceLinear(const Doubles& x, const Doubles& weight, const Doubles& bias, int64_t m, int64_t n, int64_t k) {
  Doubles out(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias.empty() ? 0.0 : bias[j];
      for (int64_t l = 0; l < k; ++l) sum += x[i * k + l] * weight[j * k + l];
      out[i * n + j] = sum;
    }
  }
  return out;
}

struct Size {
  int64_t m, n, k;
};

// Σ |x·w| per output: a sum that cancels is as far off as its terms are large.
Doubles Magnitude(Doubles x, Doubles weight, int64_t m, int64_t n, int64_t k) {
  for (double& v : x) v = std::fabs(v);
  for (double& v : weight) v = std::fabs(v);
  return ReferenceLinear(x, weight, {}, m, n, k);
}

// ‖got − want‖ / ‖Σ|x·w|‖.
double ProductError(const Tensor& got, const Doubles& want, const Doubles& magnitude) {
  const Doubles values = ToDoubles(got);
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(values[i])) return INFINITY;
    difference += (values[i] - want[i]) * (values[i] - want[i]);
    size += magnitude[i] * magnitude[i];
  }
  return std::sqrt(difference / (size + 1e-300));
}

// fp32 sums of up to a thousand products of decoded weights.
constexpr double kProductTolerance = 1e-6;

TEST(Linear, MatchesReferenceForDenseWeights) {
  std::mt19937 rng = TestRng(10);
  const Context ctx = TestContext();
  for (const auto& [m, n, k] :
       {Size{1, 1, 1}, Size{1, 33, 65}, Size{2, 17, 5}, Size{3, 8, 64}, Size{4, 100, 33}, Size{5, 16, 31},
        Size{7, 15, 321}, Size{13, 47, 640}, Size{33, 130, 1000}, Size{0, 3, 4}, Size{70, 1, 9}, Size{6, 5, 0}}) {
    for (bool strided : {false, true}) {
      for (bool biased : {false, true}) {
        const Doubles x = RandomValues(rng, m * k), weight = RandomValues(rng, n * k);
        const Doubles bias = biased ? RandomValues(rng, n) : Doubles();
        const Tensor out = strided ? StridedEmpty(ctx, {m, n}) : PoisonedEmpty(ctx, {m, n});
        ctx.kernels().Linear(*ctx.backend, {ToTensor(ctx, x, {m, k}, strided), ToTensor(ctx, weight, {n, k}),
                                            biased ? ToTensor(ctx, bias, {n}) : Tensor(), out});
        Doubles size = Magnitude(x, weight, m, n, k);
        for (size_t i = 0; i < size.size() && biased; ++i) size[i] += std::fabs(bias[i % n]);
        EXPECT_LE(ProductError(out, ReferenceLinear(x, weight, bias, m, n, k), size), kProductTolerance)
            << m << " " << n << " " << k << " " << strided << biased;
      }
    }
  }
}

// Row counts on both sides of every switch between kernels, row groups with and without a tail.
TEST(Linear, MatchesReferenceForEveryStorageType) {
  std::mt19937 rng = TestRng(11);
  const Context ctx = TestContext();
  for (DType dtype : kStorageTypes) {
    for (int64_t n : {1, 7, 8, 24, 61, 200}) {
      for (int64_t blocks : {1, 2, 5}) {
        const int64_t k = blocks * std::max<int64_t>(BlockElements(dtype), 32);
        const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
        const Doubles weight = StorageValues(dtype, bytes, n * k);
        const Tensor raw = StorageTensor(ctx, bytes, dtype, {n, k});
        const Tensor prepared = PrepareWeight(ctx, raw);
        EXPECT_EQ(prepared.dim(0), n);
        EXPECT_EQ(prepared.dim(1), k);
        for (int64_t m : {1, 2, 3, 4, 5, 6, 9, 16, 37}) {
          const Doubles x = RandomValues(rng, m * k);
          const Doubles want = ReferenceLinear(x, weight, {}, m, n, k), size = Magnitude(x, weight, m, n, k);
          for (const Tensor& w : {raw, prepared}) {
            const Tensor out = StridedEmpty(ctx, {m, n});
            ctx.kernels().Linear(*ctx.backend, {ToTensor(ctx, x, {m, k}, true), w, Tensor(), out});
            ASSERT_LE(ProductError(out, want, size), kProductTolerance)
                << DTypeName(dtype) << " " << m << " " << n << " " << k << " prepared " << (w.rank() > 2);
          }
        }
      }
    }
  }
}

// Activations of real models have outliers. Beside one that is a thousand times the others, each output is within a few
// roundings of Σ|x·w|, plus what it costs to count a block of 32 in steps of 2^-23 of its largest element.
TEST(Linear, KeepsPrecisionBesideOutliers) {
  std::mt19937 rng = TestRng(12);
  const Context ctx = TestContext();
  const int64_t n = 64, k = 256;
  for (DType dtype : {DType::kQ4_0, DType::kQ4_1, DType::kQ8_0}) {
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
    const Doubles weight = StorageValues(dtype, bytes, n * k);
    const Tensor w = PrepareWeight(ctx, Tensor::Wrap(bytes.data(), dtype, {n, k}));
    for (int64_t m : {1, 3, 16}) {
      Doubles x = RandomValues(rng, m * k);
      for (int64_t i = 0; i < m; ++i) x[i * k + rng() % k] *= 1000.0;
      const Doubles want = ReferenceLinear(x, weight, {}, m, n, k), size = Magnitude(x, weight, m, n, k);
      const Doubles got = ToDoubles(Linear(ctx, ToTensor(ctx, x, {m, k}), w));
      double largest_x = 0.0, largest_w = 0.0;
      for (double v : x) largest_x = std::max(largest_x, std::fabs(v));
      for (double v : weight) largest_w = std::max(largest_w, std::fabs(v));
      const double step = largest_x * largest_w * std::sqrt(32.0);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 2e-6 * size[i] + step * 0x1p-22) << DTypeName(dtype) << " " << m;
      }
    }
  }
}

TEST(Linear, ExtremeInputs) {
  const Context ctx = TestContext();
  std::mt19937 rng = TestRng(13);
  const int64_t n = 16, k = 64;
  for (DType dtype : {DType::kF32, DType::kQ4_0, DType::kQ4_1, DType::kQ8_0}) {
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
    const Doubles weight = StorageValues(dtype, bytes, n * k);
    const Tensor w = PrepareWeight(ctx, Tensor::Wrap(bytes.data(), dtype, {n, k}));
    for (int64_t m : {1, 8}) {
      for (double scale : {0.0, 1e-30, 1e30}) {
        const Doubles x = RandomValues(rng, m * k, scale);
        EXPECT_LE(ProductError(Linear(ctx, ToTensor(ctx, x, {m, k}), w), ReferenceLinear(x, weight, {}, m, n, k),
                               Magnitude(x, weight, m, n, k)),
                  kProductTolerance)
            << DTypeName(dtype) << " " << m << " " << scale;
      }
      // A NaN in a row reaches every output of that row, and no other row.
      Doubles x = RandomValues(rng, m * k);
      x[5] = NAN;
      const Doubles out = ToDoubles(Linear(ctx, ToTensor(ctx, x, {m, k}), w));
      for (int64_t j = 0; j < n; ++j) EXPECT_TRUE(std::isnan(out[j])) << DTypeName(dtype) << " " << m << " " << j;
      for (int64_t i = n; i < m * n; ++i) EXPECT_FALSE(std::isnan(out[i])) << DTypeName(dtype);
      x[5] = INFINITY;
      const Doubles infinite = ToDoubles(Linear(ctx, ToTensor(ctx, x, {m, k}), w));
      for (int64_t j = 0; j < n; ++j) {
        EXPECT_FALSE(std::isfinite(infinite[j]) && weight[j * k + 5] != 0.0) << DTypeName(dtype) << " " << m;
      }
    }
  }
}

// Parts of a joined weight are row slices, also where they do not start on a group of rows.
TEST(Linear, ReadsRowSlicesOfPreparedWeights) {
  std::mt19937 rng = TestRng(14);
  const Context ctx = TestContext();
  const int64_t n = 40, k = 64;
  for (DType dtype : {DType::kQ4_0, DType::kQ4_1, DType::kQ8_0, DType::kF16, DType::kF32}) {
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
    const Doubles weight = StorageValues(dtype, bytes, n * k);
    const Tensor w = PrepareWeight(ctx, Tensor::Wrap(bytes.data(), dtype, {n, k}));
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 8}, {8, 40}, {16, 35}, {3, 21}, {39, 40}}) {
      const Doubles part(weight.begin() + begin * k, weight.begin() + end * k);
      for (int64_t m : {1, 3, 12}) {
        Doubles x = RandomValues(rng, m * k);
        Tape tape(*ctx.backend);
        const Context train = TestContext(&tape);
        const Tensor tx = ToTensor(ctx, x, {m, k});
        tape.Watch(tx);
        const Tensor out = Linear(train, tx, w.Slice(0, begin, end));
        const int64_t rows = end - begin;
        EXPECT_LE(ProductError(out, ReferenceLinear(x, part, {}, m, rows, k), Magnitude(x, part, m, rows, k)),
                  kProductTolerance)
            << DTypeName(dtype) << " " << begin << " " << end << " " << m;
        const Doubles g = RandomValues(rng, m * rows);
        tape.BackwardFrom({out}, {ToTensor(ctx, g, {m, rows})});
        Doubles want(static_cast<size_t>(m * k));
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < rows; ++j) {
            for (int64_t l = 0; l < k; ++l) want[i * k + l] += g[i * rows + j] * part[j * k + l];
          }
        }
        EXPECT_LE(RelativeError(tape.Grad(tx), want), kGradientTolerance) << DTypeName(dtype) << " " << begin;
      }
    }
  }
}

TEST(Linear, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(15);
  for (const auto& [m, n, k] : {Size{1, 1, 1}, Size{3, 5, 7}, Size{9, 33, 18}, Size{20, 3, 40}}) {
    for (bool strided : {false, true}) {
      Tape tape(BackendForTests());
      const Context ctx = TestContext(&tape);
      Doubles x = RandomValues(rng, m * k), weight = RandomValues(rng, n * k), bias = RandomValues(rng, n);
      const Doubles g = RandomValues(rng, m * n);
      const Tensor tx = ToTensor(ctx, x, {m, k}, strided), tw = ToTensor(ctx, weight, {n, k}),
                   tb = ToTensor(ctx, bias, {n});
      for (const Tensor& t : {tx, tw, tb}) tape.Watch(t);
      PoisonNext(ctx, {m, n});
      const Tensor out = Linear(ctx, tx, tw, tb);
      tape.BackwardFrom({out}, {ToTensor(ctx, g, {m, n})});
      auto loss = [&] { return Inner(g, ReferenceLinear(x, weight, bias, m, n, k)); };
      EXPECT_LE(RelativeError(tape.Grad(tx), CentralDifferences(x, loss)), kGradientTolerance);
      EXPECT_LE(RelativeError(tape.Grad(tw), CentralDifferences(weight, loss)), kGradientTolerance);
      EXPECT_LE(RelativeError(tape.Grad(tb), CentralDifferences(bias, loss)), kGradientTolerance);
    }
  }
}

// dx is linear in dout: each case is compared with the exact product. It adds to what is there.
TEST(Linear, InputGradientOfEveryStorageType) {
  std::mt19937 rng = TestRng(16);
  const Context ctx = TestContext();
  for (DType dtype : kStorageTypes) {
    const int64_t k = 2 * std::max<int64_t>(BlockElements(dtype), 48);
    for (int64_t n : {1, 8, 61, 300}) {
      const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
      const Doubles weight = StorageValues(dtype, bytes, n * k);
      const Tensor raw = StorageTensor(ctx, bytes, dtype, {n, k});
      for (int64_t m : {1, 2, 6, 19}) {
        const Doubles g = RandomValues(rng, m * n), start = RandomValues(rng, m * k);
        Doubles want = start;
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            for (int64_t l = 0; l < k; ++l) want[i * k + l] += g[i * n + j] * weight[j * k + l];
          }
        }
        for (const Tensor& w : {raw, PrepareWeight(ctx, raw)}) {
          const Tensor dx = ToTensor(ctx, start, {m, k}, true);
          LinearGradArgs args;
          args.weight = w;
          args.dout = ToTensor(ctx, g, {m, n}, true);
          args.dx = dx;
          ctx.kernels().LinearGrad(*ctx.backend, args);
          ASSERT_LE(RelativeError(dx, want), kForwardTolerance) << DTypeName(dtype) << " " << m << " " << n;
        }
      }
    }
  }
}

TEST(PrepareWeight, TakesNoMoreMemoryThanTheFile) {
  STILLHOUSE_CPU_ONLY();
  std::mt19937 rng = TestRng(17);
  const Context ctx = TestContext();
  for (DType dtype : kStorageTypes) {
    const int64_t n = 64, k = 1024;
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
    const Tensor raw = Tensor::Wrap(bytes.data(), dtype, {n, k});
    EXPECT_EQ(PrepareWeight(ctx, raw).bytes(), raw.bytes()) << DTypeName(dtype);
  }
}

TEST(PrepareWeight, LeavesPlainFloatsAlone) {
  const Context ctx = TestContext();
  const Tensor w = ToTensor(ctx, Doubles(32, 1.0), {4, 8});
  EXPECT_EQ(PrepareWeight(ctx, w).raw(), w.raw());
}

TEST(MatMul, MatchesReferenceForAnyStrides) {
  std::mt19937 rng = TestRng(18);
  const Context ctx = TestContext();
  for (const auto& [m, n, k] : {Size{1, 1, 1}, Size{3, 5, 7}, Size{17, 33, 65}, Size{40, 1, 9}, Size{1, 50, 400},
                                Size{64, 96, 128}, Size{5, 7, 0}, Size{0, 3, 2}, Size{130, 70, 350}}) {
    for (int64_t batch : {0, 1, 3}) {  // 0: matrices without a batch
      for (int layout = 0; layout < 16; ++layout) {
        const bool ta = layout & 1, tb = layout & 2, tc = layout & 4, strided = layout & 8;
        const int64_t count = std::max<int64_t>(batch, 1);
        const auto make = [&](const Doubles& values, int64_t rows, int64_t cols, bool transposed) {
          // Values are [count, rows, cols]; a transposed tensor stores [count, cols, rows].
          Shape shape = transposed ? Shape{count, cols, rows} : Shape{count, rows, cols};
          Doubles stored = values;
          if (transposed) {
            for (int64_t b = 0; b < count; ++b) {
              for (int64_t r = 0; r < rows; ++r) {
                for (int64_t c = 0; c < cols; ++c) {
                  stored[(b * cols + c) * rows + r] = values[(b * rows + r) * cols + c];
                }
              }
            }
          }
          Tensor t = ToTensor(ctx, stored, shape, strided);
          if (transposed) t = t.Transpose(1, 2);
          return batch == 0 ? t.Select(0, 0) : t;
        };
        const Doubles a = RandomValues(rng, count * m * k), b = RandomValues(rng, count * k * n),
                      start = RandomValues(rng, count * m * n);
        for (bool accumulate : {false, true}) {
          const double alpha = accumulate ? -0.75 : 2.5;
          Doubles want = start;
          for (int64_t i = 0; i < count * m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double sum = 0.0;
              for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[(i / m * k + l) * n + j];
              want[i * n + j] = alpha * sum + (accumulate ? want[i * n + j] : 0.0);
            }
          }
          const Tensor out = make(accumulate ? start : Doubles(start.size(), NAN), m, n, tc);
          MatMul(ctx, {make(a, m, k, ta), make(b, k, n, tb), out, static_cast<float>(alpha), accumulate});
          // Sums of a few terms of about 1 may nearly cancel.
          ASSERT_LE(RelativeError(ToDoubles(out), want, 0.1), kForwardTolerance)
              << m << " " << n << " " << k << " batch " << batch << " layout " << layout;
        }
      }
    }
  }
}

// The result of a product does not depend on the number of threads or on timing.
TEST(Linear, IsDeterministic) {
  std::mt19937 rng = TestRng(19);
  const Context ctx = TestContext();
  auto alone = MakeBackendForTests(1);
  const Context single{alone.get(), nullptr};
  const int64_t n = 200, k = 320;
  for (DType dtype : {DType::kF32, DType::kQ4_1, DType::kQ8_0, DType::kQ5_0}) {
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
    const Tensor w = PrepareWeight(ctx, Tensor::Wrap(bytes.data(), dtype, {n, k}));
    for (int64_t m : {1, 4, 16}) {
      const Tensor x = ToTensor(ctx, RandomValues(rng, m * k), {m, k});
      const std::vector<float> first = ctx.ToFloats(Linear(ctx, x, w));
      EXPECT_EQ(first, single.ToFloats(Linear(single, x, w))) << DTypeName(dtype) << m;
    }
  }
}

TEST(LinearDeathTest, RefusesShapesThatDoNotFit) {
  const Context ctx = TestContext();
  EXPECT_DEATH(Linear(ctx, ToTensor(ctx, Doubles(6, 1.0), {2, 3}), ToTensor(ctx, Doubles(8, 1.0), {2, 4})), "check");
}

}  // namespace
}  // namespace stillhouse::testing
