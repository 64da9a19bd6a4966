// Plans are obeyed: products with a bf16 weight, alone and fused, go the way that a plan says. On CUDA; every test has
// shapes of its own, for plans that are in use stay so.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/base/strings.h"
#include "kernels/ops/decompose_k.h"
#include "kernels/ops/fused.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/quant.h"
#include "kernels/ops/random_fill.h"
#include "kernels/plan/plans_in_use.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

std::unique_ptr<Backend> MakeBf16Backend() {
  if (!CudaForTests()) return nullptr;
  CudaBackendOptions options;
  options.threads = 1;
  options.storage = CudaStorage::kBf16;
  auto backend = MakeCudaBackend(options);
  return backend.ok() ? *std::move(backend) : nullptr;
}

// "cuda NVIDIA H200 bf16" is of the GPU "NVIDIA H200".
std::string GpuOf(const Backend& backend) {
  const std::string name = backend.name();
  const size_t begin = name.find(' ') + 1;
  return name.substr(begin, name.rfind(' ') - begin);
}

// A backend that also runs by this plan.
std::unique_ptr<Backend> WithPlan(const Backend& other, const DecomposeKKey& key, const DecomposeKPlan& plan) {
  PlanBook book;
  DecomposeKKey of_gpu = key;
  of_gpu.gpu = GpuOf(other);
  book.Add(of_gpu, {plan, 0.0});
  UsePlans(book);
  return MakeBf16Backend();
}

DecomposeKKey KeyOf(int64_t m, int64_t n, int64_t k, PlanEpilogue epilogue) {
  DecomposeKKey key;
  key.m = BucketOf(m);
  key.n = n;
  key.k = k;
  key.layout = PlanLayout::kBColumns;
  key.epilogue = epilogue;
  return key;
}

Tensor Random(const Context& ctx, DType dtype, const Shape& shape, uint64_t seed) {
  const Tensor t = ctx.Empty(dtype, shape);
  RandomFill(ctx, {t, dtype == DType::kBF16 ? 0.3f : 1.0f, seed});
  return t;
}

std::vector<float> Values(const Context& ctx, const Tensor& t) {
  if (t.dtype() != DType::kBF16) return ctx.ToFloats(t);
  std::vector<uint16_t> bits(static_cast<size_t>(t.elements()));
  ctx.backend->Download(t, bits.data());
  std::vector<float> values;
  for (uint16_t b : bits) values.push_back(Bf16ToFloat(b));
  return values;
}

Doubles Widened(const std::vector<float>& values) { return Doubles(values.begin(), values.end()); }

// x · weightᵀ of rows rounded to bf16.
Doubles Product(const Context& ctx, const Tensor& x, const Tensor& weight) {
  const std::vector<float> rows = Values(ctx, x), w = Values(ctx, weight);
  const int64_t m = x.dim(0), n = weight.dim(0), k = x.dim(1);
  Doubles out(static_cast<size_t>(m * n), 0.0);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      double sum = 0.0;
      for (int64_t i = 0; i < k; ++i) {
        sum += static_cast<double>(Bf16ToFloat(FloatToBf16(rows[r * k + i]))) * static_cast<double>(w[c * k + i]);
      }
      out[static_cast<size_t>(r * n + c)] = sum;
    }
  }
  return out;
}

TEST(LinearPlan, LinearRunsDecomposeKWhereAPlanSaysSo) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  const int64_t m = 5, n = 136, k = 2048;
  const Context before{plain.get()};
  const Tensor x = Random(before, DType::kF32, {m, k}, 1), w = Random(before, DType::kBF16, {n, k}, 2);
  const std::vector<float> by_itself = before.ToFloats(Linear(before, x, w));
  const auto planned = WithPlan(*plain, KeyOf(m, n, k, PlanEpilogue::kNone), {DecomposeKWay::kSlices, 16, 32, 8});
  const Context ctx{planned.get()};
  const std::vector<float> got = ctx.ToFloats(Linear(ctx, x, w));
  // The bits of the op of that name, which are not those of the kernel for few rows.
  std::vector<uint16_t> rounded;
  for (float v : ctx.ToFloats(x)) rounded.push_back(FloatToBf16(v));
  const Tensor a = ctx.Empty(DType::kBF16, {m, k});
  ctx.backend->Upload(rounded.data(), a);
  DecomposeKOptions options;
  options.design = DecomposeKDesign::kTwoLaunches;
  options.splits = 8;
  EXPECT_EQ(got, ctx.ToFloats(DecomposeK(ctx, a, w.Transpose(0, 1), options)));
  EXPECT_NE(got, by_itself);
  EXPECT_LE(RelativeError(Widened(got), Product(ctx, x, w)), 5e-6);
  // Other rows have no plan.
  const Tensor row = x.Slice(0, 0, 1);
  EXPECT_EQ(ctx.ToFloats(Linear(ctx, row, w)), before.ToFloats(Linear(before, row, w)));
}

using Way = DecomposeKWay;
struct Case {
  int64_t m, n, k;
  DecomposeKPlan plan;
};

// Every way, with a bias and without, also into a row that is a part of a wider one, and in steps that are recorded.
TEST(LinearPlan, EveryWayIsTheProduct) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  const Case kCases[] = {
      {1, 40, 4096, {Way::kSlices, 16, 16, 16}},         {1, 48, 4096, {Way::kExchange, 16, 16, 16}},
      {7, 56, 4096, {Way::kExchange, 16, 32, 32}},       {16, 72, 4096, {Way::kExchange, 16, 64, 64}},
      {16, 80, 4096, {Way::kCluster, 16, 16, 8}},        {30, 88, 4096, {Way::kExchange, 32, 32, 11}},
      {64, 100, 4096, {Way::kExchange, 32, 64, 3}},      {70, 104, 4096, {Way::kExchange, 64, 64, 5}},
      {130, 112, 4096, {Way::kExchange, 128, 64, 16}},   {64, 64, 8192, {Way::kWarpgroups, 64, 64, 128}},
      {1, 200, 4096, {Way::kWarpgroups, 64, 64, 30}},    {70, 92, 4096, {Way::kWarpgroups, 64, 64, 6}},
      {40, 135, 4160, {Way::kWarpgroups, 64, 64, 13}},   {250, 257, 2048, {Way::kWarpgroups, 128, 64, 16}},
      {150, 60, 2048, {Way::kWarpgroups, 128, 64, 5}},   {65, 131, 320, {Way::kWarpgroups, 128, 64, 1}},
      {64, 208, 4096, {Way::kWarpgroups, 64, 256, 16}},  {50, 116, 4096, {Way::kWarpgroups, 64, 128, 33}},
      {129, 300, 1088, {Way::kWarpgroups, 128, 256, 9}}, {260, 124, 2048, {Way::kWarpgroups, 256, 128, 8}},
      {256, 256, 1344, {Way::kWarpgroups, 256, 256, 5}}, {200, 250, 1104, {Way::kWarpgroups, 256, 256, 3}},
      {70, 254, 304, {Way::kWarpgroups, 256, 128, 1}},   {90, 64, 640, {Way::kWarpgroups, 256, 64, 5}},
      {33, 120, 4096, {Way::kSlices, 32, 32, 1}},        {9, 128, 4096, {Way::kLibrary, 16, 16, 1}},
      {3, 136, 4096, {Way::kSkinny, 16, 16, 1}},         {64, 144, 4096, {Way::kLibrary, 16, 16, 4}},
      {20, 152, 4096, {Way::kLibrary, 16, 16, 16}},      {64, 4096, 512, {Way::kLibrary, 64, 96, 1}},
      {40, 1024, 1024, {Way::kLibrary, 64, 128, 2}},     {64, 108, 4096, {Way::kWide, 64, 64, 3}},
      {17, 1000, 1048, {Way::kWide, 64, 64, 5}},         {128, 257, 2048, {Way::kWide, 64, 96, 4}},
      {40, 139, 4168, {Way::kWide, 64, 128, 13}},        {100, 999, 1000, {Way::kWide, 64, 256, 1}},
      {33, 1536, 256, {Way::kWide, 64, 160, 4}},         {65, 448, 320, {Way::kWide, 64, 224, 1}},
      {70, 388, 640, {Way::kWide, 64, 192, 2}},          {20, 20000, 72, {Way::kWide, 64, 64, 1}},
      {127, 9002, 128, {Way::kWide, 64, 64, 2}},
  };
  const int repeats = SmallTests() ? 1 : 4;
  uint64_t seed = 10;
  for (const Case& c : kCases) {
    SCOPED_TRACE(PlanBook::PrintLine(KeyOf(c.m, c.n, c.k, PlanEpilogue::kNone), {c.plan, 0.0}));
    const auto backend = WithPlan(*plain, KeyOf(c.m, c.n, c.k, PlanEpilogue::kNone), c.plan);
    const Context ctx{backend.get()};
    const Tensor x = Random(ctx, DType::kF32, {c.m, c.k}, seed++), w = Random(ctx, DType::kBF16, {c.n, c.k}, seed++);
    const Tensor bias = Random(ctx, DType::kF32, {c.n}, seed++);
    const Doubles want = Product(ctx, x, w);
    PoisonNext(ctx, {c.m, c.n});
    const std::vector<float> got = ctx.ToFloats(Linear(ctx, x, w));
    EXPECT_LE(RelativeError(Widened(got), want), 5e-6);
    for (int i = 0; i < repeats; ++i) ASSERT_EQ(ctx.ToFloats(Linear(ctx, x, w)), got);
    Doubles biased = want;
    const std::vector<float> biases = ctx.ToFloats(bias);
    for (size_t i = 0; i < want.size(); ++i) biased[i] += static_cast<double>(biases[i % biases.size()]);
    EXPECT_LE(RelativeError(Widened(ctx.ToFloats(Linear(ctx, x, w, bias))), biased), 5e-6);
    // A recorded step runs again on other rows.
    const Tensor rows = ctx.EmptyF32({c.m, c.k}), out = ctx.EmptyF32({c.m, c.n});
    backend->Zero(rows);
    const auto step = backend->Record([&] { ctx.kernels().Linear(*backend, {rows, w, Tensor(), out}); });
    ASSERT_NE(step, nullptr);
    for (int i = 0; i < repeats; ++i) {
      backend->Copy(x, rows);
      step->Run();
      EXPECT_EQ(ctx.ToFloats(out), got);
      backend->Zero(rows);
      step->Run();
      EXPECT_EQ(ctx.ToFloats(out), std::vector<float>(got.size(), 0.0f));
    }
  }
}

// The ops that end in one launch by themselves: a plan may say that they go apart.
TEST(LinearPlan, FusedOpsGoApartWhereAPlanSaysSo) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  const int64_t m = 6, n = 320, k = 1600;
  const Context before{plain.get()};
  const Tensor x = Random(before, DType::kF32, {m, k}, 50), w = Random(before, DType::kBF16, {n, k}, 51);
  const Tensor norm = Random(before, DType::kF32, {k}, 52), next_norm = Random(before, DType::kF32, {n}, 53);
  const Tensor half = Random(before, DType::kBF16, {m, k}, 55);
  const Tensor residual = Random(before, DType::kF32, {m, n}, 54);
  const auto sum = [&](const Context& ctx, ScaledRows* scaled) {
    const Tensor to = ctx.EmptyF32({m, n});
    ctx.backend->Copy(residual, to);
    return Values(ctx, LinearAdd(ctx, half, w, to, next_norm, 1e-5f, scaled));
  };
  const auto gates = [&](const Context& ctx) { return Values(ctx, NormSwiGlu(ctx, x, norm, 1e-5f, w)); };
  const auto turned = [&](const Context& ctx) {
    std::vector<float> angles(static_cast<size_t>(m * 64), 0.6f);
    const Tensor out = ctx.EmptyF32({m, n});
    QkvRopeArgs turn{out.Reshape({m, n / 64, 64}), n / 64 - 2, 1};
    turn.angles = ctx.Floats(angles, {m, 64});
    ctx.backend->fused().NormQkvRope(*ctx.backend, {{x, norm, w, out, 1e-5f, {}}, turn});
    return Values(ctx, out);
  };
  // Rows that a sum left scaled, times another weight.
  const Tensor total = before.EmptyF32({m, n}), next = Random(before, DType::kBF16, {192, n}, 56);
  before.backend->Copy(residual, total);
  ScaledRows left, scaled;
  LinearAdd(before, half, w, total, next_norm, 1e-5f, &left);
  const auto normed = [&](const Context& ctx) {
    return Values(ctx, NormLinear(ctx, total, next_norm, 1e-5f, next, left));
  };
  const std::vector<float> sum_before = sum(before, &scaled), gates_before = gates(before),
                           turned_before = turned(before), normed_before = normed(before);
  EXPECT_TRUE(scaled.values);
  for (const DecomposeKPlan& plan :
       {DecomposeKPlan{DecomposeKWay::kSlices, 16, 32, 5}, DecomposeKPlan{DecomposeKWay::kExchange, 16, 16, 5}}) {
    std::unique_ptr<Backend> backend;
    for (PlanEpilogue ending : {PlanEpilogue::kScaledRows, PlanEpilogue::kGlu, PlanEpilogue::kTurn}) {
      backend = WithPlan(*plain, KeyOf(m, n, k, ending), plan);
    }
    backend = WithPlan(*plain, KeyOf(m, 192, n, PlanEpilogue::kNormed), plan);
    const Context ctx{backend.get()};
    const std::vector<float> sum_apart = sum(ctx, &scaled), gates_apart = gates(ctx), turned_apart = turned(ctx),
                             normed_apart = normed(ctx);
    // Slices are added up by what normalises the sum.
    EXPECT_EQ(static_cast<bool>(scaled.values), plan.way == DecomposeKWay::kSlices);
    EXPECT_FALSE(scaled.squares);
    EXPECT_NE(sum_apart, sum_before);
    EXPECT_NE(turned_apart, turned_before);
    EXPECT_LE(RelativeError(Widened(sum_apart), Widened(sum_before)), 5e-6);
    EXPECT_LE(RelativeError(Widened(gates_apart), Widened(gates_before)), 8e-3);
    EXPECT_LE(RelativeError(Widened(turned_apart), Widened(turned_before)), 5e-6);
    // Rounded at another place.
    EXPECT_NE(normed_apart, normed_before);
    EXPECT_LE(RelativeError(Widened(normed_apart), Widened(normed_before)), 6e-3);
  }
}

// Sums whose norm adds the slices of the product up, against fp64; the same bits in recorded steps.
TEST(LinearPlan, NormsAddSlicesUp) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  const Case kCases[] = {
      {17, 324, 4096, {Way::kLibrary, 16, 16, 2}},  {33, 4096, 2048, {Way::kLibrary, 64, 96, 4}},
      {64, 580, 2688, {Way::kLibrary, 16, 16, 7}},  {64, 1024, 4096, {Way::kSlices, 32, 64, 5}},
      {100, 192, 1000, {Way::kLibrary, 16, 16, 3}}, {24, 8516, 1024, {Way::kLibrary, 16, 16, 2}},
      {6, 1092, 2048, {Way::kSlices, 16, 32, 4}},   {140, 4608, 1024, {Way::kLibrary, 16, 16, 2}},
      {20, 2052, 1024, {Way::kLibrary, 64, 64, 8}}, {64, 588, 2048, {Way::kWarpgroups, 64, 64, 8}},
      {64, 1028, 4096, {Way::kWide, 64, 128, 4}},   {17, 580, 1000, {Way::kWide, 64, 96, 16}},
      {128, 1540, 1024, {Way::kWide, 64, 256, 7}},  {100, 4100, 512, {Way::kWide, 64, 160, 2}},
  };
  constexpr float kEps = 1e-3f;
  uint64_t seed = 200;
  for (const Case& c : kCases) {
    const int64_t m = c.m, n = c.n, k = c.k;
    // K need not divide by a library's slices: then it goes as a whole.
    const bool slices = c.plan.way != Way::kLibrary || k % (8 * c.plan.splits) == 0;
    const auto backend = WithPlan(*plain, KeyOf(m, n, k, PlanEpilogue::kScaledRows), c.plan);
    SCOPED_TRACE(PlanBook::PrintLine(KeyOf(m, n, k, PlanEpilogue::kScaledRows), {c.plan, 0.0}));
    const Context ctx{backend.get()};
    const Tensor x = Random(ctx, DType::kBF16, {m, k}, seed++), w = Random(ctx, DType::kBF16, {n, k}, seed++);
    const Tensor residual = Random(ctx, DType::kF32, {m, n}, seed++), norm = Random(ctx, DType::kF32, {n}, seed++);
    const Doubles product = Product(ctx, x, w);

    Doubles sums = Widened(ctx.ToFloats(residual)), normed(sums.size());
    const std::vector<float> weights = ctx.ToFloats(norm);
    for (int64_t r = 0; r < m; ++r) {
      double squares = 0.0;
      for (int64_t i = r * n; i < (r + 1) * n; ++i) {
        sums[i] += product[i];
        squares += sums[i] * sums[i];
      }
      for (int64_t i = 0; i < n; ++i) {
        normed[r * n + i] = sums[r * n + i] / std::sqrt(squares / static_cast<double>(n) + kEps) * weights[i];
      }
    }
    const Tensor to = ctx.EmptyF32({m, n});
    ScaledRows scaled;
    const auto add = [&] {
      backend->Copy(residual, to);
      LinearAdd(ctx, x, w, to, norm, kEps, &scaled);
    };
    PoisonNext(ctx, {c.plan.splits, m, n});
    add();
    const std::vector<float> got = ctx.ToFloats(to);
    EXPECT_LE(RelativeError(Widened(got), sums), 5e-6);
    ASSERT_EQ(static_cast<bool>(scaled.values), slices);
    EXPECT_FALSE(scaled.squares);
    // Rounded to bf16 once.
    if (slices) {
      EXPECT_LE(RelativeError(Widened(Values(ctx, scaled.values)), normed), 2e-3);
    }
    for (int i = 0; i < 5; ++i) {
      add();
      ASSERT_EQ(ctx.ToFloats(to), got);
    }
    const auto step = backend->Record(add);
    ASSERT_NE(step, nullptr);
    backend->Zero(to);
    step->Run();
    EXPECT_EQ(ctx.ToFloats(to), got);
  }
}

// Without a plan, tens of rows stream a large weight: sums are left in slices, gates come of one launch.
TEST(LinearPlan, LargeWeightsAreStreamedByTheirShape) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  const int64_t m = 50, n = 4104, k = 2056;
  const Context ctx{plain.get()};
  const Tensor x = Random(ctx, DType::kBF16, {m, k}, 400), w = Random(ctx, DType::kBF16, {n, k}, 401);
  const Tensor rows = Random(ctx, DType::kF32, {m, k}, 402), row_norm = Random(ctx, DType::kF32, {k}, 403);
  const Tensor norm = Random(ctx, DType::kF32, {n}, 404);
  const auto sum = [&](const Context& of) {
    const Tensor to = of.EmptyF32({m, n});
    of.backend->Zero(to);
    ScaledRows scaled;
    LinearAdd(of, x, w, to, norm, 1e-5f, &scaled);
    EXPECT_TRUE(scaled.values || of.backend != plain.get());
    return Values(of, to);
  };
  const auto gates = [&](const Context& of) { return Values(of, NormSwiGlu(of, rows, row_norm, 1e-5f, w)); };
  const std::vector<float> streamed_sum = sum(ctx), streamed_gates = gates(ctx);
  const DecomposeKPlan library{Way::kLibrary, 16, 16, 1};
  WithPlan(*plain, KeyOf(m, n, k, PlanEpilogue::kGlu), library);
  const auto other = WithPlan(*plain, KeyOf(m, n, k, PlanEpilogue::kScaledRows), library);
  const Context by_library{other.get()};
  const std::vector<float> library_sum = sum(by_library), library_gates = gates(by_library);
  EXPECT_NE(streamed_sum, library_sum);
  EXPECT_LE(RelativeError(Widened(streamed_sum), Widened(library_sum)), 5e-6);
  EXPECT_LE(RelativeError(Widened(streamed_gates), Widened(library_gates)), 8e-3);
}

// Gates in one launch, and heads whose rotation adds the slices up: what the library and launches of their own make.
TEST(LinearPlan, WideProductsEndInGatesAndRotations) {
  const auto plain = MakeBf16Backend();
  if (!plain) GTEST_SKIP() << "no bf16 storage here";
  struct Tens {
    int64_t m, ffn, heads, k;
    int gate_tile, turn_tile, splits;
    bool norms, interleaved, bf16;
  };
  constexpr int64_t kWidth = 64;
  uint64_t seed = 300;
  for (const Tens& c :
       {Tens{17, 100, 5, 328, 64, 64, 2, false, false, false}, Tens{33, 1504, 7, 1000, 160, 96, 5, true, false, true},
        Tens{48, 228, 11, 64, 256, 256, 1, true, true, false}, Tens{64, 896, 24, 2048, 224, 128, 4, false, false, true},
        Tens{65, 404, 6, 512, 96, 192, 3, true, true, true}, Tens{128, 9000, 9, 256, 128, 224, 2, true, false, false},
        Tens{50, 64, 7, 2048, 192, 160, 9, false, true, true}}) {
    SCOPED_TRACE(StrCat(c.m, " rows"));
    const int64_t heads = c.heads, n = heads * kWidth;
    WithPlan(*plain, KeyOf(c.m, 2 * c.ffn, c.k, PlanEpilogue::kGlu), {Way::kWide, 64, c.gate_tile, 1});
    // Heads that are normalised are a product without an ending.
    const PlanEpilogue ending = c.norms ? PlanEpilogue::kNone : PlanEpilogue::kTurn;
    const auto backend = WithPlan(*plain, KeyOf(c.m, n, c.k, ending), {Way::kWide, 64, c.turn_tile, c.splits});
    const Context before{plain.get()}, ctx{backend.get()};
    const Tensor x = Random(ctx, DType::kF32, {c.m, c.k}, seed++), norm = Random(ctx, DType::kF32, {c.k}, seed++);
    const Tensor gate_up = Random(ctx, DType::kBF16, {2 * c.ffn, c.k}, seed++);
    const Tensor qkv = Random(ctx, DType::kBF16, {n, c.k}, seed++);
    const Tensor q_norm = c.norms ? Random(ctx, DType::kF32, {kWidth}, seed++) : Tensor();
    const Tensor k_norm = c.norms ? Random(ctx, DType::kF32, {kWidth}, seed++) : Tensor();
    std::vector<float> angles(static_cast<size_t>(c.m * kWidth));
    for (size_t i = 0; i < angles.size(); ++i) angles[i] = std::cos(static_cast<float>(i));
    const auto gates = [&](const Context& of) { return Values(of, NormSwiGlu(of, x, norm, 1e-5f, gate_up)); };
    struct Turned {
      std::vector<float> rows, kept;
    };
    const auto turned = [&](const Context& of) {
      PoisonNext(of, {c.splits, c.m, n});
      const DType dtype = c.bf16 ? DType::kBF16 : DType::kF32;
      const Tensor out = of.EmptyF32({c.m, n}), pages = of.Empty(dtype, {2, 2, c.m, kWidth});
      of.backend->Zero(pages);
      std::vector<int64_t> places;
      for (int64_t r = 0; r < c.m; ++r) {
        for (int64_t kind = 0; kind < 2; ++kind) {
          places.push_back(reinterpret_cast<int64_t>(pages.Slice(0, kind, kind + 1).Slice(2, r, r + 1).raw()));
        }
      }
      KvRows kv;
      kv.places = of.Empty(DType::kI64, {c.m, 2});
      of.backend->Upload(places.data(), kv.places);
      kv.head_stride = c.m * kWidth;
      kv.dtype = dtype;
      QkvRopeArgs turn{out.Reshape({c.m, heads, kWidth}), heads - 4, 2, q_norm, k_norm};
      turn.angles = of.Floats(angles, {c.m, kWidth});
      turn.interleaved = c.interleaved;
      turn.rows = &kv;
      of.backend->fused().NormQkvRope(*of.backend, {{x, norm, qkv, out, 1e-5f, {}}, turn});
      return Turned{Values(of, out), Values(of, pages)};
    };
    const std::vector<float> some_gates = gates(ctx);
    const Turned some_turned = turned(ctx), want = turned(before);
    EXPECT_LE(RelativeError(Widened(some_gates), Widened(gates(before))), 8e-3);
    EXPECT_LE(RelativeError(Widened(some_turned.rows), Widened(want.rows)), 5e-6);
    EXPECT_LE(RelativeError(Widened(some_turned.kept), Widened(want.kept)), c.bf16 ? 3e-4 : 5e-6);
    for (int i = 0; i < 5; ++i) {
      ASSERT_EQ(gates(ctx), some_gates);
      const Turned again = turned(ctx);
      ASSERT_EQ(again.rows, some_turned.rows);
      ASSERT_EQ(again.kept, some_turned.kept);
    }
  }
}

}  // namespace
}  // namespace stillhouse::testing
