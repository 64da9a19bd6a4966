// Attention of decode steps: one plan for all layers, against the fp64 reference of each.
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/ops/fused.h"
#include "tests/kernels/attention_reference.h"

namespace stillhouse::testing {
namespace {

constexpr int64_t kLayers = 2;

struct StepShape {
  int64_t heads, kv_heads, width;
  std::vector<SegmentShape> segments;
  std::vector<std::pair<int64_t, std::vector<int32_t>>> sequences;
};

// `rows` rows on one memory, each with as many private slots as its number says.
StepShape Served(int64_t heads, int64_t kv_heads, int64_t width, int64_t memory, int rows, int64_t pages) {
  StepShape shape{heads, kv_heads, width, {{memory, true, true}}, {}};
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> list = {0};
    if (pages > 0 && r % 4 != 3) {
      list.push_back(static_cast<int32_t>(shape.segments.size()));
      shape.segments.push_back({pages + r, false, false});
    }
    shape.sequences.push_back({1, list});
  }
  return shape;
}

// Values of all layers, [layers, ...], as they are stored; rounded in place.
Tensor Stored(const Context& ctx, std::vector<Doubles*> layers, const Shape& shape, bool bf16) {
  Shape all = shape;
  all.insert(all.begin(), static_cast<int64_t>(layers.size()));
  std::vector<float> values;
  std::vector<uint16_t> bits;
  for (Doubles* layer : layers) {
    for (double& v : *layer) {
      auto f = static_cast<float>(v);
      if (bf16) {
        uint32_t u;
        std::memcpy(&u, &f, sizeof(u));
        u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
        std::memcpy(&f, &u, sizeof(u));
        bits.push_back(static_cast<uint16_t>(u >> 16));
      }
      v = static_cast<double>(f);
      values.push_back(f);
    }
  }
  const Tensor t = ctx.Empty(bf16 ? DType::kBF16 : DType::kF32, all);
  ctx.backend->Upload(bf16 ? static_cast<const void*>(bits.data()) : values.data(), t);
  return t;
}

void ExpectStep(std::mt19937& rng, const StepShape& shape, bool bf16) {
  SCOPED_TRACE(::testing::Message() << shape.sequences.size() << " sequences, " << shape.heads << "/" << shape.kv_heads
                                    << ", " << shape.width << ", bf16 " << bf16);
  const Context ctx = TestContext();
  const FusedKernels& fused = ctx.backend->fused();
  std::vector<AttentionProblem> layers;
  for (int64_t l = 0; l < kLayers; ++l) {
    layers.push_back(MakeProblem(rng, shape.heads, shape.kv_heads, shape.width, shape.segments, shape.sequences));
  }
  std::vector<KvLayers> segments;
  for (size_t s = 0; s < shape.segments.size(); ++s) {
    std::vector<Doubles*> k, v, beta;
    for (AttentionProblem& p : layers) {
      k.push_back(&p.segments[s].k);
      v.push_back(&p.segments[s].v);
      beta.push_back(&p.segments[s].beta);
    }
    const Shape of_layer = {shape.kv_heads, shape.segments[s].slots, shape.width};
    const Tensor keys = Stored(ctx, k, of_layer, bf16), values = Stored(ctx, v, of_layer, bf16);
    KvLayers all{keys.Select(0, 0),       values.Select(0, 0), Tensor(), keys.stride(0), values.stride(0), 0,
                 shape.segments[s].memory};
    if (shape.segments[s].beta) {
      const Tensor biases = Stored(ctx, beta, {shape.kv_heads, shape.segments[s].slots}, false);
      all.beta = biases.Select(0, 0);
      all.beta_stride = biases.stride(0);
    }
    segments.push_back(all);
  }
  AttentionStep step;
  fused.PlanAttentionStep(
      *ctx.backend, {&segments, &layers[0].sequences, kLayers, shape.heads, shape.kv_heads, shape.width, bf16, &step});
  const Tensor bytes = ctx.Empty(DType::kU8, {static_cast<int64_t>(step.bytes.size())});
  ctx.backend->Upload(step.bytes.data(), bytes);
  Tensor tables;
  fused.AttentionStepTables(*ctx.backend, {step.sizes, bytes, &tables});
  const double tolerance = bf16 ? 8e-3 : kForwardTolerance;
  for (int64_t l = 0; l < kLayers; ++l) {
    const AttentionTensors t = ToTensors(ctx, layers[l], false);
    const Tensor out = PoisonedEmpty(ctx, {layers[l].rows, shape.heads, shape.width});
    const Tensor mass = PoisonedEmpty(ctx, {layers[l].rows});
    fused.AttentionOfStep(
        *ctx.backend, {step.sizes, bytes, tables, l, t.q, t.k, t.v, static_cast<float>(layers[l].scale), out, mass});
    const AttentionResult want = ReferenceAttention(layers[l]);
    EXPECT_LE(RelativeError(out, want.out), tolerance) << l;
    EXPECT_LE(RelativeError(mass, want.stored_mass), tolerance) << l;
    const Tensor again = PoisonedEmpty(ctx, out.shape());
    fused.AttentionOfStep(
        *ctx.backend, {step.sizes, bytes, tables, l, t.q, t.k, t.v, static_cast<float>(layers[l].scale), again, mass});
    EXPECT_EQ(ToDoubles(again), ToDoubles(out)) << l << ": bits repeat";
  }
}

// Sequences of one to three rows, in turn, on one memory; `apart`: every other one is on another.
StepShape Drafted(int64_t heads, int64_t kv_heads, int64_t memory, int sequences, bool apart) {
  StepShape shape{heads, kv_heads, 128, {{memory, true, true}}, {}};
  if (apart) shape.segments.push_back({memory + 9, true, false});
  for (int s = 0; s < sequences; ++s) shape.sequences.push_back({1 + s % 3, {apart ? s % 2 : 0}});
  return shape;
}

const StepShape kSteps[] = {
    Served(9, 3, 64, 700, 1, 0),      Served(9, 3, 64, 300, 5, 20),
    Served(9, 3, 64, 130, 30, 3),     Served(8, 2, 128, 900, 1, 5),
    Served(8, 2, 128, 300, 40, 0),    Served(8, 2, 128, 520, 40, 10),
    Served(8, 2, 128, 2500, 33, 0),    // shared among the blocks of a cluster
    Served(4, 1, 128, 6000, 40, 0),    // in longer shares
    Served(32, 2, 128, 1300, 2, 70),   // more heads than a narrow tile has queries
    Served(4, 1, 128, 20000, 1, 100),  // split into items that leave partial rows
    Served(6, 2, 80, 1000, 12, 5),    Served(6, 2, 192, 600, 3, 5),
    Served(32, 8, 128, 300, 48, 20),  // more items of few slots than blocks that run at once
    Served(16, 8, 64, 100, 72, 20),   Drafted(8, 2, 2500, 20, false),  // clusters, and several own rows
    Drafted(8, 2, 1500, 40, true),  // the same of rows that do not follow one another
    Drafted(4, 2, 900, 1, false),     Drafted(4, 2, 1100, 2, false),
};

class AttentionStep : public ::testing::TestWithParam<std::tuple<size_t, bool>> {};

TEST_P(AttentionStep, MatchesReference) {
  if (!TestContext().backend->fused().AttentionOfStep) GTEST_SKIP() << "composed on this backend";
  const auto [step, bf16] = GetParam();
  const StepShape& shape = kSteps[step];
  const int64_t products = shape.heads * shape.width * shape.segments[0].slots * std::ssize(shape.sequences);
  if (SmallTests() && products > (bf16 ? 20'000'000 : 2'000'000)) GTEST_SKIP() << "for minutes under a sanitizer";
  std::mt19937 rng = TestRng(41 + static_cast<uint32_t>(step));
  ExpectStep(rng, shape, bf16);
}
INSTANTIATE_TEST_SUITE_P(Steps, AttentionStep,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kSteps)), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<1>(info.param) ? "bf16" : "f32") + "_" +
                                  std::to_string(std::get<0>(info.param));
                         });

}  // namespace
}  // namespace stillhouse::testing
