// Attention on shapes that cross the GPU kernels' layouts, and on keys and values stored as bf16.
#include <gtest/gtest.h>

#include "kernels/ops/attention.h"
#include "tests/kernels/attention_reference.h"

namespace stillhouse::testing {
namespace {

// bf16 storage: keys, values, queries and weights are rounded to 8 bits, relative 2⁻⁹ each.
constexpr double kBf16Tolerance = 8e-3;

uint16_t ToBf16(double value) {
  const float f = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

double FromBf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return static_cast<double>(f);
}

// The values as bf16 on the backend, and rounded in place. `padded`: rows lie further apart than they are wide.
Tensor Bf16Tensor(const Context& ctx, Doubles& values, const Shape& shape, int64_t padding) {
  Shape wide = shape;
  wide.back() += padding;
  std::vector<uint16_t> bits(static_cast<size_t>(Count(wide)), 0x7fc0);  // NaN
  const int64_t width = shape.back();
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t b = ToBf16(values[i]);
    values[i] = FromBf16(b);
    const int64_t row = static_cast<int64_t>(i) / width, column = static_cast<int64_t>(i) % width;
    bits[static_cast<size_t>(row * wide.back() + column)] = b;
  }
  Tensor t = ctx.Empty(DType::kBF16, wide);
  ctx.backend->Upload(bits.data(), t);
  return t.Slice(t.rank() - 1, 0, width);
}

Doubles Bf16ToDoubles(const Context& ctx, const Tensor& t) {
  std::vector<uint16_t> bits(static_cast<size_t>(t.elements()));
  ctx.backend->Download(t, bits.data());
  Doubles values;
  for (uint16_t b : bits) values.push_back(FromBf16(b));
  return values;
}

std::vector<AttentionProblem> Problems(std::mt19937& rng) {
  return {
      MakeProblem(rng, 4, 2, 80, {{130, true, true}}, {{1, {0}}, {20, {0}}}),
      MakeProblem(rng, 4, 1, 96, {{70, false, true}, {64, true, false}}, {{2, {0, 1}}, {1, {0}}, {30, {1}}}),
      MakeProblem(rng, 3, 1, 130, {{66, true, true}}, {{1, {0}}, {40, {0}}}),
      MakeProblem(rng, 2, 2, 256, {{70, true, true}}, {{1, {0}}, {35, {0}}}),
      // More heads to a KV head than a tile has queries.
      MakeProblem(rng, 70, 1, 64, {{100, true, true}, {20, false, false}}, {{1, {0, 1}}, {2, {0}}, {11, {0}}}),
      // A long memory for one row: split, and merged.
      MakeProblem(rng, 8, 2, 64, {{3000, true, true}, {64, false, false}}, {{1, {0, 1}}}),
      // Many queries on one memory, private pages for some, one listed twice.
      MakeProblem(rng, 8, 2, 128, {{300, true, true}, {64, false, false}, {64, false, false}, {10, false, false}},
                  {{1, {0, 1, 2}}, {1, {0, 3}}, {1, {0}}, {1, {0}}, {8, {0, 3, 3}}, {1, {0}}, {1, {0}}}),
      MakeProblem(rng, 8, 2, 128, {{33, true, true}}, {{150, {0}}, {1, {0}}}),
      // Long sequences of heads 128 wide: several steps of 128 slots, with and without biases, own rows and memories.
      MakeProblem(rng, 4, 1, 128, {{200, true, true}, {300, false, false}, {130, true, false}},
                  {{70, {0, 1, 2}}, {33, {1}}, {300, {}}}),
  };
}

TEST(AttentionStorage, F32OfManyShapes) {
  std::mt19937 rng = TestRng(21);
  const Context ctx = TestContext();
  for (const AttentionProblem& p : Problems(rng)) {
    SCOPED_TRACE(::testing::Message() << p.rows << " rows, " << p.heads << "/" << p.kv_heads << ", " << p.width);
    const AttentionTensors t = ToTensors(ctx, p, false);
    Tape tape(*ctx.backend);
    const Context recording = TestContext(&tape);
    tape.Watch(t.q);
    tape.Watch(t.k);
    tape.Watch(t.v);
    for (const KvSegment& s : t.plan->segments) {
      tape.Watch(s.k);
      tape.Watch(s.v);
    }
    const Tensor out = Attention(recording, t.q, t.k, t.v, t.plan, static_cast<float>(p.scale));
    EXPECT_LE(RelativeError(out, ReferenceAttention(p).out), kForwardTolerance);
    const Doubles dout = RandomValues(rng, p.rows * p.heads * p.width);
    const AttentionGradients want = ReferenceAttentionGrad(p, dout);
    tape.BackwardFrom({out}, {ToTensor(ctx, dout, {p.rows, p.heads, p.width})});
    EXPECT_LE(RelativeError(tape.Grad(t.q), want.dq), kGradientTolerance);
    EXPECT_LE(RelativeError(tape.Grad(t.k), want.dk), kGradientTolerance);
    EXPECT_LE(RelativeError(tape.Grad(t.v), want.dv), kGradientTolerance);
    for (size_t s = 0; s < p.segments.size(); ++s) {
      EXPECT_LE(RelativeError(tape.Grad(t.plan->segments[s].k), want.dsegment_k[s]), kGradientTolerance) << s;
      EXPECT_LE(RelativeError(tape.Grad(t.plan->segments[s].v), want.dsegment_v[s]), kGradientTolerance) << s;
    }
  }
}

// Memories of bf16 (the problem's are rounded) with f32 rows, as serving has them; or rows and results of bf16 too.
// `padding`: rows lie that much further apart than they are wide, and those of some segments more than others'.
void ExpectBf16(const Context& ctx, AttentionProblem& p, int64_t padding, bool all_bf16) {
  SCOPED_TRACE(::testing::Message() << p.rows << " rows, " << p.heads << "/" << p.kv_heads << ", " << p.width
                                    << ", padding " << padding << ", rows of bf16 " << all_bf16);
  AttentionTensors t = ToTensors(ctx, p, false);
  for (size_t s = 0; s < p.segments.size(); ++s) {
    const Shape shape = {p.kv_heads, p.segments[s].slots, p.width};
    const int64_t apart = padding > 0 ? padding + 8 * static_cast<int64_t>(s % 6) : 0;
    t.plan->segments[s].k = Bf16Tensor(ctx, p.segments[s].k, shape, apart);
    t.plan->segments[s].v = Bf16Tensor(ctx, p.segments[s].v, shape, apart);
  }
  if (all_bf16) {
    t.q = Bf16Tensor(ctx, p.q, {p.rows, p.heads, p.width}, padding);
    t.k = Bf16Tensor(ctx, p.k, {p.rows, p.kv_heads, p.width}, padding);
    t.v = Bf16Tensor(ctx, p.v, {p.rows, p.kv_heads, p.width}, padding);
  }
  const AttentionResult want = ReferenceAttention(p);
  AttentionArgs args{t.q, t.k, t.v, &t.plan->segments, &t.plan->sequences, static_cast<float>(p.scale)};
  const Shape shape{p.rows, p.heads, p.width};
  args.out = all_bf16 ? ctx.Empty(DType::kBF16, shape) : PoisonedEmpty(ctx, shape);
  args.lse = PoisonedEmpty(ctx, {p.rows, p.heads});
  args.stored_mass = PoisonedEmpty(ctx, {p.rows});
  ctx.kernels().Attention(*ctx.backend, args);
  const Doubles out = all_bf16 ? Bf16ToDoubles(ctx, args.out) : ToDoubles(args.out);
  EXPECT_LE(RelativeError(out, want.out), kBf16Tolerance);
  EXPECT_LE(RelativeError(args.lse, want.lse), kBf16Tolerance);
  EXPECT_LE(RelativeError(args.stored_mass, want.stored_mass), kBf16Tolerance);
}

TEST(AttentionStorage, Bf16MatchesReference) {
  if (!CudaForTests()) GTEST_SKIP() << "bf16 keys and values are the GPU's";
  std::mt19937 rng = TestRng(22);
  const Context ctx = TestContext();
  for (AttentionProblem& p : Problems(rng)) {
    for (int64_t padding : {0, 3}) {
      for (bool all_bf16 : {false, true}) ExpectBf16(ctx, p, padding, all_bf16);
    }
  }
}

// Long sequences on chains of pages of 64 slots: steps of two pages, of a page and the end of a memory (biased, counted
// in the mass) or the beginning of the own rows, and of one page.
TEST(AttentionStorage, Bf16OnManyPagesMatchesReference) {
  if (!CudaForTests()) GTEST_SKIP() << "bf16 keys and values are the GPU's";
  std::mt19937 rng = TestRng(24);
  const Context ctx = TestContext();
  std::vector<SegmentShape> segments = {{200, true, true}, {40, true, true}, {65, false, true}};
  std::vector<int32_t> pages;
  for (int32_t page = 0; page < 12; ++page) {
    pages.push_back(static_cast<int32_t>(segments.size()));
    segments.push_back({page < 11 ? 64 : 37, false, false});
  }
  std::vector<int32_t> after_memories = {0, 2}, before_memory = pages;
  after_memories.insert(after_memories.end(), pages.begin(), pages.end());
  before_memory.insert(before_memory.begin() + 3, 1);
  AttentionProblem p =
      MakeProblem(rng, 8, 2, 128, segments, {{70, after_memories}, {33, before_memory}, {50, pages}, {3, {0, 3}}});
  for (int64_t padding : {0, 8}) {
    for (bool all_bf16 : {false, true}) ExpectBf16(ctx, p, padding, all_bf16);
  }
}

// The first rows of a sequence, which see nothing but one another.
TEST(AttentionStorage, Bf16RowsAloneMatchReference) {
  if (!CudaForTests()) GTEST_SKIP() << "bf16 keys and values are the GPU's";
  std::mt19937 rng = TestRng(26);
  const Context ctx = TestContext();
  for (const int64_t width : {64, 128}) {
    AttentionProblem p = MakeProblem(rng, 8, 2, width, {}, {{300, {}}, {1, {}}, {20, {}}});
    const Tensor q = Bf16Tensor(ctx, p.q, {p.rows, p.heads, p.width}, 0);
    const Tensor k = Bf16Tensor(ctx, p.k, {p.rows, p.kv_heads, p.width}, 0);
    const Tensor v = Bf16Tensor(ctx, p.v, {p.rows, p.kv_heads, p.width}, 0);
    const AttentionTensors t = ToTensors(ctx, p, false);
    const Tensor out = Attention(ctx, q, k, v, t.plan, static_cast<float>(p.scale), Tensor(), DType::kBF16);
    EXPECT_LE(RelativeError(Bf16ToDoubles(ctx, out), ReferenceAttention(p).out), kBf16Tolerance);
  }
}

// More tiles than clusters suit: items of a long chain are cut, here inside pages.
TEST(AttentionStorage, Bf16PagesGiveWhatOneSegmentGives) {
  if (!CudaForTests()) GTEST_SKIP() << "bf16 keys and values are the GPU's";
  constexpr int64_t kRows = 1200, kHeads = 8, kWidth = 128, kSlots = 6000, kPage = 64, kFirst = 24;
  std::mt19937 rng = TestRng(25);
  const Context ctx = TestContext();
  AttentionProblem p = MakeProblem(rng, kHeads, 1, kWidth, {{kSlots, false, false}}, {{kRows, {0}}});
  const AttentionTensors t = ToTensors(ctx, p, false);
  KvSegment whole;
  whole.k = Bf16Tensor(ctx, p.segments[0].k, {1, kSlots, kWidth}, 0);
  whole.v = Bf16Tensor(ctx, p.segments[0].v, {1, kSlots, kWidth}, 0);
  auto attend = [&](const std::vector<KvSegment>& segments) {
    std::vector<AttentionSequence> sequences = {{0, kRows, {}}};
    for (size_t s = 0; s < segments.size(); ++s) sequences[0].segments.push_back(static_cast<int32_t>(s));
    AttentionArgs args{t.q, t.k, t.v, &segments, &sequences, static_cast<float>(p.scale)};
    args.out = PoisonedEmpty(ctx, {kRows, kHeads, kWidth});
    ctx.kernels().Attention(*ctx.backend, args);
    return ToDoubles(args.out);
  };
  std::vector<KvSegment> pages;
  for (int64_t begin = 0, end = kFirst; begin < kSlots; begin = end, end = std::min(begin + kPage, kSlots)) {
    pages.push_back({whole.k.Slice(1, begin, end), whole.v.Slice(1, begin, end), Tensor(), false});
  }
  EXPECT_LE(RelativeError(attend(pages), attend({whole})), kBf16Tolerance);
}

TEST(AttentionStorage, Bf16RowsThatSeeNothingGiveZero) {
  if (!CudaForTests()) GTEST_SKIP() << "bf16 keys and values are the GPU's";
  std::mt19937 rng = TestRng(23);
  const Context ctx = TestContext();
  AttentionProblem p = MakeProblem(rng, 4, 2, 64, {{70, true, true}, {0, false, true}},
                                   {{3, {0}}, {1, {0, 1}}, {12, {0}}, {1, {}}}, false);
  for (double& b : p.segments[0].beta) b = -INFINITY;
  AttentionTensors t = ToTensors(ctx, p, false);
  for (size_t s = 0; s < p.segments.size(); ++s) {
    const Shape shape = {p.kv_heads, p.segments[s].slots, p.width};
    t.plan->segments[s].k = Bf16Tensor(ctx, p.segments[s].k, shape, 0);
    t.plan->segments[s].v = Bf16Tensor(ctx, p.segments[s].v, shape, 0);
  }
  AttentionArgs args{t.q, t.k, t.v, &t.plan->segments, &t.plan->sequences, static_cast<float>(p.scale)};
  args.out = PoisonedEmpty(ctx, {p.rows, p.heads, p.width});
  args.lse = PoisonedEmpty(ctx, {p.rows, p.heads});
  args.stored_mass = PoisonedEmpty(ctx, {p.rows});
  ctx.kernels().Attention(*ctx.backend, args);
  for (double v : ToDoubles(args.out)) EXPECT_EQ(v, 0.0);
  for (double v : ToDoubles(args.lse)) EXPECT_EQ(v, -INFINITY);
  for (double v : ToDoubles(args.stored_mass)) EXPECT_EQ(v, 0.0);
}

}  // namespace
}  // namespace stillhouse::testing
