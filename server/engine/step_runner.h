// One step of the engine: what runs is planned, computed and told to its sinks.
#ifndef STILLHOUSE_SERVER_ENGINE_STEP_RUNNER_H_
#define STILLHOUSE_SERVER_ENGINE_STEP_RUNNER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "server/engine/engine.h"
#include "server/engine/scheduler.h"
#include "server/engine/sequence.h"
#include "server/model/decode_steps.h"

namespace stillhouse {

// Work that finds no memory on the device goes on in the host's (BufferPool::Allocate), so that nothing half-way is
// lost. This tells what came since it was made: RESOURCE_EXHAUSTED with what is missing and what to do.
class DeviceMemoryWatch {
 public:
  explicit DeviceMemoryWatch(const BufferPool& pool) : pool_(pool), before_(pool.overflowed_bytes()) {}
  int64_t missing() const { return static_cast<int64_t>(pool_.overflowed_bytes() - before_); }  // bytes
  absl::Status status() const;

 private:
  const BufferPool& pool_;
  const size_t before_;
};

// Owned by the engine, used by its thread, without its lock.
class StepRunner {
 public:
  // `options` as resolved; `pages` outlives it.
  StepRunner(const Context& ctx, std::shared_ptr<const Weights> weights, const EngineOptions& options, PagePool* pages);

  struct Ended {
    Sequence* sequence = nullptr;
    FinishReason reason = FinishReason::kError;
    absl::Status status;
  };
  struct Result {
    std::vector<PlannedRows> plan;
    std::vector<Ended> ended;
    int64_t prefill_tokens = 0, decode_tokens = 0;  // rows
    int64_t drawn = 0;                              // tokens
    int64_t invalid_logits = 0;
  };
  // Plan, Run, Commit, for sequences of one priority. `measure`: also how much of attention memories get. Background
  // sequences of a step that the device had no memory for end with RESOURCE_EXHAUSTED; queries have their tokens, late.
  Result Run(const std::vector<Sequence*>& running, Priority priority, bool measure);

  // Says in the log, now and then, that queries had to do without this much of the device.
  void WarnOfMemory(int64_t missing);

  DecodeSteps::Stats recordings() const { return decode_steps_ ? decode_steps_->stats() : DecodeSteps::Stats(); }

 private:
  void Compute(const Batch& batch, const std::vector<Sequence*>& drawing, bool mass, int64_t prefill_tokens,
               DecodeSteps::Result* step);
  void Commit(const std::vector<SampledToken>& drawn, const std::vector<Sequence*>& drawing, Priority priority,
              Result* result);

  const Context ctx_;
  const std::shared_ptr<const Weights> weights_;
  const EngineOptions options_;
  PagePool* const pages_;
  std::unique_ptr<DecodeSteps> decode_steps_;
  absl::Time next_warning_ = absl::InfinitePast();
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_STEP_RUNNER_H_
