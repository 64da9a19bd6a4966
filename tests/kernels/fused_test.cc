// Fused ops against the plain ops that define them, in fp32 and, on CUDA, on bf16 weights.
#include "kernels/ops/fused.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/quant.h"
#include "kernels/ops/random_fill.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

// The backend under test; on CUDA, bf16 storage where it is asked for.
struct Device {
  std::unique_ptr<Backend> own;
  Context ctx;
};

Device MakeDevice(bool bf16) {
  Device device;
  if (!bf16) {
    device.ctx = TestContext();
  } else if (CudaForTests()) {
    CudaBackendOptions options;
    options.threads = 1;
    options.storage = CudaStorage::kBf16;
    auto backend = MakeCudaBackend(options);
    if (backend.ok()) device.own = *std::move(backend);
    device.ctx.backend = device.own.get();
  }
  return device;
}

Tensor Weight(const Context& ctx, int64_t rows, int64_t columns, bool bf16, uint64_t seed) {
  const Tensor raw = ctx.Empty(bf16 ? DType::kBF16 : DType::kF32, {rows, columns});
  RandomFill(ctx, {raw, 0.3f, seed});
  return raw;
}

Tensor Values(const Context& ctx, const Shape& shape, uint64_t seed) {
  const Tensor t = ctx.EmptyF32(shape);
  RandomFill(ctx, {t, 1.0f, seed});
  return t;
}

Doubles Floats(const Context& ctx, const Tensor& t) {
  std::vector<float> values(static_cast<size_t>(t.elements()));
  if (t.dtype() == DType::kBF16) {
    std::vector<uint16_t> bits(values.size());
    ctx.backend->Download(t, bits.data());
    for (size_t i = 0; i < bits.size(); ++i) values[i] = Bf16ToFloat(bits[i]);
  } else {
    values = ctx.ToFloats(t);
  }
  return Doubles(values.begin(), values.end());
}

// Row r of a pass goes to slot `slot_of(r)` of pages [layers, 2, kv_heads, slots, width]; one row is not kept.
KvRows KeptAt(const Context& ctx, const Tensor& pages, int64_t rows, const std::function<int64_t(int64_t)>& slot_of) {
  const int64_t bytes = BlockBytes(pages.dtype());
  std::vector<int64_t> places;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t k = reinterpret_cast<int64_t>(pages.raw()) + slot_of(r) * pages.stride(3) * bytes;
    places.push_back(r == 2 ? 0 : k);
    places.push_back(r == 2 ? 0 : k + pages.stride(1) * bytes);
  }
  KvRows kv;
  kv.places = ctx.Empty(DType::kI64, {rows, 2});
  ctx.backend->Upload(places.data(), kv.places);
  kv.layer_stride = pages.stride(0);
  kv.head_stride = pages.stride(2);
  kv.dtype = pages.dtype();
  return kv;
}

// Rows of a few and of many, widths that suit the kernel for few rows and widths that do not.
constexpr std::array<std::array<int64_t, 3>, 16> kShapes = {{{1, 64, 32},
                                                             {1, 576, 960},
                                                             {2, 1536, 576},
                                                             {2, 4096, 64},
                                                             {3, 576, 3072},
                                                             {8, 128, 96},
                                                             {9, 640, 64},
                                                             {16, 1536, 128},
                                                             {17, 576, 64},
                                                             {5, 72, 40},
                                                             {70, 72, 40},
                                                             {130, 576, 192},
                                                             {64, 576, 192},
                                                             {20, 4096, 64},
                                                             {33, 2048, 1024},
                                                             {1, 14336, 32}}};

class Fused : public ::testing::TestWithParam<bool> {};

TEST_P(Fused, ProductsAreTheirCompositions) {
  const Device device = MakeDevice(GetParam());
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  // bf16: the operands are rounded in both, at different places.
  const double tolerance = GetParam() ? 6e-3 : 1e-5;
  uint64_t seed = 1;
  for (const auto& [m, k, n] : kShapes) {
    SCOPED_TRACE(::testing::Message() << m << " rows, " << k << " to " << n);
    const Tensor x = Values(ctx, {m, k}, seed++), norm = Values(ctx, {k}, seed++);
    const Tensor w = Weight(ctx, n, k, GetParam(), seed++);
    const Tensor normed = RmsNorm(ctx, x, norm, 1e-5f);
    EXPECT_LE(RelativeError(Floats(ctx, NormLinear(ctx, x, norm, 1e-5f, w)), Floats(ctx, Linear(ctx, normed, w))),
              tolerance);

    const Tensor both = Linear(ctx, normed, w);
    const Tensor gates = SwiGlu(ctx, both.Slice(1, 0, n / 2), both.Slice(1, n / 2, n));
    const Tensor fused_gates = NormSwiGlu(ctx, x, norm, 1e-5f, w);
    EXPECT_LE(RelativeError(Floats(ctx, fused_gates), Floats(ctx, gates)), 2 * tolerance);

    const Tensor residual = Values(ctx, {m, n}, seed++), again = ctx.EmptyF32({m, n});
    ctx.backend->Copy(residual, again);
    const Doubles sum = Floats(ctx, Add(ctx, residual, Linear(ctx, x, w)));
    EXPECT_LE(RelativeError(Floats(ctx, LinearAdd(ctx, x, w, again)), sum), tolerance);

    // What the gates come as goes into the next product as it is.
    const Tensor down = Weight(ctx, 48, n / 2, GetParam(), seed++);
    const Tensor start = Values(ctx, {m, 48}, seed++), start_again = ctx.EmptyF32({m, 48});
    ctx.backend->Copy(start, start_again);
    const Doubles through = Floats(ctx, Add(ctx, start, Linear(ctx, gates, down)));
    EXPECT_LE(RelativeError(Floats(ctx, LinearAdd(ctx, fused_gates, down, start_again)), through), 2 * tolerance);
  }
}

TEST_P(Fused, LinearIsItsSumInFp64) {
  const Device device = MakeDevice(GetParam());
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  uint64_t seed = 100;
  constexpr std::array<std::array<int64_t, 2>, 7> kSizes = {
      {{576, 960}, {1536, 576}, {4096, 200}, {14336, 64}, {72, 40}, {8, 3}, {2304, 1000}}};
  for (const auto& [k, n] : kSizes) {
    const Tensor w = Weight(ctx, n, k, GetParam(), seed++), bias = Values(ctx, {n}, seed++);
    const Doubles weights = Floats(ctx, w), biases = Floats(ctx, bias);
    for (const int64_t m : {1, 2, 8, 9, 16, 17, 33, 64, 65}) {
      SCOPED_TRACE(::testing::Message() << m << " rows, " << k << " to " << n);
      const Tensor x = Values(ctx, {m, k}, seed++);
      Doubles rows = Floats(ctx, x), want(static_cast<size_t>(m * n), 0.0), with_bias;
      for (double& v : rows) v = GetParam() ? Bf16ToFloat(FloatToBf16(static_cast<float>(v))) : v;
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          double sum = 0.0;
          for (int64_t i = 0; i < k; ++i) sum += rows[r * k + i] * weights[c * k + i];
          want[r * n + c] = sum;
        }
      }
      with_bias = want;
      for (size_t i = 0; i < want.size(); ++i) with_bias[i] += biases[i % static_cast<size_t>(n)];
      EXPECT_LE(RelativeError(Floats(ctx, Linear(ctx, x, w)), want), 5e-6);
      EXPECT_LE(RelativeError(Floats(ctx, Linear(ctx, x, w, bias)), with_bias), 5e-6);
    }
  }
}

// Gates of many rows against fp64: their operands, the product and the result are each rounded to bf16.
TEST_P(Fused, GatesOfManyRowsAreTheirFormulaInFp64) {
  const Device device = MakeDevice(GetParam());
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  const auto rounded = [&](double v) { return GetParam() ? Bf16ToFloat(FloatToBf16(static_cast<float>(v))) : v; };
  const int64_t k = 192;
  constexpr std::array<std::array<int64_t, 2>, 5> kSizes = {{{64, 120}, {65, 120}, {200, 128}, {512, 384}, {650, 256}}};
  for (const auto& [m, ffn] : kSizes) {
    SCOPED_TRACE(::testing::Message() << m << " rows, " << ffn << " gates");
    const Tensor x = Values(ctx, {m, k}, 41), norm = Values(ctx, {k}, 42), w = Weight(ctx, 2 * ffn, k, GetParam(), 43);
    const Doubles rows = Floats(ctx, x), scale = Floats(ctx, norm), weights = Floats(ctx, w);
    Doubles want;
    for (int64_t r = 0; r < m; ++r) {
      double squares = 0.0;
      for (int64_t i = 0; i < k; ++i) squares += rows[r * k + i] * rows[r * k + i];
      Doubles normed;
      for (int64_t i = 0; i < k; ++i) {
        normed.push_back(rounded(rows[r * k + i] / std::sqrt(squares / static_cast<double>(k) + 1e-5) * scale[i]));
      }
      const auto product = [&](int64_t column) {
        double sum = 0.0;
        for (int64_t i = 0; i < k; ++i) sum += normed[i] * weights[column * k + i];
        return sum;
      };
      for (int64_t c = 0; c < ffn; ++c) {
        const double gate = product(c);
        want.push_back(gate / (1.0 + std::exp(-gate)) * product(ffn + c));
      }
    }
    EXPECT_LE(RelativeError(Floats(ctx, NormSwiGlu(ctx, x, norm, 1e-5f, w)), want), GetParam() ? 4e-3 : 1e-5);
  }
}

// What a sum leaves for the norm after it gives what the sum itself would.
TEST_P(Fused, NormsTakeWhatSumsLeave) {
  const Device device = MakeDevice(GetParam());
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  const FusedKernels& fused = ctx.backend->fused();
  uint64_t seed = 500;
  for (const auto& [m, k, n] : kShapes) {
    if (k > 4096) continue;
    for (const int64_t head : {64, 128, 80}) {
      const int64_t heads = 3, kv_heads = 2, all = (heads + 2 * kv_heads) * head;
      SCOPED_TRACE(::testing::Message() << m << " rows, " << k << " to " << n << ", heads of " << head);
      const Tensor w = Weight(ctx, n, k, GetParam(), seed++), norm = Values(ctx, {n}, seed++);
      const Tensor one = ctx.Floats(std::vector<float>(static_cast<size_t>(k), 1.0f), {k});
      const Tensor start = Values(ctx, {m, k}, seed++), gate_up = Weight(ctx, 2 * k, k, GetParam(), seed++);
      const Tensor x = NormSwiGlu(ctx, start, one, 1e-5f, gate_up);
      const Tensor residual = Values(ctx, {m, n}, seed++);
      ScaledRows scaled;
      const Tensor sum = LinearAdd(ctx, x, w, residual, norm, 1e-5f, &scaled);
      // Few rows in one launch, more where slices of a long K are added up.
      const bool left = CudaForTests() && GetParam();
      EXPECT_EQ(static_cast<bool>(scaled.values), left && (m <= 16 || k >= 2048));
      EXPECT_EQ(static_cast<bool>(scaled.squares), left && m <= 16);
      const Tensor next = Weight(ctx, all, n, GetParam(), seed++);
      const Doubles want = Floats(ctx, NormLinear(ctx, sum, norm, 1e-5f, next));
      EXPECT_LE(RelativeError(Floats(ctx, NormLinear(ctx, sum, norm, 1e-5f, next, scaled)), want), 6e-3);
      EXPECT_LE(RelativeError(Floats(ctx, NormSwiGlu(ctx, sum, norm, 1e-5f, next, scaled)),
                              Floats(ctx, NormSwiGlu(ctx, sum, norm, 1e-5f, next))),
                1.2e-2);
      if (!fused.has_steps()) continue;
      const Tensor positions = ctx.Ints(std::vector<int32_t>(static_cast<size_t>(m), 7), {m});
      RopeConfig config;
      config.rope_dim = head;
      config.inv_freq = RopeFrequencies(10000.0, head);
      const Tensor angles = ctx.EmptyF32({m, head});
      fused.RopeAngles(*ctx.backend, {positions, angles, &config});
      const int64_t slots = m + 1;
      // In one with the product, or after it.
      const auto turned = [&](const ScaledRows& rows, const Tensor& pages, bool interleaved, bool at_once) {
        ctx.backend->Zero(pages);
        const KvRows kv = KeptAt(ctx, pages, m, [](int64_t r) { return r; });
        const Tensor out = ctx.EmptyF32({m, all});
        QkvRopeArgs turn{out.Reshape({m, heads + 2 * kv_heads, head}), heads, kv_heads, {}, {}, 1e-5f, angles};
        turn.rows = &kv;
        turn.layer = 1;
        turn.interleaved = interleaved;
        const NormLinearArgs product{sum, norm, next, out, 1e-5f, rows};
        if (at_once) {
          fused.NormQkvRope(*ctx.backend, {product, turn});
        } else {
          fused.NormLinear(*ctx.backend, product);
          fused.QkvRope(*ctx.backend, turn);
        }
        return Floats(ctx, out);
      };
      const Tensor pages = ctx.Empty(DType::kBF16, {2, 2, kv_heads, slots, head}),
                   again = ctx.Empty(DType::kBF16, pages.shape());
      for (const bool interleaved : {false, true}) {
        const Doubles plain = turned({}, pages, interleaved, false);
        for (const ScaledRows& rows : {ScaledRows(), scaled}) {
          EXPECT_LE(RelativeError(turned(rows, again, interleaved, true), plain), 6e-3);
          EXPECT_LE(RelativeError(Floats(ctx, again), Floats(ctx, pages)), 1e-2);
        }
      }
    }
  }
}

TEST_P(Fused, ProductsOfFewRowsAreTheSameBitsEveryTime) {
  const Device device = MakeDevice(GetParam());
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  const Tensor x = Values(ctx, {4, 1536}, 1), w = Weight(ctx, 576, 1536, GetParam(), 2);
  const Doubles first = Floats(ctx, Linear(ctx, x, w));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Floats(ctx, Linear(ctx, x, w)), first);
}

INSTANTIATE_TEST_SUITE_P(Storage, Fused, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "bf16" : "f32"; });

// Norms, rotation and appends in one against RmsNorm, Rope and CopyRows.
TEST(QkvRope, IsNormsRotationAndAppends) {
  const Context ctx = TestContext();
  const FusedKernels& fused = ctx.backend->fused();
  if (!fused.has_steps()) GTEST_SKIP() << "composed on this backend";
  for (const bool interleaved : {false, true}) {
    for (const bool norms : {false, true}) {
      for (const bool bf16 : {false, true}) {
        for (const int64_t pairs : {8, 32, 20}) {
          const int64_t rows = 5, heads = 6, kv_heads = 2, width = 64, slots = 7, layers = 3, layer = 1;
          RopeConfig config;
          config.layout = interleaved ? RopeLayout::kInterleaved : RopeLayout::kHalf;
          config.rope_dim = 2 * pairs;
          config.inv_freq = RopeFrequencies(10000.0, config.rope_dim);
          config.attention_scale = 1.25f;
          const std::vector<int32_t> at = {0, 1, 77, 5000, 131071};
          const Tensor positions = ctx.Ints(at, {rows});
          const Tensor qkv = Values(ctx, {rows, heads + 2 * kv_heads, width}, 3), plain = ctx.EmptyF32(qkv.shape());
          ctx.backend->Copy(qkv, plain);
          const Tensor q_norm = norms ? Values(ctx, {width}, 4) : Tensor();
          const Tensor k_norm = norms ? Values(ctx, {width}, 5) : Tensor();
          const Tensor pages = ctx.Empty(bf16 ? DType::kBF16 : DType::kF32, {layers, 2, kv_heads, slots, width});
          ctx.backend->Zero(pages);
          const KvRows kv = KeptAt(ctx, pages, rows, [](int64_t r) { return 3 * r % slots; });
          const Tensor angles = ctx.EmptyF32({rows, 2 * pairs});
          fused.RopeAngles(*ctx.backend, {positions, angles, &config});
          QkvRopeArgs args{qkv, heads, kv_heads, q_norm, k_norm, 1e-6f, angles, interleaved, &kv, layer};
          fused.QkvRope(*ctx.backend, args);

          Tensor q = plain.Slice(1, 0, heads), k = plain.Slice(1, heads, heads + kv_heads);
          const Tensor v = plain.Slice(1, heads + kv_heads, heads + 2 * kv_heads);
          if (norms) q = RmsNorm(ctx, q, q_norm, 1e-6f), k = RmsNorm(ctx, k, k_norm, 1e-6f);
          q = Rope(ctx, q, positions, config);
          k = Rope(ctx, k, positions, config);
          EXPECT_LE(RelativeError(Floats(ctx, qkv.Slice(1, 0, heads)), Floats(ctx, q)), 1e-6);
          EXPECT_LE(RelativeError(Floats(ctx, qkv.Slice(1, heads, heads + kv_heads)), Floats(ctx, k)), 1e-6);
          EXPECT_EQ(Floats(ctx, qkv.Slice(1, heads + kv_heads, heads + 2 * kv_heads)), Floats(ctx, v));
          Doubles want(static_cast<size_t>(pages.elements()), 0.0);
          const Doubles keys = Floats(ctx, k), values = Floats(ctx, v);
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t h = 0; h < kv_heads && r != 2; ++h) {
              for (int64_t i = 0; i < width; ++i) {
                const int64_t to = layer * pages.stride(0) + h * pages.stride(2) + 3 * r % slots * width + i;
                want[to] = keys[(r * kv_heads + h) * width + i];
                want[to + pages.stride(1)] = values[(r * kv_heads + h) * width + i];
              }
            }
          }
          EXPECT_LE(RelativeError(Floats(ctx, pages), want), bf16 ? 3e-3 : 1e-6);
        }
      }
    }
  }
}

// Rows of bf16 are the rows of f32 that they hold, turned, and rounded once.
TEST(QkvRope, TurnsRowsOfBf16) {
  const Context ctx = TestContext();
  const FusedKernels& fused = ctx.backend->fused();
  if (!fused.has_steps()) GTEST_SKIP() << "f32 only on this backend";
  for (const bool interleaved : {false, true}) {
    for (const bool norms : {false, true}) {
      for (const int64_t width : {64, 128, 256}) {
        SCOPED_TRACE(::testing::Message()
                     << "heads of " << width << ", interleaved " << interleaved << ", norms " << norms);
        const int64_t rows = 67, heads = 5, kv_heads = 2, all = heads + 2 * kv_heads, layer = 1;
        RopeConfig config;
        config.layout = interleaved ? RopeLayout::kInterleaved : RopeLayout::kHalf;
        config.rope_dim = width;
        config.inv_freq = RopeFrequencies(10000.0, width);
        std::vector<int32_t> at;
        for (int32_t r = 0; r < rows; ++r) at.push_back(1 + 1900 * r);
        const Tensor positions = ctx.Ints(at, {rows}), angles = ctx.EmptyF32({rows, width});
        fused.RopeAngles(*ctx.backend, {positions, angles, &config});
        const Tensor q_norm = norms ? Values(ctx, {width}, 4) : Tensor();
        const Tensor k_norm = norms ? Values(ctx, {width}, 5) : Tensor();
        const Tensor narrow = ctx.Empty(DType::kBF16, {rows, all, width});
        RandomFill(ctx, {narrow, 1.0f, 3});
        const Doubles values = Floats(ctx, narrow);
        const Tensor wide = ctx.Floats(std::vector<float>(values.begin(), values.end()), narrow.shape());
        const auto turned = [&](const Tensor& qkv, const Tensor& pages) {
          ctx.backend->Zero(pages);
          const KvRows kv = KeptAt(ctx, pages, rows, [&](int64_t r) { return rows - r; });
          QkvRopeArgs args{qkv, heads, kv_heads, q_norm, k_norm, 1e-6f, angles, interleaved, &kv, layer};
          fused.QkvRope(*ctx.backend, args);
          return Floats(ctx, qkv);
        };
        const Tensor pages = ctx.Empty(DType::kBF16, {2, 2, kv_heads, rows + 1, width});
        const Tensor wide_pages = ctx.Empty(DType::kBF16, pages.shape());
        const Doubles want = turned(wide, wide_pages);
        EXPECT_LE(RelativeError(turned(narrow, pages), want), 3e-3);
        EXPECT_LE(RelativeError(Floats(ctx, pages), Floats(ctx, wide_pages)), 3e-4);
      }
    }
  }
}

// A product of many rows may go to rows of bf16.
TEST(QkvRope, TakesProductsOfManyRowsAsBf16) {
  const Device device = MakeDevice(true);
  if (!device.ctx.backend) GTEST_SKIP() << "no bf16 storage here";
  const Context& ctx = device.ctx;
  const FusedKernels& fused = ctx.backend->fused();
  const int64_t rows = kCachedRows + 6, k = 320, heads = 3, kv_heads = 1, all = heads + 2 * kv_heads, width = 64;
  const Tensor x = Values(ctx, {rows, k}, 1), norm = Values(ctx, {k}, 2), w = Weight(ctx, all * width, k, true, 3);
  RopeConfig config;
  config.rope_dim = width;
  config.inv_freq = RopeFrequencies(10000.0, width);
  const Tensor positions = ctx.Ints(std::vector<int32_t>(static_cast<size_t>(rows), 77), {rows});
  const Tensor angles = ctx.EmptyF32({rows, width});
  fused.RopeAngles(*ctx.backend, {positions, angles, &config});
  const auto run = [&](DType dtype) {
    const Tensor out = ctx.Empty(dtype, {rows, all * width});
    QkvRopeArgs turn{out.Reshape({rows, all, width}), heads, kv_heads, {}, {}, 1e-5f, angles};
    fused.NormQkvRope(*ctx.backend, {{x, norm, w, out, 1e-5f}, turn});
    return Floats(ctx, out);
  };
  // Rounded twice: as the product, and turned.
  EXPECT_LE(RelativeError(run(DType::kBF16), run(DType::kF32)), 4e-3);
}

TEST(QkvRope, CopiesRowsBetweenTypes) {
  const Context ctx = TestContext();
  if (!ctx.backend->fused().has_steps()) GTEST_SKIP() << "f32 only on this backend";
  const Tensor from = Values(ctx, {9, 3, 20}, 1), narrow = ctx.Empty(DType::kBF16, {3, 12, 20});
  const Tensor back = ctx.EmptyF32({3, 9, 20});
  ctx.backend->Zero(narrow);
  CopyRows(ctx, {from, narrow, 2, 7, 4});
  CopyRows(ctx, {narrow.Slice(1, 4, 11).Transpose(0, 1), back, 0, 7, 1});
  const std::vector<float> x = ctx.ToFloats(from), y = ctx.ToFloats(back);
  for (int64_t h = 0; h < 3; ++h) {
    for (int64_t r = 0; r < 7; ++r) {
      for (int64_t i = 0; i < 20; ++i) {
        ASSERT_EQ(y[(h * 9 + r + 1) * 20 + i], Bf16ToFloat(FloatToBf16(x[((r + 2) * 3 + h) * 20 + i])));
      }
    }
  }
}

}  // namespace
}  // namespace stillhouse::testing
