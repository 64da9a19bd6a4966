#include "kernels/ops/attention.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

void CheckRows(const Tensor& t, int64_t rows, int64_t heads, int64_t width, bool may_be_bf16 = false) {
  STILLHOUSE_CHECK((t.dtype() == DType::kF32 || (may_be_bf16 && t.dtype() == DType::kBF16)) && t.rank() == 3 &&
                   (width == 1 || t.stride(2) == 1))
      << t.DebugString();
  STILLHOUSE_CHECK(t.dim(0) == rows && t.dim(1) == heads && t.dim(2) == width)
      << t.DebugString() << " for " << rows << ", " << heads << ", " << width;
}

void CheckPlan(const AttentionPlan& plan, int64_t rows, int64_t kv_heads, int64_t width) {
  for (const KvSegment& segment : plan.segments) {
    STILLHOUSE_CHECK(segment.k.defined() && segment.v.defined());
    const int64_t slots = segment.k.dim(1);
    CheckRows(segment.k, kv_heads, slots, width, true);
    CheckRows(segment.v, kv_heads, slots, width, true);
    if (segment.beta) {
      STILLHOUSE_CHECK(segment.beta.dtype() == DType::kF32 && segment.beta.rank() == 2 &&
                       segment.beta.dim(0) == kv_heads && segment.beta.dim(1) == slots &&
                       (slots == 1 || segment.beta.stride(1) == 1))
          << segment.beta.DebugString();
    }
  }
  int64_t next = 0;
  for (const AttentionSequence& sequence : plan.sequences) {
    STILLHOUSE_CHECK(sequence.row_begin == next && sequence.row_count >= 0)
        << "sequences cover the rows in order: one begins at " << sequence.row_begin << ", expected " << next;
    next += sequence.row_count;
    for (int32_t s : sequence.segments) {
      STILLHOUSE_CHECK(s >= 0 && s < static_cast<int32_t>(plan.segments.size())) << s;
    }
  }
  STILLHOUSE_CHECK_EQ(next, rows);
}

}  // namespace

Tensor Attention(const Context& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                 std::shared_ptr<const AttentionPlan> plan, float scale, const Tensor& stored_mass, DType out) {
  STILLHOUSE_CHECK(plan != nullptr && q.rank() == 3);
  const int64_t rows = q.dim(0), heads = q.dim(1), width = q.dim(2);
  CheckRows(q, rows, heads, width, true);
  STILLHOUSE_CHECK(k.defined() == v.defined());
  int64_t kv_heads = 0;
  if (k) {
    kv_heads = k.dim(1);
    CheckRows(k, rows, kv_heads, width, true);
    CheckRows(v, rows, kv_heads, width, true);
  } else {
    STILLHOUSE_CHECK(!plan->segments.empty()) << "attention to nothing";
    kv_heads = plan->segments[0].k.dim(0);
  }
  STILLHOUSE_CHECK(kv_heads > 0 && heads % kv_heads == 0) << heads << " query heads on " << kv_heads;
  CheckPlan(*plan, rows, kv_heads, width);
  if (stored_mass) {
    STILLHOUSE_CHECK(stored_mass.dtype() == DType::kF32 && stored_mass.rank() == 1 && stored_mass.contiguous() &&
                     stored_mass.dim(0) == rows)
        << stored_mass.DebugString();
  }

  bool wanted = ctx.Wants(q) || ctx.Wants(k) || ctx.Wants(v);
  for (const KvSegment& segment : plan->segments) {
    wanted = wanted || ctx.Wants(segment.k) || ctx.Wants(segment.v) || ctx.Wants(segment.beta);
  }
  AttentionArgs args{q, k, v, &plan->segments, &plan->sequences, scale};
  args.out = ctx.Empty(out, {rows, heads, width});
  if (wanted) args.lse = ctx.EmptyF32({rows, heads});
  args.stored_mass = stored_mass;
  ctx.kernels().Attention(*ctx.backend, args);
  if (wanted) {
    ctx.tape->Record("Attention", {args.out},
                     [backend = ctx.backend, q, k, v, plan, scale, out = args.out, lse = args.lse](Tape& tape) {
                       AttentionGradArgs grad{q, k, v, &plan->segments, &plan->sequences, scale, out, lse};
                       grad.dout = tape.Grad(out);
                       grad.dq = tape.Grad(q);
                       grad.dk = tape.Grad(k);
                       grad.dv = tape.Grad(v);
                       for (const KvSegment& segment : plan->segments) {
                         grad.dsegment_k.push_back(tape.Grad(segment.k));
                         grad.dsegment_v.push_back(tape.Grad(segment.v));
                         grad.dsegment_beta.push_back(tape.Grad(segment.beta));
                       }
                       backend->kernels().AttentionGrad(*backend, grad);
                     });
  }
  return args.out;
}

}  // namespace stillhouse
