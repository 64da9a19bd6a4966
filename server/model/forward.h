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
