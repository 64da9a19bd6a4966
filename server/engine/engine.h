// The engine: one thread that owns the device and runs every step, for queries and for builds.
#ifndef STILLHOUSE_SERVER_ENGINE_ENGINE_H_
#define STILLHOUSE_SERVER_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/request.h"
#include "server/model/forward.h"

namespace stillhouse {

// Numbers for gauges. A snapshot.
struct EngineStats {
  int64_t running = 0;  // interactive sequences
  int64_t waiting = 0;  // interactive requests in the queue
  int64_t background_running = 0;
  int64_t background_waiting = 0;  // requests and tasks
  int64_t pages_total = 0, pages_free = 0, page_bytes = 0;
  int64_t steps = 0;
  int64_t prompt_tokens = 0, generated_tokens = 0;  // interactive
  int64_t background_tokens = 0;
  int64_t invalid_logits = 0;  // rows with NaN
  int64_t recorded_steps = 0;  // decode steps that ran as a recording (DecodeSteps)
  int64_t recordings = 0;      // made so far
  int64_t preemptions = 0;
};

// Called on the engine's thread as things happen; the metrics room implements it. Must not block.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  virtual void OnTokenGap(absl::Duration gap) {}  // between two tokens of one interactive sequence
  virtual void OnFinished(Priority priority, FinishReason reason, const GenerationUsage& usage) {}
};

struct EngineOptions {
  int64_t max_sequences = 16;            // interactive ones at once
  int64_t max_background_sequences = 0;  // 0: 32 on a processor, 256 on a GPU
  int64_t max_waiting = 256;             // beside those that have a place; more is refused
  int64_t prefill_chunk = 0;  // prompt rows per step while others decode; 0: 256 on a processor, 2048 on a GPU
  int64_t page_budget_bytes = int64_t{1} << 30;
  int64_t context_limit = 0;  // positions; 0: the model's
  // Share of the time that background work gets while interactive work is there: builds go on, queries barely notice.
  double background_share = 0.1;
  int64_t vocabulary = 0;        // ids that may be drawn; 0: the model's
  DType kv_dtype = DType::kF32;  // of private keys and values, and of memories as queries read them; bf16 on CUDA only
  bool record_steps = true;      // run decode steps as recordings where the backend has them
  EngineObserver* observer = nullptr;
};

// With what zeros stand for on a device.
EngineOptions ResolveOptions(EngineOptions options, DeviceType device);

// Handle of a submitted request; cheap to copy, safe after the end.
class GenerationHandle {
 public:
  GenerationHandle() = default;
  explicit GenerationHandle(uint64_t id) : id_(id) {}
  uint64_t id() const { return id_; }

 private:
  uint64_t id_ = 0;
};

// Continuous batching: each step Plan (pure, scheduler.h) → Run (Forward, Sample) → Commit. The engine knows memories,
// never where they come from. All methods may be called from any thread; nothing blocks but Execute and the
// destructor.
class Engine {
 public:
  Engine(const Context& ctx, std::shared_ptr<const Weights> weights, const EngineOptions& options);
  ~Engine();  // cancels everything, then joins
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues the request. INVALID_ARGUMENT for an empty prompt or ids outside the vocabulary; OUT_OF_RANGE, saying both
  // numbers, if memories and prompt leave no position for a token, or can never fit the page budget; UNAVAILABLE if the
  // queue is full (the server, not the caller's quota) or draining. `sink` lives until its OnFinish returned.
  absl::StatusOr<GenerationHandle> Submit(GenerationRequest request, std::shared_ptr<GenerationSink> sink);

  // Ends the request at the next step boundary (at once if it waits): OnFinish(kCancelled, CANCELLED). No effect after
  // its end.
  void Cancel(GenerationHandle handle);

  // Runs `task` on the engine's thread between steps, when its priority's turn comes, and waits for it: training steps,
  // prefills of teachers, scoring. Keep a background task under about a second. Returns the task's status, or
  // UNAVAILABLE if the engine stops first, the deadline's DEADLINE_EXCEEDED if it passed before the task started, or
  // RESOURCE_EXHAUSTED if the device had not the memory for a background task: it ran, and what it made may lie in host
  // memory, to be dropped.
  absl::Status Execute(Priority priority, const std::function<absl::Status(const Context&)>& task,
                       absl::Time deadline = absl::InfiniteFuture());

  EngineStats stats() const;
  const Weights& weights() const;
  const EngineOptions& options() const;
  PagePool& pages();
  int64_t context_limit() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_ENGINE_H_
