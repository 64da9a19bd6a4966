// Builds: queued, run one at a time in the background, reported, cancelled, resumed after a restart.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILD_QUEUE_H_
#define STILLHOUSE_SERVER_CORPUS_BUILD_QUEUE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_store/store.h"
#include "server/corpus/build_spec.h"
#include "server/corpus/directory.h"
#include "server/engine/engine.h"
#include "server/engine/memory_plan.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

enum class BuildStage : uint8_t {
  kQueued,
  kTokenising,
  kSelfStudy,
  kCompacting,
  kTraining,
  kEvaluating,
  kStoring,
  kDone
};

struct BuildProgress {
  BuildStage stage = BuildStage::kQueued;
  double fraction = 0.0;                         // of the whole build, never falling
  double eta_seconds = -1.0;                     // < 0: unknown
  std::string detail;                            // "step 85 of 170, loss 1.21"
  absl::Time start_time = absl::InfinitePast();  // when work began
};
std::string BuildProgressToJson(const BuildProgress& progress);
absl::StatusOr<BuildProgress> BuildProgressFromJson(std::string_view json);

struct BuildInfo {
  OperationRow row;
  BuildProgress progress;
  int64_t queue_position = 0;  // builds before this one; 0 when running or done
};

class BuildObserver {
 public:
  virtual ~BuildObserver() = default;
  virtual void OnStage(BuildMethod method, BuildStage stage, absl::Duration duration) {}
  // A build that had begun is done: OK, CANCELLED, or why it failed.
  virtual void OnEnd(BuildMethod method, const absl::Status& status) {}
};

// Whether a tenant may store so many bytes of a cache more, in place of those freed. What it gives is held until the
// store counts them, or they are given up.
using AdmitCacheBytes =
    std::function<absl::StatusOr<std::shared_ptr<void>>(std::string_view tenant, uint64_t bytes, uint64_t freed)>;

struct BuildQueueOptions {
  int64_t max_waiting = 64;
  int64_t max_waiting_per_tenant = 32;
  absl::Duration checkpoint_every = absl::Seconds(20);
  AdmitCacheBytes admit_bytes;  // empty: every tenant may
  BuildObserver* observer = nullptr;
};

// Everything a builder works with. All outlive the queue.
struct BuildServices {
  Engine* engine = nullptr;
  Store* store = nullptr;
  Directory* directory = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat = nullptr;
  std::optional<int64_t> device_bytes;  // that a build may take (MemoryPlan); none: all that there is
};

// One builder thread, for which tenants take turns; device work goes through the engine at background priority, so
// queries are never starved. At start it takes up what a stopped server left unfinished, from its last checkpoint.
// Thread-safe.
class BuildQueue {
 public:
  BuildQueue(const BuildServices& services, const BuildQueueOptions& options);
  ~BuildQueue();  // stops after the current task; the build stays unfinished in the store and resumes at the next start
  BuildQueue(const BuildQueue&) = delete;
  BuildQueue& operator=(const BuildQueue&) = delete;

  // Queues a validated spec. NOT_FOUND: no such corpus. ALREADY_EXISTS: the cache exists (and `replace` is not set) or
  // is being built. UNAVAILABLE: too many wait; RESOURCE_EXHAUSTED: too many of this tenant, or its caches have no
  // room for another. With a request_id
  // the same spec gives the first operation again.
  absl::StatusOr<BuildInfo> Enqueue(const BuildSpec& spec, std::string_view request_id);
  absl::StatusOr<BuildInfo> Get(std::string_view tenant, std::string_view operation_id) const;
  absl::StatusOr<Page<BuildInfo>> List(std::string_view tenant, const OperationFilter& filter,
                                       const PageRequest& page) const;
  // Returns when the operation is done or at `deadline`, whichever comes first. `stopped` (may be null) ends the wait
  // early.
  absl::StatusOr<BuildInfo> Wait(std::string_view tenant, std::string_view operation_id, absl::Time deadline,
                                 const std::function<bool()>& stopped = nullptr) const;
  absl::StatusOr<BuildInfo> Cancel(std::string_view tenant, std::string_view operation_id);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILD_QUEUE_H_
