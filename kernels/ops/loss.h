// Softmax, log-softmax, cross-entropy, and the losses that are fused with the output projection.
#ifndef STILLHOUSE_KERNELS_OPS_LOSS_H_
#define STILLHOUSE_KERNELS_OPS_LOSS_H_

#include <cstdint>

#include "kernels/ops/context.h"

namespace stillhouse {

// Over the last dimension of f32 [R, V]. dz = s ⊙ (g − Σ g s); rows of −inf give 0 (softmax) and −inf (log-softmax).
struct SoftmaxArgs {
  Tensor z, out;
};
struct SoftmaxGradArgs {
  Tensor out, dout, dz;
};
Tensor Softmax(const Context& ctx, const Tensor& z);

// dz = g − s·Σ g.
struct LogSoftmaxArgs {
  Tensor z, out;
};
struct LogSoftmaxGradArgs {
  Tensor out, dout, dz;
};
Tensor LogSoftmax(const Context& ctx, const Tensor& z);

enum class Reduction : uint8_t { kNone, kSum, kMean };

struct CrossEntropyOptions {
  float label_smoothing = 0.0f;  // ε: target = (1−ε)·one-hot + ε/V
  int32_t ignore_index = -100;   // rows with this target give 0 and do not count
  Reduction reduction = Reduction::kMean;
  float z_loss = 0.0f;  // adds z_loss · lse² per row
};

// loss_r = lse(z_r) − Σ_j y_j z_j. Targets are ids i32 [R], or soft f32 [R, V] with rows summing to 1 (then `targets`
// is empty). class_weights f32 [V] (ids only): a row's whole loss counts with its target's weight, and the mean divides
// by the sum of the weights used (0 rows: the mean is 0).
struct CrossEntropyArgs {
  Tensor z, targets, soft_targets, class_weights;
  CrossEntropyOptions options;
  Tensor loss;  // [1], or [R] for kNone
};
struct CrossEntropyGradArgs {
  Tensor z, targets, soft_targets, class_weights;
  CrossEntropyOptions options;
  Tensor dloss, dz;
};
Tensor CrossEntropy(const Context& ctx, const Tensor& z, const Tensor& targets, const CrossEntropyOptions& options,
                    const Tensor& class_weights = Tensor());
Tensor CrossEntropySoft(const Context& ctx, const Tensor& z, const Tensor& soft_targets,
                        const CrossEntropyOptions& options);

// Cross-entropy of Linear(x, weight) without the [R, V] logits: rows are taken in chunks; logits become the loss and,
// in place, their gradient, and are folded into dx at once. x f32 [R, D], weight [V, D] any dtype, targets i32 [R]. dx
// (scaled for dloss = 1) is made by the forward kernel if it is not empty. The weight gets no gradient.
struct LinearCrossEntropyArgs {
  Tensor x, weight, targets;
  CrossEntropyOptions options;  // reduction kMean or kSum
  Tensor loss, dx;
};
Tensor LinearCrossEntropy(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& targets,
                          const CrossEntropyOptions& options = {});

enum class DistillMode : uint8_t {
  kRenormalised,  // q̂ = q/Σq: loss −Σ q̂ log p, dz = p − q̂
  kRaw,           // loss −Σ q log p, dz = (Σq)·p − q
  kTail,          // one more bucket: 1 − Σq against 1 − Σp
};

// Sparse distillation (cartridges): each row carries the teacher's candidates (id, logprob); unused entries have id −1.
// Mean over rows with row_weights (f32 [R], or empty: 1 each): Σ w·loss / Σ w over the rows that have a candidate; rows
// without one are not supervised and do not count. Chunked like LinearCrossEntropy.
struct LinearDistillArgs {
  Tensor x;            // [R, D]
  Tensor weight;       // [V, D]
  Tensor ids;          // i32 [R, C]; the ids of a row differ
  Tensor logprobs;     // f32 [R, C], the teacher's natural-log probabilities
  Tensor row_weights;  // f32 [R] or empty
  DistillMode mode = DistillMode::kRenormalised;
  Tensor loss, dx;  // [1]; [R, D] or empty
};
Tensor LinearDistill(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& ids,
                     const Tensor& logprobs, DistillMode mode, const Tensor& row_weights = Tensor());

// For teachers and scoring: log-probabilities of Linear(x, weight) without keeping [R, V]. For each row the k best
// (descending; ties by lower id; id −1 where fewer logits are above −inf) and that of a given token. k may be 0; tokens
// may be empty.
struct TopLogprobsArgs {
  Tensor x, weight;
  Tensor tokens;  // i32 [R] or empty
  int64_t k = 0;
  Tensor top_ids, top_logprobs;  // i32 [R, k], f32 [R, k]
  Tensor token_logprobs;         // f32 [R]
};
void TopLogprobs(const Context& ctx, const TopLogprobsArgs& args);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_LOSS_H_
