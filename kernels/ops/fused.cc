#include "kernels/ops/fused.h"

#include <algorithm>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/norm.h"

namespace stillhouse {

const FusedKernels& Backend::fused() const {
  static const FusedKernels none;
  return none;
}

Tensor NormLinear(const Context& ctx, const Tensor& x, const Tensor& norm, float eps, const Tensor& weight,
                  const ScaledRows& scaled) {
  const FusedKernels& fused = ctx.backend->fused();
  if (ctx.tape || !fused.NormLinear) return Linear(ctx, RmsNorm(ctx, x, norm, eps), weight);
  const Tensor out = ctx.EmptyF32({x.dim(0), weight.dim(0)});
  fused.NormLinear(*ctx.backend, {x, norm, weight, out, eps, scaled});
  return out;
}

Tensor LinearAdd(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& residual,
                 const Tensor& next_norm, float next_eps, ScaledRows* scaled) {
  if (scaled) *scaled = {};
  const FusedKernels& fused = ctx.backend->fused();
  if (ctx.tape || !fused.LinearAdd) return Add(ctx, residual, Linear(ctx, x, weight));
  fused.LinearAdd(*ctx.backend, {x, weight, residual, next_norm, next_eps, scaled});
  return residual;
}

Tensor NormSwiGlu(const Context& ctx, const Tensor& x, const Tensor& norm, float eps, const Tensor& gate_up,
                  const ScaledRows& scaled) {
  const FusedKernels& fused = ctx.backend->fused();
  Tensor out;
  if (!ctx.tape && fused.NormSwiGlu) {
    fused.NormSwiGlu(*ctx.backend, {x, norm, gate_up, eps, scaled, &out});
    return out;
  }
  const int64_t ffn = gate_up.dim(0) / 2;
  const Tensor both = Linear(ctx, RmsNorm(ctx, x, norm, eps), gate_up);
  return SwiGlu(ctx, both.Slice(1, 0, ffn), both.Slice(1, ffn, 2 * ffn));
}

bool IsAttentionStep(const std::vector<AttentionSequence>& sequences) {
  return std::all_of(sequences.begin(), sequences.end(), [](const AttentionSequence& s) { return s.row_count <= 8; });
}

bool CanDrawRows(const std::vector<SampleRow>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const SampleRow& row) {
    const bool penalties =
        row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
    return row.logprobs == 0 && row.banned.empty() && (!penalties || row.history.empty());
  });
}

}  // namespace stillhouse
