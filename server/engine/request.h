// What the engine is asked for, and what it answers.
#ifndef STILLHOUSE_SERVER_ENGINE_REQUEST_H_
#define STILLHOUSE_SERVER_ENGINE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/ops/sample.h"
#include "server/state/memory.h"

namespace stillhouse {

// Interactive work goes before background work (builds): while an interactive sequence runs or waits, background work
// gets only every few steps, enough to make progress, never enough to be felt.
enum class Priority : uint8_t { kInteractive, kBackground };

struct GenerationRequest {
  std::string id;      // for logs
  std::string tenant;  // fair shares are counted by tenant
  Priority priority = Priority::kInteractive;
  std::vector<int32_t> prompt;                          // at least one token
  std::vector<std::shared_ptr<const Memory>> memories;  // pins: dropped when the sequence ends, however it ends
  SampleRow sampling;                                   // `step` and `history` are the engine's
  int64_t max_tokens = 1;                               // bounded by the context as well
  std::vector<int32_t> stop_ids;                        // end of generation; the id itself is reported
  bool ignore_stop_ids = false;
  absl::Time deadline = absl::InfiniteFuture();
};

enum class FinishReason : uint8_t { kStopId, kMaxTokens, kContextFull, kSink, kCancelled, kError };

struct GenerationUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t stored_slots = 0;  // of the memories
  int64_t kv_bytes = 0;      // canonical: memories and own rows at the end
  double stored_mass = 0.0;  // mean share of attention on memories over generated tokens, if measured; else 0
  absl::Duration queue_time, prefill_time, decode_time;
};

// Receives one request's events on the engine's thread: return fast, never call back into the engine but for Cancel.
// One of OnFinish is called exactly once, last, for every request that Submit accepted.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  // False ends the sequence (a stop string was met): FinishReason::kSink.
  virtual bool OnToken(const SampledToken& token) = 0;
  // `status` is not OK for kCancelled (CANCELLED or DEADLINE_EXCEEDED) and kError.
  virtual void OnFinish(FinishReason reason, const GenerationUsage& usage, const absl::Status& status) = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_REQUEST_H_
