// Log-probabilities of a given continuation.
#ifndef STILLHOUSE_SERVER_SERVICE_SCORER_H_
#define STILLHOUSE_SERVER_SERVICE_SCORER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/state/memory.h"

namespace stillhouse {

struct ScoredToken {
  int32_t id = 0;
  float logprob = 0.0f;
  std::vector<std::pair<int32_t, float>> top;  // best first
};

struct ScoreRequest {
  std::vector<std::shared_ptr<const Memory>> memories;
  std::vector<int32_t> prompt;        // at least one: the first continuation token is predicted from its last
  std::vector<int32_t> continuation;  // at least one
  int top = 0;
  absl::Time deadline = absl::InfiniteFuture();
  std::function<bool()> cancelled;        // whether nobody waits for the result any more; empty: somebody does
  std::function<void(int64_t)> computed;  // called with the tokens of every chunk that was run; may be empty
};

struct ScoreResult {
  std::vector<ScoredToken> tokens;  // one per token of the continuation
  int64_t kv_bytes = 0;
  absl::Duration queue_time, run_time;
};

// Runs a request as chunks of prefill on the engine's thread, between its steps, so that queries go on meanwhile. One
// request at a time, with pages of its own: it takes none that the engine counted on. The engine must outlive it.
// Thread-safe; Score blocks.
class Scorer {
 public:
  // `ctx` is of the engine's backend. `page_bytes` bounds its pages; 0: as many as the context has positions.
  Scorer(const Context& ctx, Engine* engine, int64_t page_bytes = 0);

  // INVALID_ARGUMENT for an empty prompt; OUT_OF_RANGE, with both numbers, for more than the context
  // holds; RESOURCE_EXHAUSTED for more than the pages hold; UNAVAILABLE when too many requests wait; DEADLINE_EXCEEDED;
  // CANCELLED, at the latest after a chunk.
  absl::StatusOr<ScoreResult> Score(const ScoreRequest& request);

 private:
  static constexpr int kMaxWaiting = 4;

  static int64_t ContextBytes(const Context& ctx, const Engine& engine);

  Engine* engine_;
  PagePool pages_;
  std::atomic<int> waiting_{0};
  std::mutex one_at_a_time_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_SCORER_H_
