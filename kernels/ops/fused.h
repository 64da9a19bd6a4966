// Ops that do the work of several in one pass, for inference. Each is a composition of plain ops, which defines it, is
// its test's oracle, and stands in for it where a backend has no kernel of its own or a tape records.
#ifndef STILLHOUSE_KERNELS_OPS_FUSED_H_
#define STILLHOUSE_KERNELS_OPS_FUSED_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/attention.h"
#include "kernels/ops/context.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/sample.h"

namespace stillhouse {

// What a kernel may leave of a sum beside it, for the norm that follows: normalised rows, or rows times the norm's
// weight, still to be divided by their root mean squares. Empty where it did not.
struct ScaledRows {
  Tensor values;   // bf16 [R, K]
  Tensor squares;  // f32 [R, parts], whose sums are Σ x²; empty where the rows are divided
};

// Linear(RmsNorm(x, norm, eps), weight): [R, N] f32. `scaled`, where there is one, is of the same x and norm.
struct NormLinearArgs {
  Tensor x, norm, weight, out;
  float eps = 1e-5f;
  ScaledRows scaled;
};
Tensor NormLinear(const Context& ctx, const Tensor& x, const Tensor& norm, float eps, const Tensor& weight,
                  const ScaledRows& scaled = {});

// residual + Linear(x, weight); without a tape the sum may be made in `residual`, which is then the result. x may be
// what NormSwiGlu and attention give: f32, or bf16 where the product is one of bf16. With the norm that the sum goes
// into next, `scaled` may be left for it.
struct LinearAddArgs {
  Tensor x, weight, residual, next_norm;
  float next_eps = 1e-5f;
  ScaledRows* scaled = nullptr;
};
Tensor LinearAdd(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& residual,
                 const Tensor& next_norm = Tensor(), float next_eps = 1e-5f, ScaledRows* scaled = nullptr);

// SwiGlu of the halves of Linear(RmsNorm(x, norm, eps), gate_up): [R, ffn]. For LinearAdd only: a kernel may give bf16.
struct NormSwiGluArgs {
  Tensor x, norm, gate_up;
  float eps = 1e-5f;
  ScaledRows scaled;
  Tensor* out = nullptr;
};
Tensor NormSwiGlu(const Context& ctx, const Tensor& x, const Tensor& norm, float eps, const Tensor& gate_up,
                  const ScaledRows& scaled = {});

// Where the new rows of a pass go: pages of [layers, 2, kv_heads, slots, d], keys first.
struct KvRows {
  Tensor places;  // i64 [R, 2]: address of the row's first key and value in layer 0, of head 0; 0: not kept
  int64_t layer_stride = 0, head_stride = 0;  // elements
  DType dtype = DType::kF32;
};

// What a product of up to so many rows gives is still in a GPU's cache when it is read again. Of more rows, what is
// rounded to bf16 in the end may be so at once.
inline constexpr int64_t kCachedRows = 64;

// Whether heads of this width, so many pairs of which are turned, may be bf16 in QkvRope.
inline bool CanTurnBf16(int64_t width, int64_t pairs) {
  return 2 * pairs == width && (width == 64 || width == 128 || width == 256);
}

// q and k of one projection [R, H + 2·H_kv, d], normalised per head (where norms are given) and turned, in place; then
// k and v are written to their places in `layer`'s part of the pages. RmsNorm, Rope and CopyRows in one. f32, or bf16
// where the pages are (CanTurnBf16); fp32 inside.
struct QkvRopeArgs {
  Tensor qkv;
  int64_t heads = 0, kv_heads = 0;
  Tensor q_norm, k_norm;  // [d], or empty
  float eps = 1e-5f;
  Tensor angles;  // f32 [R, 2·pairs]: cos and sin of each pair (RopeAngles)
  bool interleaved = false;
  const KvRows* rows = nullptr;  // or null
  int64_t layer = 0;
};

// NormLinear, whose `out` is turn.qkv as a matrix, then QkvRope. bf16 only of more than kCachedRows rows.
struct NormQkvRopeArgs {
  NormLinearArgs product;
  QkvRopeArgs turn;
};

// cos and sin of every pair of every row, times config.attention_scale: what Rope computes for each layer anew.
struct RopeAnglesArgs {
  Tensor positions, out;
  const RopeConfig* config = nullptr;
};

// Keys and values of all layers as one run each: what a decode step attends to. Layer l is `stride·l` elements on.
struct KvLayers {
  Tensor k, v, beta;  // of layer 0, as in KvSegment
  int64_t k_stride = 0, v_stride = 0, beta_stride = 0;
  bool memory = false;
};

// The attention of a decode step (every sequence has a few rows), planned once for all layers. The sizes decide what is
// launched; everything else is in `bytes`, whose copy on the device the launches read: a step whose sizes are the same
// can run what was recorded for another.
struct AttentionStep {
  struct Sizes {
    int64_t rows = 0, layers = 0;
    int64_t heads = 0, kv_heads = 0, width = 0;
    int64_t runs = 0, listed_rows = 0, narrow = 0, wide = 0, tall = 0, partials = 0, partial_rows = 0;
    int64_t narrow_cluster = 1, wide_cluster = 1, tall_cluster = 1, merges_apart = 0;
    bool tall_merges = false, narrow_brief = false, many_partials = false, bf16 = false;
    auto operator<=>(const Sizes&) const = default;
  };
  Sizes sizes;
  std::vector<char> bytes;
};
struct PlanAttentionStepArgs {
  const std::vector<KvLayers>* segments = nullptr;
  const std::vector<AttentionSequence>* sequences = nullptr;
  int64_t layers = 0, heads = 0, kv_heads = 0, width = 0;
  bool bf16 = false;  // the segments' type, also where there are none
  AttentionStep* out = nullptr;
};
// Whether every sequence is short enough.
bool IsAttentionStep(const std::vector<AttentionSequence>& sequences);

// Tables of one layer after the other, made of the step's bytes on the device.
struct AttentionStepTablesArgs {
  AttentionStep::Sizes sizes;
  Tensor bytes;  // u8, on the device
  Tensor* tables = nullptr;
};
// Attention (ops/attention.h) of one layer.
struct AttentionOfStepArgs {
  AttentionStep::Sizes sizes;
  Tensor bytes, tables;
  int64_t layer = 0;
  Tensor q, k, v;  // [R, H, d], [R, H_kv, d]
  float scale = 0.0f;
  Tensor out;          // f32, or bf16 where the segments are
  Tensor stored_mass;  // [R] or empty
};

// Sampling in two halves: what the host decides, and what the device draws. Only rows without penalties, bans and
// log-probabilities (CanDrawRows).
struct PackDrawsArgs {
  const std::vector<SampleRow>* rows = nullptr;
  std::vector<char>* out = nullptr;
};
struct DrawArgs {
  Tensor logits, settings;  // f32 [n, V]; u8, on the device
  int64_t vocabulary = 0;
  Tensor* out = nullptr;  // u8
};
struct UnpackDrawsArgs {
  const char* bytes = nullptr;
  std::vector<SampledToken>* out = nullptr;  // has its size
};
bool CanDrawRows(const std::vector<SampleRow>& rows);

// A null pointer is an op that the backend does not fuse. The last group comes as one: a backend has all of it or none.
struct FusedKernels {
  void (*NormLinear)(Backend&, const NormLinearArgs&) = nullptr;
  void (*LinearAdd)(Backend&, const LinearAddArgs&) = nullptr;
  void (*NormSwiGlu)(Backend&, const NormSwiGluArgs&) = nullptr;

  void (*RopeAngles)(Backend&, const RopeAnglesArgs&) = nullptr;
  void (*QkvRope)(Backend&, const QkvRopeArgs&) = nullptr;
  void (*NormQkvRope)(Backend&, const NormQkvRopeArgs&) = nullptr;
  void (*PlanAttentionStep)(Backend&, const PlanAttentionStepArgs&) = nullptr;
  void (*AttentionStepTables)(Backend&, const AttentionStepTablesArgs&) = nullptr;
  void (*AttentionOfStep)(Backend&, const AttentionOfStepArgs&) = nullptr;
  void (*PackDraws)(const PackDrawsArgs&) = nullptr;
  void (*Draw)(Backend&, const DrawArgs&) = nullptr;
  void (*UnpackDraws)(const UnpackDrawsArgs&) = nullptr;

  bool has_steps() const { return QkvRope != nullptr; }
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_FUSED_H_
