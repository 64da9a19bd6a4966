// How a GPU's memory is shared out before anything runs, so that nothing that is admitted later can find it empty.
#ifndef STILLHOUSE_SERVER_ENGINE_MEMORY_PLAN_H_
#define STILLHOUSE_SERVER_ENGINE_MEMORY_PLAN_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/model/config.h"

namespace stillhouse {

struct MemoryRequest {
  int64_t device = 0;   // bytes that the server may take in all
  int64_t weights = 0;  // that the model takes, or will
  int64_t page_bytes = 0;
  int64_t prefill_rows = 0;  // of one step, at most
  int64_t output_rows = 0;   // that draw a token in one step, at most
  // What the operator asks for; none: a share of what is left.
  std::optional<int64_t> sequences, memories;
};

// All in bytes; together at most the request's.
struct MemoryPlan {
  int64_t weights = 0;
  int64_t work = 0;       // activations and logits of steps, whatever their shape
  int64_t builds = 0;     // a build's document, and its training
  int64_t sequences = 0;  // keys and values of running queries
  int64_t memories = 0;   // resident caches
};

// RESOURCE_EXHAUSTED, naming the flags and how many bytes are needed, if it does not fit.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config, const MemoryRequest& request);

// What a model's matrices and vectors take with so many bytes for an element of a matrix.
int64_t WeightBytes(const ModelConfig& config, int64_t element_bytes);

// What keeps a build within its part of the plan.
struct BuildLimits {
  int64_t teacher_bytes = int64_t{6} << 30;  // keys and values of the document
  int64_t task_rows = 0;                     // rows of one pass; 0: what suits the device
  int64_t checkpoint_rows = 2048;            // a training pass of more recomputes layers
  // Of the memory that is trained, with its gradients and moments.
  int64_t trained_bytes = std::numeric_limits<int64_t>::max();
};
// For one that trains a memory of `trained` bytes, or none.
BuildLimits LimitsOfBuilds(const ModelConfig& config, int64_t builds, int64_t trained = 0);

// "3.2 GiB (3435973836 bytes)".
std::string BytesForPeople(int64_t bytes);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_MEMORY_PLAN_H_
