#include "server/model/forward.h"

#include <algorithm>

#include "kernels/base/status.h"
#include "kernels/base/trace.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/gather.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/norm.h"
#include "kernels/ops/rope.h"

namespace stillhouse {
namespace {

// Everything that the layers of one pass share.
struct Pass {
  const Weights& weights;
  const Batch& batch;
  const ForwardOptions& options;
  Tensor positions;    // i32 [R]
  Tensor output_rows;  // i32 [n], or empty if every row is an output
  Tensor stored_mass;  // f32 [layers, R], or empty
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
  out.q = Rope(ctx, out.q, pass.positions, c.rope);
  out.k = Rope(ctx, out.k, pass.positions, c.rope);
  return out;
}

Tensor FeedForward(const Context& ctx, const Pass& pass, const LayerWeights& w, const Tensor& x) {
  const int64_t ffn = pass.weights.config.ffn;
  if (w.gate_up) {
    const Tensor both = Linear(ctx, x, w.gate_up);
    return Linear(ctx, SwiGlu(ctx, both.Slice(1, 0, ffn), both.Slice(1, ffn, 2 * ffn)), w.down);
  }
  return Linear(ctx, SwiGlu(ctx, Linear(ctx, x, w.gate), Linear(ctx, x, w.up)), w.down);
}

// One layer: residual in, residual out. In the last layer only the output rows go on past attention.
Tensor RunLayer(const Context& ctx, const Pass& pass, int64_t layer, Tensor residual) {
  const ModelConfig& c = pass.weights.config;
  const LayerWeights& w = pass.weights.layers[static_cast<size_t>(layer)];
  const int64_t rows = residual.dim(0);
  const Qkv qkv = ProjectQkv(ctx, pass, w, RmsNorm(ctx, residual, w.attn_norm, c.norm_eps));
  if (pass.options.observe_queries) pass.options.observe_queries(layer, qkv.q);
  const Tensor mass = pass.stored_mass ? pass.stored_mass.Select(0, layer) : Tensor();
  Tensor attended = Attention(ctx, qkv.q, qkv.k, qkv.v, PlanLayer(pass.batch, layer), c.attention_scale(), mass);
  for (const BatchSequence& sequence : pass.batch.sequences) {
    if (sequence.state->keeps_rows()) {
      sequence.state->Append(ctx, layer, qkv.k, qkv.v, sequence.row_begin, sequence.row_count);
    }
  }
  attended = attended.Reshape({rows, c.heads * c.head_dim});
  if (layer + 1 == c.layers && pass.output_rows) {
    attended = GatherRows(ctx, attended, pass.output_rows);
    residual = GatherRows(ctx, residual, pass.output_rows);
  }
  residual = Add(ctx, residual, Linear(ctx, attended, w.o));
  return Add(ctx, residual, FeedForward(ctx, pass, w, RmsNorm(ctx, residual, w.ffn_norm, c.norm_eps)));
}

}  // namespace

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

ForwardResult Forward(const Context& ctx, const Weights& weights, const Batch& batch, const ForwardOptions& options) {
  const ModelConfig& c = weights.config;
  const int64_t rows = batch.rows();
  STILLHOUSE_CHECK_GT(rows, 0);
  STILLHOUSE_CHECK_EQ(batch.positions.size(), batch.tokens.size());
  Span span("forward");
  Pass pass{weights, batch, options, {}, {}, {}};
  pass.positions = ctx.Ints(batch.positions, {rows});
  if (static_cast<int64_t>(batch.output_rows.size()) != rows && !batch.output_rows.empty()) {
    pass.output_rows = ctx.Ints(batch.output_rows, {static_cast<int64_t>(batch.output_rows.size())});
  }
  if (options.measure_stored_mass) pass.stored_mass = ctx.EmptyF32({c.layers, rows});

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

  Tensor x = Embedding(ctx, weights.embedding, ctx.Ints(batch.tokens, {rows}));
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    if (ctx.tape && options.checkpoint_layers) {
      x = Checkpoint(
          ctx,
          // The pass is copied: the closure runs again in the backward pass, when this frame is gone. Weights, batch
          // and options outlive the tape.
          [pass, layer](const Context& inner, const std::vector<Tensor>& inputs) {
            return std::vector<Tensor>{RunLayer(inner, pass, layer, inputs[0])};
          },
          {x}, watched[static_cast<size_t>(layer)])[0];
    } else {
      x = RunLayer(ctx, pass, layer, x);
    }
  }
  for (const BatchSequence& sequence : batch.sequences) {
    if (sequence.state->keeps_rows()) sequence.state->Advance(sequence.row_count);
  }
  ForwardResult result;
  if (!batch.output_rows.empty()) result.hidden = RmsNorm(ctx, x, weights.final_norm, c.norm_eps);
  if (options.measure_stored_mass) {
    // One copy for all layers.
    const std::vector<float> mass = ctx.ToFloats(pass.stored_mass);
    result.stored_mass.assign(static_cast<size_t>(rows), 0.0f);
    for (size_t i = 0; i < mass.size(); ++i) {
      result.stored_mass[i % static_cast<size_t>(rows)] += mass[i] / static_cast<float>(c.layers);
    }
  }
  return result;
}

Tensor Logits(const Context& ctx, const Weights& weights, const Tensor& hidden) {
  return Linear(ctx, hidden, weights.output);
}

absl::StatusOr<Tensor> Prefill(const Context& ctx, const Weights& weights, SequenceState* state,
                               absl::Span<const int32_t> tokens, int64_t chunk) {
  STILLHOUSE_CHECK(!tokens.empty());
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
