#include "kernels/ops/attention.h"

#include <gtest/gtest.h>

#include "tests/kernels/attention_reference.h"

namespace stillhouse::testing {
namespace {

struct Outputs {
  Tensor out, lse, stored_mass;
};

Outputs RunKernel(const Context& ctx, const AttentionProblem& p, const AttentionTensors& t, bool strided) {
  AttentionArgs args{t.q, t.k, t.v, &t.plan->segments, &t.plan->sequences, static_cast<float>(p.scale)};
  const Shape shape{p.rows, p.heads, p.width};
  args.out = strided ? StridedEmpty(ctx, shape) : PoisonedEmpty(ctx, shape);
  args.lse = PoisonedEmpty(ctx, {p.rows, p.heads});
  args.stored_mass = PoisonedEmpty(ctx, {p.rows});
  ctx.kernels().Attention(*ctx.backend, args);
  return {args.out, args.lse, args.stored_mass};
}

void ExpectForward(const AttentionProblem& p, double tolerance = kForwardTolerance) {
  const Context ctx = TestContext();
  const AttentionResult want = ReferenceAttention(p);
  for (bool strided : {false, true}) {
    const Outputs got = RunKernel(ctx, p, ToTensors(ctx, p, strided), strided);
    EXPECT_LE(RelativeError(got.out, want.out), tolerance) << strided;
    EXPECT_LE(RelativeError(got.lse, want.lse), tolerance) << strided;
    EXPECT_LE(RelativeError(got.stored_mass, want.stored_mass), tolerance) << strided;
  }
}

// Gradients of the tape against the fp64 formula, for every input at once.
void ExpectBackward(std::mt19937& rng, const AttentionProblem& p, bool strided, double tolerance = kGradientTolerance) {
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const AttentionTensors t = ToTensors(ctx, p, strided);
  tape.Watch(t.q);
  if (p.own) {
    tape.Watch(t.k);
    tape.Watch(t.v);
  }
  for (const KvSegment& s : t.plan->segments) {
    tape.Watch(s.k);
    tape.Watch(s.v);
    if (s.beta) tape.Watch(s.beta);
  }
  const Shape shape{p.rows, p.heads, p.width};
  PoisonNext(ctx, shape);
  const Tensor out = Attention(ctx, t.q, t.k, t.v, t.plan, static_cast<float>(p.scale));
  const Doubles dout = RandomValues(rng, p.rows * p.heads * p.width);
  const AttentionGradients want = ReferenceAttentionGrad(p, dout);
  tape.BackwardFrom({out}, {ToTensor(ctx, dout, shape)});
  EXPECT_LE(RelativeError(tape.Grad(t.q), want.dq), tolerance);
  if (p.own) {
    EXPECT_LE(RelativeError(tape.Grad(t.k), want.dk), tolerance);
    EXPECT_LE(RelativeError(tape.Grad(t.v), want.dv), tolerance);
  }
  for (size_t s = 0; s < p.segments.size(); ++s) {
    const KvSegment& segment = t.plan->segments[s];
    EXPECT_LE(RelativeError(tape.Grad(segment.k), want.dsegment_k[s]), tolerance) << s;
    EXPECT_LE(RelativeError(tape.Grad(segment.v), want.dsegment_v[s]), tolerance) << s;
    if (!segment.beta) continue;
    EXPECT_LE(RelativeError(tape.Grad(segment.beta), want.dsegment_beta[s]), tolerance) << s;
  }
}

// Shapes that cross every tile edge: rows × segments × heads.
std::vector<AttentionProblem> Problems(std::mt19937& rng) {
  return {
      // One row alone, one head, width 1.
      MakeProblem(rng, 1, 1, 1, {}, {{1, {}}}),
      MakeProblem(rng, 2, 1, 3, {{1, false, true}}, {{1, {0}}}),
      // Causal rows only, across tiles, grouped heads as in SmolLM2.
      MakeProblem(rng, 9, 3, 64, {}, {{131, {}}}),
      // Decode: a row on a long memory and its own pages.
      MakeProblem(rng, 9, 3, 64, {{777, true, true}, {33, false, false}}, {{1, {0, 1}}}),
      // A batch on one shared memory with private pages of several sizes, one of them empty.
      MakeProblem(rng, 6, 2, 32, {{150, true, true}, {5, false, false}, {0, false, false}, {70, false, false}},
                  {{1, {0, 1}}, {1, {0, 2}}, {3, {0, 3}}, {1, {0}}, {0, {0, 1}}, {2, {}}}),
      // Composition in an order of its own, and one segment listed by several in different places.
      MakeProblem(rng, 4, 4, 20, {{17, false, true}, {66, true, true}, {9, false, false}},
                  {{70, {1, 0}}, {5, {0, 1, 2}}, {64, {2, 1}}}),
      // Training rows: packed sequences on one segment.
      MakeProblem(rng, 9, 3, 64, {{100, true, true}}, {{90, {0}}, {37, {0}}, {129, {0}}}),
      // Odd everything.
      MakeProblem(rng, 10, 2, 7, {{65, true, true}, {1, true, false}}, {{67, {0, 1}}, {1, {1}}}),
      MakeProblem(rng, 3, 1, 128, {{40, false, true}}, {{10, {0}}, {33, {0}}}),
      // No own rows: queries on segments only.
      MakeProblem(rng, 4, 2, 16, {{80, true, true}, {12, false, false}}, {{50, {0}}, {2, {0, 1}}}, false),
  };
}

TEST(Attention, MatchesReference) {
  std::mt19937 rng = TestRng(1);
  for (const AttentionProblem& p : Problems(rng)) {
    SCOPED_TRACE(::testing::Message() << p.rows << " rows, " << p.heads << "/" << p.kv_heads << ", " << p.width);
    ExpectForward(p);
  }
}

TEST(Attention, GradientsMatchReference) {
  std::mt19937 rng = TestRng(2);
  for (const AttentionProblem& p : Problems(rng)) {
    SCOPED_TRACE(::testing::Message() << p.rows << " rows, " << p.heads << "/" << p.kv_heads << ", " << p.width);
    for (bool strided : {false, true}) ExpectBackward(rng, p, strided);
  }
}

TEST(Attention, ReferenceGradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(3);
  AttentionProblem p = MakeProblem(rng, 4, 2, 5, {{6, true, true}, {3, false, false}}, {{4, {0, 1}}, {3, {0}}});
  const Doubles dout = RandomValues(rng, p.rows * p.heads * p.width);
  const AttentionGradients g = ReferenceAttentionGrad(p, dout);
  auto loss = [&] { return Inner(dout, ReferenceAttention(p).out); };
  EXPECT_LE(RelativeError(g.dq, CentralDifferences(p.q, loss)), 1e-7);
  EXPECT_LE(RelativeError(g.dk, CentralDifferences(p.k, loss)), 1e-7);
  EXPECT_LE(RelativeError(g.dv, CentralDifferences(p.v, loss)), 1e-7);
  EXPECT_LE(RelativeError(g.dsegment_k[0], CentralDifferences(p.segments[0].k, loss)), 1e-7);
  EXPECT_LE(RelativeError(g.dsegment_v[1], CentralDifferences(p.segments[1].v, loss)), 1e-7);
  EXPECT_LE(RelativeError(g.dsegment_beta[0], CentralDifferences(p.segments[0].beta, loss)), 1e-7);
}

TEST(Attention, ExtremeLogits) {
  std::mt19937 rng = TestRng(4);
  // Logits of ±1e4: the softmax is one-hot; an unshifted exponential would overflow.
  AttentionProblem p = MakeProblem(rng, 4, 2, 16, {{90, true, true}}, {{70, {0}}, {1, {0}}}, true, 1e4);
  ExpectForward(p, 1e-4);  // fp32 logits of 1e4 are 1e-3 off: near-ties move by as much
  AttentionProblem biased = MakeProblem(rng, 2, 1, 8, {{10, true, true}}, {{5, {0}}});
  for (double& b : biased.segments[0].beta) b = b < 0 ? -1e4 : 1e4;
  ExpectForward(biased, 1e-3);
}

TEST(Attention, RowsThatSeeNothingGiveZero) {
  std::mt19937 rng = TestRng(5);
  const Context ctx = TestContext();
  // Everything masked; an empty segment; no segment at all. Heads are masked one by one, too.
  AttentionProblem p = MakeProblem(rng, 4, 2, 8, {{70, true, true}, {0, false, true}},
                                   {{3, {0}}, {1, {0, 1}}, {2, {1}}, {1, {}}}, false);
  for (double& b : p.segments[0].beta) b = -INFINITY;
  ExpectForward(p);
  const Outputs got = RunKernel(ctx, p, ToTensors(ctx, p, false), false);
  for (double v : ToDoubles(got.out)) EXPECT_EQ(v, 0.0);
  for (double v : ToDoubles(got.lse)) EXPECT_EQ(v, -INFINITY);
  for (double v : ToDoubles(got.stored_mass)) EXPECT_EQ(v, 0.0);
  ExpectBackward(rng, p, false);

  AttentionProblem half = p;
  for (size_t j = 0; j < 70; ++j) half.segments[0].beta[j] = 0.5;  // the first KV head sees, the second does not
  ExpectForward(half);
  ExpectBackward(rng, half, true);

  AttentionProblem own = MakeProblem(rng, 4, 2, 8, {{70, true, true}}, {{3, {0}}, {65, {0}}});
  for (double& b : own.segments[0].beta) b = -INFINITY;  // memory masked, own rows seen
  ExpectForward(own);
  ExpectBackward(rng, own, false);
}

TEST(Attention, SplitIntoSegmentsDoesNotMatter) {
  std::mt19937 rng = TestRng(6);
  const Context ctx = TestContext();
  const AttentionProblem whole = MakeProblem(rng, 6, 2, 24, {{200, true, true}}, {{9, {0}}, {1, {0}}});
  const Outputs want = RunKernel(ctx, whole, ToTensors(ctx, whole, false), false);
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{{1, 199}, {64, 136}, {50, 0, 100, 50}}) {
    AttentionProblem split = whole;
    split.segments.clear();
    for (auto& s : split.sequences) s.segments.clear();
    int64_t begin = 0;
    for (int64_t slots : cuts) {
      AttentionProblem::Segment part{slots, {}, {}, {}, true};
      for (int64_t kv = 0; kv < 2; ++kv) {
        const auto& full = whole.segments[0];
        const int64_t at = kv * 200 + begin;
        part.k.insert(part.k.end(), &full.k[at * 24], &full.k[at * 24] + slots * 24);
        part.v.insert(part.v.end(), &full.v[at * 24], &full.v[at * 24] + slots * 24);
        part.beta.insert(part.beta.end(), &full.beta[at], &full.beta[at] + slots);
      }
      for (auto& s : split.sequences) s.segments.push_back(static_cast<int32_t>(split.segments.size()));
      split.segments.push_back(part);
      begin += slots;
    }
    const Outputs got = RunKernel(ctx, split, ToTensors(ctx, split, false), false);
    EXPECT_LE(RelativeError(got.out, ToDoubles(want.out)), 2e-6);
    EXPECT_LE(RelativeError(got.lse, ToDoubles(want.lse)), 2e-6);
    EXPECT_LE(RelativeError(got.stored_mass, ToDoubles(want.stored_mass)), 2e-6);
  }
}

TEST(Attention, SharedSegmentEqualsPrivateCopies) {
  std::mt19937 rng = TestRng(7);
  const Context ctx = TestContext();
  const AttentionProblem shared =
      MakeProblem(rng, 9, 3, 64, {{210, true, true}, {12, false, false}}, {{1, {0}}, {1, {0, 1}}, {4, {0}}, {1, {0}}});
  AttentionProblem copies = shared;
  for (int32_t i = 0; i < 4; ++i) {
    copies.segments.push_back(shared.segments[0]);
    copies.sequences[static_cast<size_t>(i)].segments[0] = 2 + i;
  }
  const Outputs a = RunKernel(ctx, shared, ToTensors(ctx, shared, false), false);
  const Outputs b = RunKernel(ctx, copies, ToTensors(ctx, copies, false), false);
  EXPECT_LE(RelativeError(a.out, ToDoubles(b.out)), 2e-6);
  EXPECT_LE(RelativeError(a.lse, ToDoubles(b.lse)), 2e-6);
  EXPECT_LE(RelativeError(a.stored_mass, ToDoubles(b.stored_mass)), 2e-6);
}

TEST(Attention, ChunkedPrefillEqualsOneShot) {
  std::mt19937 rng = TestRng(8);
  const Context ctx = TestContext();
  const int64_t rows = 100, heads = 6, kv_heads = 2, d = 16;
  const AttentionProblem whole = MakeProblem(rng, heads, kv_heads, d, {}, {{rows, {}}});
  const AttentionTensors t = ToTensors(ctx, whole, false);
  const Outputs want = RunKernel(ctx, whole, t, false);
  // The first 37 rows become a stored page (slots of a larger page: strided), the rest attends to it.
  const int64_t first = 37;
  auto plan = std::make_shared<AttentionPlan>();
  KvSegment page;
  page.k = t.k.Slice(0, 0, first).Transpose(0, 1);
  page.v = t.v.Slice(0, 0, first).Transpose(0, 1);
  plan->segments.push_back(page);
  plan->sequences.push_back({0, rows - first, {0}});
  const Tensor out = Attention(ctx, t.q.Slice(0, first, rows), t.k.Slice(0, first, rows), t.v.Slice(0, first, rows),
                               plan, static_cast<float>(whole.scale));
  EXPECT_LE(RelativeError(out, ToDoubles(want.out.Slice(0, first, rows))), 2e-6);
}

TEST(Attention, GradientsAreDeterministicAndOptional) {
  std::mt19937 rng = TestRng(9);
  const AttentionProblem p =
      MakeProblem(rng, 9, 3, 64, {{150, true, true}, {40, false, false}}, {{70, {0, 1}}, {65, {0}}, {1, {1}}});
  const Doubles dout = RandomValues(rng, p.rows * p.heads * p.width);
  std::vector<Doubles> first;
  for (int round = 0; round < 3; ++round) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    const AttentionTensors t = ToTensors(ctx, p, false);
    // Only the first segment is trained; in the last round the queries want a gradient as well.
    tape.Watch(t.plan->segments[0].k);
    tape.Watch(t.plan->segments[0].v);
    if (round == 2) tape.Watch(t.q);
    const Tensor out = Attention(ctx, t.q, t.k, t.v, t.plan, static_cast<float>(p.scale));
    tape.BackwardFrom({out}, {ToTensor(ctx, dout, {p.rows, p.heads, p.width})});
    EXPECT_FALSE(tape.Grad(t.k).defined());
    EXPECT_FALSE(tape.Grad(t.plan->segments[1].k).defined());
    const std::vector<Doubles> got = {ToDoubles(tape.Grad(t.plan->segments[0].k)),
                                      ToDoubles(tape.Grad(t.plan->segments[0].v))};
    if (round == 0) first = got;
    EXPECT_EQ(got, first) << "same bits in every run";
    const AttentionGradients want = ReferenceAttentionGrad(p, dout);
    EXPECT_LE(RelativeError(got[0], want.dsegment_k[0]), kGradientTolerance);
    EXPECT_LE(RelativeError(got[1], want.dsegment_v[0]), kGradientTolerance);
  }
}

TEST(Attention, NothingIsRecordedWithoutWantedInputs) {
  std::mt19937 rng = TestRng(10);
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const AttentionProblem p = MakeProblem(rng, 2, 1, 4, {{3, false, true}}, {{2, {0}}});
  const AttentionTensors t = ToTensors(ctx, p, false);
  Attention(ctx, t.q, t.k, t.v, t.plan, 0.5f);
  EXPECT_EQ(tape.size(), 0u);
}

TEST(AttentionDeathTest, RejectsPlansThatDoNotFit) {
  std::mt19937 rng = TestRng(11);
  const Context ctx = TestContext();
  AttentionProblem p = MakeProblem(rng, 2, 1, 4, {{3, false, true}}, {{2, {0}}});
  p.sequences[0].segments = {1};
  const AttentionTensors bad_segment = ToTensors(ctx, p, false);
  EXPECT_DEATH(Attention(ctx, bad_segment.q, bad_segment.k, bad_segment.v, bad_segment.plan, 0.5f), "check failed");
  p.sequences[0] = {0, 1, {0}};
  const AttentionTensors short_rows = ToTensors(ctx, p, false);
  EXPECT_DEATH(Attention(ctx, short_rows.q, short_rows.k, short_rows.v, short_rows.plan, 0.5f), "check failed");
}

}  // namespace
}  // namespace stillhouse::testing
