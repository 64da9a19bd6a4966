#include "server/engine/memory_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stillhouse {
namespace {

// Tables, cuBLAS workspaces, and the last part of a block that nobody uses.
constexpr int64_t kFixedWork = int64_t{256} << 20;
// With less a server would start and refuse nearly everything.
constexpr int64_t kLeastPages = 16;
constexpr int64_t kLargestTask = 16384;
constexpr int64_t kLeastTask = 256;

// Activations that one row of a forward pass holds at its widest: the residual stream and its norm, q, k and v before
// and after their rotation, attention's output, both halves of the gated layer and their product; operands rounded to
// bf16 beside them.
int64_t RowBytes(const ModelConfig& c) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const int64_t floats = 4 * c.hidden + 3 * q + 4 * kv + 3 * c.ffn;
  return 4 * floats + 2 * (c.hidden + q + c.ffn);
}

// A quarter more: the pool's size classes.
int64_t WithSlack(int64_t bytes) { return bytes + bytes / 4; }

// Of a training pass that recomputes its layers: their inputs, and one layer with its gradients.
int64_t TrainingRowBytes(const ModelConfig& c) { return WithSlack(4 * c.layers * c.hidden + 4 * RowBytes(c)); }

}  // namespace

std::string BytesForPeople(int64_t bytes) {
  const double gib = static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
  return absl::StrFormat("%.*f GiB (%d bytes)", gib < 0.1 ? 3 : 1, gib, bytes);
}

int64_t WeightBytes(const ModelConfig& c, int64_t element_bytes) {
  const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const int64_t layer = c.hidden * (q + 2 * kv) + q * c.hidden + 3 * c.hidden * c.ffn;
  const int64_t matrices = c.layers * layer + (c.tied_embeddings ? 1 : 2) * c.vocabulary * c.hidden;
  return matrices * element_bytes + 4 * c.hidden * (2 * c.layers + 1);
}

absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config, const MemoryRequest& request) {
  MemoryPlan plan;
  plan.weights = request.weights;
  plan.work = kFixedWork + WithSlack(request.prefill_rows * RowBytes(config)) +
              // Logits, what drawing a token makes of them, and both once more in recorded steps.
              WithSlack(4 * request.output_rows * (4 * config.vocabulary + RowBytes(config)));
  const int64_t least_sequences = request.sequences.value_or(kLeastPages * request.page_bytes);
  const int64_t least_memories = request.memories.value_or(kLeastPages * request.page_bytes);
  const int64_t least = plan.weights + plan.work + least_sequences + least_memories;
  if (least > request.device) {
    std::string flags;
    if (request.sequences) absl::StrAppend(&flags, ", --kv-memory of ", BytesForPeople(*request.sequences));
    if (request.memories) absl::StrAppend(&flags, ", --resident-memory of ", BytesForPeople(*request.memories));
    return absl::ResourceExhaustedError(absl::StrCat(
        "the GPU memory that the server may take, ", BytesForPeople(request.device), ", does not hold the weights, ",
        BytesForPeople(plan.weights), ", room to compute in, ", BytesForPeople(plan.work), flags,
        flags.empty() ? ", and the least of keys and values" : "", ": give --device-memory at least ", least,
        " (a share of what is free, such as 95%, or bytes), or lower ",
        flags.empty() ? "" : "--kv-memory, --resident-memory, ", "--prefill-chunk or --max-sequences",
        ", or take --gpu-weights bf16"));
  }
  const int64_t left = request.device - plan.weights - plan.work;
  const int64_t asked_for = request.sequences.value_or(0) + request.memories.value_or(0);
  const int64_t whole_build = kLargestTask * TrainingRowBytes(config) + 2 * BuildLimits().teacher_bytes;
  plan.builds = std::min({whole_build, left / 4, left - std::max(asked_for, least_sequences + least_memories)});
  const int64_t kv = left - plan.builds;
  if (request.sequences) {
    plan.sequences = *request.sequences;
    plan.memories = request.memories.value_or(kv - plan.sequences);
  } else if (request.memories) {
    plan.memories = *request.memories;
    plan.sequences = kv - plan.memories;
  } else {
    plan.sequences = std::max(least_sequences, kv / 4);
    plan.memories = kv - plan.sequences;
  }
  return plan;
}

BuildLimits LimitsOfBuilds(const ModelConfig& config, int64_t builds, int64_t trained) {
  BuildLimits limits;
  // Queries of self-study may read a copy of the document in their own layout, so it counts twice.
  limits.teacher_bytes = std::min(limits.teacher_bytes, builds / 4);
  limits.trained_bytes = builds - 2 * limits.teacher_bytes;
  const int64_t training = std::max<int64_t>(0, limits.trained_bytes - trained);
  limits.task_rows = std::clamp(training / TrainingRowBytes(config), kLeastTask, kLargestTask);
  // Every layer's activations are kept.
  const int64_t kept = WithSlack(config.layers * RowBytes(config));
  limits.checkpoint_rows = std::min(limits.checkpoint_rows, training / std::max<int64_t>(1, kept));
  return limits;
}

}  // namespace stillhouse
