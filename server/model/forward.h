// The forward pass: the only one, for serving and for training.
#ifndef STILLHOUSE_SERVER_MODEL_FORWARD_H_
#define STILLHOUSE_SERVER_MODEL_FORWARD_H_

#include <functional>
#include <vector>

#include "server/model/weights.h"
#include "server/state/sequence_state.h"

namespace stillhouse {

// Consecutive rows of the batch that belong to one sequence, in order. They see the sequence's memories, its kept rows,
// and each other causally. If the state keeps rows, room was reserved before, and the rows are kept.
struct BatchSequence {
  SequenceState* state = nullptr;
  int64_t row_begin = 0;
  int64_t row_count = 0;
};

// INVALID_ARGUMENT naming an id that the model has no embedding for. Whoever takes ids from outside asks this first:
// Forward takes a wrong one for a bug of ours.
absl::Status CheckTokens(const ModelConfig& config, absl::Span<const int32_t> tokens);

// Rows of any number of sequences, one after the other: prompts in chunks, single decode steps, packed training rows.
struct Batch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;  // one per token; usually the state's next_position onwards
  std::vector<BatchSequence> sequences;
  std::vector<int32_t> output_rows;  // rows whose final hidden state is wanted, ascending

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  // Appends a sequence with its next positions; want_all: every row is an output, else only the last, or none.
  enum class Outputs { kNone, kLast, kAll };
  void Add(SequenceState* state, absl::Span<const int32_t> sequence_tokens, Outputs outputs);
};

struct ForwardOptions {
  // Recompute each layer in the backward pass instead of keeping its activations (long training rows).
  bool checkpoint_layers = false;
  // Also report, per row, the share of attention that fell on memories (mean over heads and layers).
  bool measure_stored_mass = false;
  // Sees each layer's rotated queries [R, heads, head_dim] (attention matching).
  std::function<void(int64_t layer, const Tensor& q)> observe_queries;
};

struct ForwardResult {
  Tensor hidden;                   // f32 [outputs, hidden]: after the final norm, ready for the output projection
  std::vector<float> stored_mass;  // [R], or empty
};

// What the rows of a pass read beside the weights, on the device. Forward makes it of a batch; a recorded decode step
// has it at addresses that stay.
struct PassInputs {
  int64_t rows = 0;
  Tensor tokens, positions;  // i32 [R]
  Tensor output_rows;        // i32 [n]; empty: every row is an output
  bool outputs = true;       // false: none is
  KvRows kv;                 // where new rows go; without places states take them (Append)
  AttentionStep::Sizes attention;
  Tensor attention_bytes;  // u8: a decode step's plan; empty: attention is planned layer by layer from the batch
};
// A batch as a decode step: its attention planned for all layers at once. False if it is none: a sequence with many
// rows, without pages, or with a memory whose layers are scattered; a backend without such steps; weights that are not
// joined, or have biases.
bool PlanDecodeStep(const Context& ctx, const Weights& weights, const Batch& batch, AttentionStep* step);
// Places of the batch's new rows (KvRows::places), for states that keep rows.
std::vector<int64_t> KvPlaces(const Batch& batch);
// How rows lie in pages of this type; places are the caller's.
KvRows KvRowsOf(const ModelConfig& config, DType dtype);
// [R] of [layers, R].
std::vector<float> MeanOverLayers(const std::vector<float>& of_layers, int64_t layers);
// The logits [R, vocabulary] of all rows, for inputs with attention and places. `stored_mass` [layers, R] is made if it
// is wanted. States are left as they are.
Tensor StepLogits(const Context& ctx, const Weights& weights, const PassInputs& inputs, Tensor* stored_mass = nullptr);

// Runs the batch. With a tape in the context the gradient flows to whatever is watched (memory keys, values and biases;
// weights in f32); then no rows may be kept. Without one, kept rows are appended to their states.
ForwardResult Forward(const Context& ctx, const Weights& weights, const Batch& batch,
                      const ForwardOptions& options = {});

// hidden · outputᵀ: [n, vocabulary].
Tensor Logits(const Context& ctx, const Weights& weights, const Tensor& hidden);

// Convenience for whole prompts: runs `tokens` through `state` in chunks of at most `chunk` rows, keeping rows if the
// state does; returns the last row's final hidden state [1, hidden].
absl::StatusOr<Tensor> Prefill(const Context& ctx, const Weights& weights, SequenceState* state,
                               absl::Span<const int32_t> tokens, int64_t chunk = 512);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_MODEL_FORWARD_H_
