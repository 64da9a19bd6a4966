// Softmax attention over an ordered list of segments: stored memories, private pages, and the step's own rows.
#ifndef STILLHOUSE_KERNELS_OPS_ATTENTION_H_
#define STILLHOUSE_KERNELS_OPS_ATTENTION_H_

#include <vector>

#include "kernels/ops/context.h"

namespace stillhouse {

// One stored run of keys and values of one layer. Every row of a sequence that lists it sees all of its slots.
// A segment that several sequences list is read once for all of them (its rows are gathered into one product): a batch
// of queries on one cartridge shares its memory and its traffic.
struct KvSegment {
  // [H_kv, slots, d], d contiguous, other strides free. f32; on CUDA also bf16 (all segments of a call alike, and
  // without gradients).
  Tensor k, v;
  Tensor beta;  // [H_kv, slots] f32 added to the scaled logit, or empty; −inf masks a slot (ragged heads), whose k and
                // v must still be finite
  bool memory = false;  // counted in stored_mass: a cartridge, as opposed to private pages
};

// The rows of q (and of k, v) that belong to one sequence, in order, and what they attend to besides themselves. The
// sequences of a step cover all rows, one after another.
struct AttentionSequence {
  int64_t row_begin = 0;
  int64_t row_count = 0;
  std::vector<int32_t> segments;  // indexes into AttentionArgs::segments
};

// out[r, h] = Σ_j softmax_j(scale · q[r,h]·k_j + β_j) v_j over the slots of the row's segments and over the rows of its
// own sequence up to and including r (causal). Head h reads KV head h / (H / H_kv). Partial softmaxes are merged as (m,
// ℓ, o) (ops/softmax_state.h); fp32 inside. A row that sees nothing gives 0 and lse = −inf.
// q, k, v and out are f32; on CUDA each may be bf16 where the segments are, without gradients.
struct AttentionArgs {
  Tensor q;     // [R, H, d]
  Tensor k, v;  // [R, H_kv, d]: this step's own rows; empty if sequences attend to segments only
  const std::vector<KvSegment>* segments = nullptr;
  const std::vector<AttentionSequence>* sequences = nullptr;
  float scale = 0.0f;
  Tensor out;          // [R, H, d]
  Tensor lse;          // [R, H] natural logarithm, β included; or empty
  Tensor stored_mass;  // [R] share of the softmax on `memory` segments, mean over heads; or empty
};
// Recomputes the weights from q, k and lse. An empty gradient is not wanted; segment gradients are given per segment
// (empty tensors for segments that want none) and summed over all rows of all sequences in a fixed order.
struct AttentionGradArgs {
  Tensor q, k, v;
  const std::vector<KvSegment>* segments = nullptr;
  const std::vector<AttentionSequence>* sequences = nullptr;
  float scale = 0.0f;
  Tensor out, lse, dout;
  Tensor dq, dk, dv;
  std::vector<Tensor> dsegment_k, dsegment_v, dsegment_beta;  // [H_kv, slots, d], [H_kv, slots]
};

// The list of segments and sequences of a step, shared by all layers of a tape (kept alive by the recorded closures).
struct AttentionPlan {
  std::vector<KvSegment> segments;
  std::vector<AttentionSequence> sequences;
};

// Records with the tape if q, k, v or any segment tensor wants a gradient. `stored_mass`, if given, must be f32 [R].
// `out`: the result's type.
Tensor Attention(const Context& ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                 std::shared_ptr<const AttentionPlan> plan, float scale, const Tensor& stored_mass = Tensor(),
                 DType out = DType::kF32);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_ATTENTION_H_
