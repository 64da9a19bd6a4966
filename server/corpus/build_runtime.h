// How the stages of a build use the engine.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILD_RUNTIME_H_
#define STILLHOUSE_SERVER_CORPUS_BUILD_RUNTIME_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/memory_plan.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

// One per build, used by the builder's thread.
struct BuildRuntime {
  Engine* engine = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat = nullptr;
  std::string tenant, operation_id;
  // Not OK: the build was cancelled (CANCELLED) or the server stops (UNAVAILABLE). Called often, must be cheap.
  std::function<absl::Status()> check;
  // Rows of one task: short enough for a queue of queries to wait behind it.
  int64_t task_rows = 256;
  int64_t teacher_bytes = BuildLimits().teacher_bytes;  // keys and values of the document, at most

  const ModelConfig& config() const { return engine->weights().config; }
  // Runs a task of under about a second on the engine's thread, unless the build should stop.
  absl::Status Run(const std::function<absl::Status(const Context&)>& task) const;
  // The keys and values of `tokens` from position 0, as a memory of its own; several tasks. `seconds` (may be null)
  // grows by the time that the device worked on it.
  absl::StatusOr<std::shared_ptr<Memory>> PrefillMemory(const std::vector<int32_t>& tokens, double* seconds) const;
};

struct GenerationJob {
  std::vector<int32_t> prompt;
  std::shared_ptr<const Memory> memory;  // may be null
  SampleRow sampling;
  int64_t max_tokens = 1;
  // Called on the engine's thread after every token; false ends the sequence. May be null.
  std::function<bool(const SampledToken&)> keep_going;
};

struct GenerationOutput {
  std::vector<SampledToken> tokens;
  FinishReason reason = FinishReason::kError;
  int64_t prompt_tokens = 0;
};

// Runs `count` jobs through the engine's continuous batch at background priority: `make(i)` in order, as room appears;
// `done(i, output)` in the order in which they end, on the caller's thread. The first error (or a check that fails)
// cancels what is in flight, waits for it and is returned.
absl::Status GenerateAll(const BuildRuntime& runtime, int64_t count,
                         const std::function<absl::StatusOr<GenerationJob>(int64_t)>& make,
                         const std::function<absl::Status(int64_t, GenerationOutput)>& done);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILD_RUNTIME_H_
