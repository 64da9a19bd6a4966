#include "server/model/forward.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/trace.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/fused.h"
#include "kernels/ops/gather.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/rope.h"

namespace stillhouse {
namespace {

// Everything that the layers of one pass share.
struct Pass {
  const Weights& weights;
  const ForwardOptions& options;
  const Batch* batch = nullptr;  // absent in a recorded step
  PassInputs inputs;
  Tensor angles;            // of the fused rotation; else empty
  Tensor attention_tables;  // of a decode step
  Tensor stored_mass;       // f32 [layers, R], or empty
  bool logits = false;      // the last layer's sum goes through the final norm into the output's product
};

// The segments of one layer: each distinct memory once, then every sequence's own pages.
std::shared_ptr<const AttentionPlan> PlanLayer(const Batch& batch, int64_t layer) {
  auto plan = std::make_shared<AttentionPlan>();
  std::vector<const Memory*> seen;
  for (const BatchSequence& sequence : batch.sequences) {
    AttentionSequence rows{sequence.row_begin, sequence.row_count, {}};
    for (const auto& memory : sequence.state->memories()) {
      if (memory->slots == 0) continue;
      size_t index = static_cast<size_t>(std::find(seen.begin(), seen.end(), memory.get()) - seen.begin());
      if (index == seen.size()) {
        // Memories come first in the plan, so that their index is their place in `seen`.
        seen.push_back(memory.get());
      }
      rows.segments.push_back(static_cast<int32_t>(index));
    }
    plan->sequences.push_back(std::move(rows));
  }
  for (const Memory* memory : seen) {
    const LayerKv& kv = memory->layers[static_cast<size_t>(layer)];
    plan->segments.push_back({kv.k, kv.v, kv.beta, /*memory=*/true});
  }
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    for (SequenceState::Run& run : batch.sequences[i].state->OwnRuns(layer)) {
      plan->sequences[i].segments.push_back(static_cast<int32_t>(plan->segments.size()));
      plan->segments.push_back({std::move(run.k), std::move(run.v), Tensor(), /*memory=*/false});
    }
  }
  return plan;
}

struct Qkv {
  Tensor q, k, v;  // [R, heads, d], [R, kv_heads, d] twice
};

Qkv ProjectQkv(const Context& ctx, const Pass& pass, const LayerWeights& w, const Tensor& x) {
  const ModelConfig& c = pass.weights.config;
  const int64_t rows = x.dim(0), q_width = c.heads * c.head_dim, kv_width = c.kv_heads * c.head_dim;
  Qkv out;
  // Heads of a strided row: [R, width] with row stride s becomes [R, heads, d] with strides (s, d, 1).
  if (w.qkv && !w.q_bias && !w.k_bias && !w.v_bias) {
    const Tensor all = Linear(ctx, x, w.qkv).Reshape({rows, c.heads + 2 * c.kv_heads, c.head_dim});
    out.q = all.Slice(1, 0, c.heads);
    out.k = all.Slice(1, c.heads, c.heads + c.kv_heads);
    out.v = all.Slice(1, c.heads + c.kv_heads, c.heads + 2 * c.kv_heads);
  } else if (w.qkv) {
    const Tensor q = w.qkv.Slice(0, 0, q_width), k = w.qkv.Slice(0, q_width, q_width + kv_width),
                 v = w.qkv.Slice(0, q_width + kv_width, q_width + 2 * kv_width);
    out.q = Linear(ctx, x, q, w.q_bias).Reshape({rows, c.heads, c.head_dim});
    out.k = Linear(ctx, x, k, w.k_bias).Reshape({rows, c.kv_heads, c.head_dim});
    out.v = Linear(ctx, x, v, w.v_bias).Reshape({rows, c.kv_heads, c.head_dim});
  } else {
    out.q = Linear(ctx, x, w.q, w.q_bias).Reshape({rows, c.heads, c.head_dim});
    out.k = Linear(ctx, x, w.k, w.k_bias).Reshape({rows, c.kv_heads, c.head_dim});
    out.v = Linear(ctx, x, w.v, w.v_bias).Reshape({rows, c.kv_heads, c.head_dim});
  }
  if (w.q_norm) out.q = RmsNorm(ctx, out.q, w.q_norm, c.norm_eps);
  if (w.k_norm) out.k = RmsNorm(ctx, out.k, w.k_norm, c.norm_eps);
  out.q = Rope(ctx, out.q, pass.inputs.positions, c.rope);
  out.k = Rope(ctx, out.k, pass.inputs.positions, c.rope);
  return out;
}

// The same in place of one product, for inference: rows that are kept go to their pages on the way.
Qkv FusedQkv(const Context& ctx, const Pass& pass, int64_t layer, const LayerWeights& w, const Tensor& residual,
             const ScaledRows& scaled) {
  const ModelConfig& c = pass.weights.config;
  // Queries are f32 for those who observe them.
  const bool bf16 = residual.dim(0) > kCachedRows && pass.inputs.kv.places && pass.inputs.kv.dtype == DType::kBF16 &&
                    w.qkv.dtype() == DType::kBF16 &&
                    CanTurnBf16(c.head_dim, static_cast<int64_t>(c.rope.inv_freq.size())) &&
                    !pass.options.observe_queries;
  const Tensor product = ctx.Empty(bf16 ? DType::kBF16 : DType::kF32, {residual.dim(0), w.qkv.dim(0)});
  const Tensor all = product.Reshape({residual.dim(0), c.heads + 2 * c.kv_heads, c.head_dim});
  QkvRopeArgs args{all, c.heads, c.kv_heads, w.q_norm, w.k_norm, c.norm_eps, pass.angles};
  args.interleaved = c.rope.layout == RopeLayout::kInterleaved;
  args.rows = &pass.inputs.kv;
  args.layer = layer;
  ctx.backend->fused().NormQkvRope(*ctx.backend, {{residual, w.attn_norm, w.qkv, product, c.norm_eps, scaled}, args});
  return {all.Slice(1, 0, c.heads), all.Slice(1, c.heads, c.heads + c.kv_heads),
          all.Slice(1, c.heads + c.kv_heads, c.heads + 2 * c.kv_heads)};
}

bool CanFuseQkv(const LayerWeights& w) { return w.qkv && !w.q_bias && !w.k_bias && !w.v_bias; }

Tensor FeedForward(const Context& ctx, const Pass& pass, const LayerWeights& w, const Tensor& residual,
                   const ScaledRows& scaled) {
  const float eps = pass.weights.config.norm_eps;
  if (w.gate_up) return NormSwiGlu(ctx, residual, w.ffn_norm, eps, w.gate_up, scaled);
  const Tensor x = RmsNorm(ctx, residual, w.ffn_norm, eps);
  return SwiGlu(ctx, Linear(ctx, x, w.gate), Linear(ctx, x, w.up));
}

Tensor Attend(const Context& ctx, const Pass& pass, int64_t layer, const LayerWeights& w, const Qkv& qkv) {
  const ModelConfig& c = pass.weights.config;
  const Tensor mass = pass.stored_mass ? pass.stored_mass.Select(0, layer) : Tensor();
  // In the type of the product that follows, where attention can give it; rows that are gathered first stay f32.
  const bool gathered = layer + 1 == c.layers && pass.inputs.output_rows;
  const bool bf16_slots = pass.attention_tables ? pass.inputs.attention.bf16 : qkv.k.dtype() == DType::kBF16;
  const DType out = bf16_slots && w.o.dtype() == DType::kBF16 && !gathered ? DType::kBF16 : DType::kF32;
  if (!pass.attention_tables) {
    return Attention(ctx, qkv.q, qkv.k, qkv.v, PlanLayer(*pass.batch, layer), c.attention_scale(), mass, out);
  }
  AttentionOfStepArgs args{pass.inputs.attention, pass.inputs.attention_bytes, pass.attention_tables, layer};
  args.q = qkv.q;
  args.k = qkv.k;
  args.v = qkv.v;
  args.scale = c.attention_scale();
  args.out = ctx.Empty(out, qkv.q.shape());
  args.stored_mass = mass;
  ctx.backend->fused().AttentionOfStep(*ctx.backend, args);
  return args.out;
}

// One layer: residual in, residual out. In the last layer only the output rows go on past attention. `scaled` is what
// the layer before left for this one's first norm, and becomes what this one leaves for the next.
Tensor RunLayer(const Context& ctx, const Pass& pass, int64_t layer, Tensor residual, ScaledRows* scaled) {
  const ModelConfig& c = pass.weights.config;
  const LayerWeights& w = pass.weights.layers[static_cast<size_t>(layer)];
  const int64_t rows = residual.dim(0);
  const bool fused = pass.angles && CanFuseQkv(w);
  const Qkv qkv = fused ? FusedQkv(ctx, pass, layer, w, residual, *scaled)
                        : ProjectQkv(ctx, pass, w, RmsNorm(ctx, residual, w.attn_norm, c.norm_eps));
  if (pass.options.observe_queries) pass.options.observe_queries(layer, qkv.q);
  Tensor attended = Attend(ctx, pass, layer, w, qkv).Reshape({rows, c.heads * c.head_dim});
  if (pass.batch && !(fused && pass.inputs.kv.places)) {
    for (const BatchSequence& sequence : pass.batch->sequences) {
      if (sequence.state->keeps_rows()) {
        sequence.state->Append(ctx, layer, qkv.k, qkv.v, sequence.row_begin, sequence.row_count);
      }
    }
  }
  if (layer + 1 == c.layers && pass.inputs.output_rows) {
    attended = GatherRows(ctx, attended, pass.inputs.output_rows);
    residual = GatherRows(ctx, residual, pass.inputs.output_rows);
  }
  ScaledRows for_ffn;
  residual = LinearAdd(ctx, attended, w.o, residual, w.ffn_norm, c.norm_eps, w.gate_up ? &for_ffn : nullptr);
  const Tensor fed = FeedForward(ctx, pass, w, residual, for_ffn);
  const LayerWeights* const next =
      layer + 1 < c.layers ? &pass.weights.layers[static_cast<size_t>(layer) + 1] : nullptr;
  Tensor next_norm;
  if (next && pass.angles && CanFuseQkv(*next)) next_norm = next->attn_norm;
  if (!next && pass.logits) next_norm = pass.weights.final_norm;
  *scaled = {};
  return LinearAdd(ctx, fed, w.down, residual, next_norm, c.norm_eps, next_norm ? scaled : nullptr);
}

// What the pass needs beside its inputs, from kernels that the layers share.
void Prepare(const Context& ctx, Pass* pass) {
  if (ctx.tape || !ctx.backend->fused().has_steps()) return;
  const RopeConfig& rope = pass->weights.config.rope;
  pass->angles = ctx.EmptyF32({pass->inputs.rows, 2 * static_cast<int64_t>(rope.inv_freq.size())});
  ctx.backend->fused().RopeAngles(*ctx.backend, {pass->inputs.positions, pass->angles, &rope});
  if (pass->inputs.attention_bytes) {
    ctx.backend->fused().AttentionStepTables(
        *ctx.backend, {pass->inputs.attention, pass->inputs.attention_bytes, &pass->attention_tables});
  }
}

}  // namespace

absl::Status CheckTokens(const ModelConfig& config, absl::Span<const int32_t> tokens) {
  for (int32_t id : tokens) {
    if (id < 0 || id >= config.vocabulary) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", id, " is outside the vocabulary of ", config.vocabulary));
    }
  }
  return absl::OkStatus();
}

void Batch::Add(SequenceState* state, absl::Span<const int32_t> sequence_tokens, Outputs outputs) {
  const int64_t begin = rows(), count = static_cast<int64_t>(sequence_tokens.size());
  sequences.push_back({state, begin, count});
  for (int64_t i = 0; i < count; ++i) {
    tokens.push_back(sequence_tokens[static_cast<size_t>(i)]);
    positions.push_back(static_cast<int32_t>(state->next_position() + i));
    if (outputs == Outputs::kAll || (outputs == Outputs::kLast && i + 1 == count)) {
      output_rows.push_back(static_cast<int32_t>(begin + i));
    }
  }
}

bool PlanDecodeStep(const Context& ctx, const Weights& weights, const Batch& batch, AttentionStep* step) {
  if (ctx.tape || !ctx.backend->fused().has_steps() || batch.rows() == 0) return false;
  if (!std::all_of(weights.layers.begin(), weights.layers.end(), CanFuseQkv)) return false;
  const ModelConfig& c = weights.config;
  std::vector<KvLayers> segments;
  std::vector<AttentionSequence> sequences;
  std::vector<std::pair<const Memory*, int32_t>> seen;  // the place of a memory's segment
  DType dtype = DType::kF32;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const BatchSequence& sequence = batch.sequences[i];
    const SequenceState& state = *sequence.state;
    if (!state.keeps_rows() || !state.MemoryLayers()) return false;
    if (i > 0 && state.dtype() != dtype) return false;
    dtype = state.dtype();
    AttentionSequence rows{sequence.row_begin, sequence.row_count, {}};
    size_t next = 0;
    for (const auto& memory : state.memories()) {
      if (memory->slots == 0) continue;
      const KvLayers& layers = (*state.MemoryLayers())[next++];
      auto found = std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.first == memory.get(); });
      if (found == seen.end()) {
        found = seen.emplace(seen.end(), memory.get(), static_cast<int32_t>(segments.size()));
        segments.push_back(layers);
      }
      rows.segments.push_back(found->second);
    }
    const size_t own = segments.size();
    state.AddOwnLayers(&segments);
    for (size_t s = own; s < segments.size(); ++s) rows.segments.push_back(static_cast<int32_t>(s));
    sequences.push_back(std::move(rows));
  }
  if (!IsAttentionStep(sequences)) return false;
  ctx.backend->fused().PlanAttentionStep(
      *ctx.backend, {&segments, &sequences, c.layers, c.heads, c.kv_heads, c.head_dim, dtype == DType::kBF16, step});
  return true;
}

std::vector<int64_t> KvPlaces(const Batch& batch) {
  std::vector<int64_t> places;
  places.reserve(static_cast<size_t>(2 * batch.rows()));
  for (const BatchSequence& sequence : batch.sequences) {
    if (sequence.state->keeps_rows()) {
      sequence.state->AddPlaces(sequence.row_count, &places);
    } else {
      places.resize(places.size() + static_cast<size_t>(2 * sequence.row_count), 0);
    }
  }
  return places;
}

namespace {

Tensor RunLayers(const Context& ctx, const Pass& pass, Tensor x, ScaledRows* scaled) {
  for (int64_t layer = 0; layer < pass.weights.config.layers; ++layer) x = RunLayer(ctx, pass, layer, x, scaled);
  return x;
}

// The inputs of a batch.
PassInputs InputsOf(const Context& ctx, const Weights& weights, const Batch& batch) {
  PassInputs inputs;
  inputs.rows = batch.rows();
  inputs.tokens = ctx.Ints(batch.tokens, {inputs.rows});
  inputs.positions = ctx.Ints(batch.positions, {inputs.rows});
  inputs.outputs = !batch.output_rows.empty();
  if (inputs.outputs && static_cast<int64_t>(batch.output_rows.size()) != inputs.rows) {
    inputs.output_rows = ctx.Ints(batch.output_rows, {static_cast<int64_t>(batch.output_rows.size())});
  }
  if (ctx.tape || !ctx.backend->fused().has_steps()) return inputs;
  const SequenceState* keeper = nullptr;
  bool alike = true;
  for (const BatchSequence& sequence : batch.sequences) {
    if (!sequence.state->keeps_rows()) continue;
    if (keeper) alike = alike && keeper->dtype() == sequence.state->dtype();
    keeper = sequence.state;
  }
  const bool fused = std::all_of(weights.layers.begin(), weights.layers.end(), CanFuseQkv);
  if (keeper && alike && fused) {
    const std::vector<int64_t> places = KvPlaces(batch);
    inputs.kv = KvRowsOf(weights.config, keeper->dtype());
    inputs.kv.places = ctx.Empty(DType::kI64, {inputs.rows, 2});
    ctx.backend->Upload(places.data(), inputs.kv.places);
  }
  AttentionStep step;
  if (PlanDecodeStep(ctx, weights, batch, &step)) {
    inputs.attention = step.sizes;
    inputs.attention_bytes = ctx.Empty(DType::kU8, {static_cast<int64_t>(step.bytes.size())});
    ctx.backend->Upload(step.bytes.data(), inputs.attention_bytes);
  }
  return inputs;
}

}  // namespace

Tensor StepLogits(const Context& ctx, const Weights& weights, const PassInputs& inputs, Tensor* stored_mass) {
  const ForwardOptions options;
  Pass pass{weights, options, nullptr, inputs, {}, {}, {}, /*logits=*/true};
  STILLHOUSE_CHECK(inputs.kv.places && inputs.attention_bytes);
  if (stored_mass) pass.stored_mass = *stored_mass = ctx.EmptyF32({weights.config.layers, inputs.rows});
  Prepare(ctx, &pass);
  ScaledRows scaled;
  const Tensor x = RunLayers(ctx, pass, Embedding(ctx, weights.embedding, inputs.tokens), &scaled);
  return NormLinear(ctx, x, weights.final_norm, weights.config.norm_eps, weights.output, scaled);
}

ForwardResult Forward(const Context& ctx, const Weights& weights, const Batch& batch, const ForwardOptions& options) {
  const ModelConfig& c = weights.config;
  const int64_t rows = batch.rows();
  STILLHOUSE_CHECK_GT(rows, 0);
  STILLHOUSE_CHECK_EQ(batch.positions.size(), batch.tokens.size());
  const absl::Status known = CheckTokens(c, batch.tokens);
  STILLHOUSE_CHECK(known.ok()) << known.message();
  Span span("forward");
  Pass pass{weights, options, &batch, InputsOf(ctx, weights, batch), {}, {}, {}};
  if (options.measure_stored_mass) pass.stored_mass = ctx.EmptyF32({c.layers, rows});
  Prepare(ctx, &pass);

  // Memory tensors that want a gradient, so that Checkpoint knows what a layer depends on.
  std::vector<std::vector<Tensor>> watched(static_cast<size_t>(c.layers));
  if (ctx.tape) {
    STILLHOUSE_CHECK(!options.measure_stored_mass) << "measured in serving only";
    for (const BatchSequence& sequence : batch.sequences) {
      STILLHOUSE_CHECK(!sequence.state->keeps_rows()) << "rows may not be kept while a tape records";
      for (const auto& memory : sequence.state->memories()) {
        for (int64_t layer = 0; layer < c.layers; ++layer) {
          const LayerKv& kv = memory->layers[static_cast<size_t>(layer)];
          for (const Tensor* t : {&kv.k, &kv.v, &kv.beta}) {
            if (ctx.Wants(*t)) watched[static_cast<size_t>(layer)].push_back(*t);
          }
        }
      }
    }
  }

  Tensor x = Embedding(ctx, weights.embedding, pass.inputs.tokens);
  if (ctx.tape && options.checkpoint_layers) {
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      x = Checkpoint(
          ctx,
          // The pass is copied: the closure runs again in the backward pass, when this frame is gone. Weights, batch
          // and options outlive the tape.
          [pass, layer](const Context& inner, const std::vector<Tensor>& inputs) {
            ScaledRows none;
            return std::vector<Tensor>{RunLayer(inner, pass, layer, inputs[0], &none)};
          },
          {x}, watched[static_cast<size_t>(layer)])[0];
    }
  } else {
    ScaledRows scaled;
    x = RunLayers(ctx, pass, x, &scaled);
  }
  for (const BatchSequence& sequence : batch.sequences) {
    if (sequence.state->keeps_rows()) sequence.state->Advance(sequence.row_count);
  }
  ForwardResult result;
  if (pass.inputs.outputs) result.hidden = RmsNorm(ctx, x, weights.final_norm, c.norm_eps);
  if (options.measure_stored_mass) result.stored_mass = MeanOverLayers(ctx.ToFloats(pass.stored_mass), c.layers);
  return result;
}

std::vector<float> MeanOverLayers(const std::vector<float>& of_layers, int64_t layers) {
  const size_t rows = of_layers.size() / static_cast<size_t>(layers);
  std::vector<float> mean(rows, 0.0f);
  for (size_t i = 0; i < of_layers.size(); ++i) mean[i % rows] += of_layers[i] / static_cast<float>(layers);
  return mean;
}

KvRows KvRowsOf(const ModelConfig& config, DType dtype) {
  KvRows rows;
  rows.dtype = dtype;
  rows.head_stride = PagePool::kPageSlots * config.head_dim;
  rows.layer_stride = 2 * config.kv_heads * rows.head_stride;
  return rows;
}

Tensor Logits(const Context& ctx, const Weights& weights, const Tensor& hidden) {
  return Linear(ctx, hidden, weights.output);
}

absl::StatusOr<Tensor> Prefill(const Context& ctx, const Weights& weights, SequenceState* state,
                               absl::Span<const int32_t> tokens, int64_t chunk) {
  STILLHOUSE_CHECK(!tokens.empty());
  STILLHOUSE_RETURN_IF_ERROR(CheckTokens(weights.config, tokens));
  Tensor last;
  for (size_t begin = 0; begin < tokens.size(); begin += static_cast<size_t>(chunk)) {
    const auto piece = tokens.subspan(begin, static_cast<size_t>(chunk));
    if (state->keeps_rows()) STILLHOUSE_RETURN_IF_ERROR(state->Reserve(static_cast<int64_t>(piece.size())));
    Batch batch;
    batch.Add(state, piece, begin + piece.size() == tokens.size() ? Batch::Outputs::kLast : Batch::Outputs::kNone);
    last = Forward(ctx, weights, batch).hidden;
  }
  return last;
}

}  // namespace stillhouse
