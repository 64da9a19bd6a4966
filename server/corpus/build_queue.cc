#include "server/corpus/build_queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cache_store/strict_json.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "nlohmann/json.hpp"
#include "server/corpus/builder.h"

namespace stillhouse {
namespace {

using nlohmann::json;

constexpr char kKind[] = "BUILD_CACHE";
constexpr std::pair<BuildStage, const char*> kStageNames[] = {
    {BuildStage::kQueued, "QUEUED"},        {BuildStage::kTokenising, "TOKENISING"},
    {BuildStage::kSelfStudy, "SELF_STUDY"}, {BuildStage::kCompacting, "COMPACTING"},
    {BuildStage::kTraining, "TRAINING"},    {BuildStage::kEvaluating, "EVALUATING"},
    {BuildStage::kStoring, "STORING"},      {BuildStage::kDone, "DONE"}};

std::string Target(const BuildSpec& spec) { return StrCat("corpora/", spec.corpus_id, "/caches/", spec.cache_id); }

std::string RandomHex(int digits) {
  std::random_device device;
  std::string out;
  while (static_cast<int>(out.size()) < digits) out += absl::StrFormat("%08x", device());
  out.resize(static_cast<size_t>(digits));
  return out;
}

// An unfinished build.
struct Job {
  BuildSpec spec;
  OperationRow row;
  BuildProgress progress;
  std::atomic<bool> cancel{false};
  bool running = false;
};

}  // namespace

std::string BuildProgressToJson(const BuildProgress& progress) {
  const char* stage = "QUEUED";
  for (const auto& [value, name] : kStageNames) {
    if (value == progress.stage) stage = name;
  }
  json out = {{"stage", stage}, {"fraction", progress.fraction}, {"detail", progress.detail}};
  if (progress.eta_seconds >= 0.0) out["eta_seconds"] = progress.eta_seconds;
  if (progress.start_time != absl::InfinitePast()) out["start_unix_micros"] = absl::ToUnixMicros(progress.start_time);
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<BuildProgress> BuildProgressFromJson(std::string_view text) {
  STILLHOUSE_ASSIGN_OR_RETURN(const json in, ParseStrictJson(text));
  const absl::Status bad = absl::InvalidArgumentError("a build's progress has another form");
  if (!in.is_object()) return bad;
  BuildProgress progress;
  const auto stage = in.find("stage");
  if (stage == in.end() || !stage->is_string()) return bad;
  bool known = false;
  for (const auto& [value, name] : kStageNames) {
    if (stage->get_ref<const std::string&>() != name) continue;
    progress.stage = value;
    known = true;
  }
  if (!known) return bad;
  for (const auto& [name, value] : in.items()) {
    if (name == "fraction" && value.is_number()) {
      progress.fraction = std::clamp(value.get<double>(), 0.0, 1.0);
    } else if (name == "eta_seconds" && value.is_number()) {
      progress.eta_seconds = value.get<double>();
    } else if (name == "detail" && value.is_string()) {
      progress.detail = value.get<std::string>();
    } else if (name == "start_unix_micros" && value.is_number_integer()) {
      progress.start_time = absl::FromUnixMicros(value.get<int64_t>());
    } else if (name != "stage") {
      return bad;
    }
  }
  return progress;
}

class BuildQueue::Impl {
 public:
  Impl(const BuildServices& services, const BuildQueueOptions& options) : services_(services), options_(options) {
    TakeUp();
    thread_ = std::thread([this] { Loop(); });
  }

  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    changed_.notify_all();
    thread_.join();
  }

  absl::StatusOr<BuildInfo> Enqueue(BuildSpec spec, std::string_view request_id) {
    STILLHOUSE_RETURN_IF_ERROR(ValidateBuildSpec(spec));
    // A request's id decides its operation's, so that a repeated one finds the first.
    const std::string wanted_by = BuildSpecToJson(spec);
    const std::string suffix =
        request_id.empty() ? RandomHex(20) : Sha256Hex(StrCat(spec.tenant, "\n", request_id)).substr(0, 20);
    const std::string operation_id = StrCat("build-", suffix);
    if (spec.cache_id.empty()) {
      std::string name = spec.method == BuildMethod::kAttentionMatching ? "matched"
                         : spec.method == BuildMethod::kFull            ? "full"
                                                                        : "cartridge";
      spec.cache_id = StrCat(name, "-", suffix.substr(0, 6));
    }
    std::lock_guard<std::mutex> enqueue(enqueue_mutex_);
    if (!request_id.empty()) {
      absl::StatusOr<OperationRow> first = services_.store->GetOperation(spec.tenant, operation_id);
      if (first.ok()) {
        if (first->request_json != BuildSpecToJson(spec)) {
          return absl::InvalidArgumentError("request_id was used for another build: choose a new one");
        }
        return Get(spec.tenant, operation_id);
      }
      if (!absl::IsNotFound(first.status())) return first.status();
    }
    STILLHOUSE_RETURN_IF_ERROR(services_.store->GetCorpus(spec.tenant, spec.corpus_id).status());
    const absl::StatusOr<ArtifactRow> existing =
        services_.store->GetArtifact(spec.tenant, spec.corpus_id, spec.cache_id);
    if (existing.ok()) {
      if (!spec.replace) {
        return absl::AlreadyExistsError(
            StrCat("the cache ", spec.cache_id, " exists: choose another id, or set replace to build it anew"));
      }
      if (!spec.expected_etag.empty() && spec.expected_etag != existing->etag) {
        return absl::AbortedError("the cache has changed since its etag was read: read it again");
      }
    } else if (!absl::IsNotFound(existing.status())) {
      return existing.status();
    } else if (!spec.expected_etag.empty()) {
      return absl::AbortedError("the cache that is to be replaced does not exist any more");
    }
    const std::string target = Target(spec);
    std::vector<std::string> of_this_cache;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [key, job] : jobs_) {
        if (job->row.tenant == spec.tenant && job->row.target == target) of_this_cache.push_back(key.second);
      }
      const int64_t own = std::count_if(waiting_.begin(), waiting_.end(),
                                        [&](const auto& job) { return job->row.tenant == spec.tenant; });
      if (own >= options_.max_waiting_per_tenant) {
        return absl::ResourceExhaustedError(
            StrCat("your tenant has ", own, " builds waiting, the most it may: try again when one has begun"));
      }
      if (static_cast<int64_t>(waiting_.size()) >= options_.max_waiting) {
        return absl::UnavailableError(
            StrCat("the build queue is full (", options_.max_waiting, " builds wait): try again later"));
      }
    }
    for (const std::string& other : of_this_cache) {
      // One whose end is written, and may have been read, is not in the way although it leaves only now.
      const absl::StatusOr<OperationRow> row = services_.store->GetOperation(spec.tenant, other);
      if (row.ok() && !IsDone(row->state)) {
        return absl::AlreadyExistsError(StrCat("the cache ", spec.cache_id, " is being built by ", other));
      }
      if (!row.ok() && !absl::IsNotFound(row.status())) return row.status();
    }
    // How many it will take is known when the document is read, and they are admitted then.
    STILLHOUSE_RETURN_IF_ERROR(AdmitBytes(spec, 1).status());
    OperationRow row;
    row.tenant = spec.tenant;
    row.operation_id = operation_id;
    row.kind = kKind;
    row.target = target;
    row.request_json = BuildSpecToJson(spec);
    row.state = OperationState::kQueued;
    row.progress_json = BuildProgressToJson(BuildProgress());
    STILLHOUSE_ASSIGN_OR_RETURN(row, services_.store->InsertOperation(row, request_id, wanted_by));
    auto job = std::make_shared<Job>();
    job->spec = std::move(spec);
    job->row = row;
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_[{row.tenant, row.operation_id}] = job;
    waiting_.push_back(job);
    wake_.notify_all();
    return InfoLocked(row);
  }

  absl::StatusOr<BuildInfo> Get(std::string_view tenant, std::string_view operation_id) const {
    STILLHOUSE_ASSIGN_OR_RETURN(const OperationRow row, services_.store->GetOperation(tenant, operation_id));
    std::lock_guard<std::mutex> lock(mutex_);
    return InfoLocked(row);
  }

  absl::StatusOr<Page<BuildInfo>> List(std::string_view tenant, const OperationFilter& filter,
                                       const PageRequest& page) const {
    STILLHOUSE_ASSIGN_OR_RETURN(const Page<OperationRow> rows, services_.store->ListOperations(tenant, filter, page));
    Page<BuildInfo> out;
    out.next_page_token = rows.next_page_token;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const OperationRow& row : rows.rows) out.rows.push_back(InfoLocked(row));
    return out;
  }

  absl::StatusOr<BuildInfo> Wait(std::string_view tenant, std::string_view operation_id, absl::Time deadline,
                                 const std::function<bool()>& stopped) const {
    while (true) {
      STILLHOUSE_ASSIGN_OR_RETURN(BuildInfo info, Get(tenant, operation_id));
      const absl::Duration left = deadline - absl::Now();
      if (IsDone(info.row.state) || left <= absl::ZeroDuration() || (stopped && stopped())) return info;
      std::unique_lock<std::mutex> lock(mutex_);
      if (stop_.load()) return info;
      const bool known = jobs_.contains({std::string(tenant), std::string(operation_id)});
      // Short enough for `stopped`, and for a build that ended between the look and the lock.
      const absl::Duration nap = known ? (stopped ? absl::Milliseconds(50) : absl::Seconds(1)) : absl::Milliseconds(10);
      changed_.wait_for(lock, absl::ToChronoNanoseconds(std::min(left, nap)));
    }
  }

  absl::StatusOr<BuildInfo> Cancel(std::string_view tenant, std::string_view operation_id) {
    STILLHOUSE_ASSIGN_OR_RETURN(const OperationRow row, services_.store->GetOperation(tenant, operation_id));
    if (IsDone(row.state)) return Get(tenant, operation_id);
    // Written first: a server that stops now still cancels it at its next start.
    OperationUpdate update;
    update.cancel_requested = true;
    const absl::StatusOr<OperationRow> marked = services_.store->UpdateOperation(tenant, operation_id, update);
    if (!marked.ok()) {
      if (absl::IsFailedPrecondition(marked.status())) return Get(tenant, operation_id);  // it just ended
      return marked.status();
    }
    std::shared_ptr<Job> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = jobs_.find({std::string(tenant), std::string(operation_id)});
      if (found != jobs_.end()) {
        found->second->cancel.store(true);
        auto place = std::find(waiting_.begin(), waiting_.end(), found->second);
        if (place != waiting_.end()) {
          waiting = *place;
          waiting_.erase(place);
        }
      }
    }
    if (waiting) Finish(*waiting, absl::CancelledError("the build was cancelled before it began"));
    return Get(tenant, operation_id);
  }

 private:
  using JobKey = std::pair<std::string, std::string>;

  absl::StatusOr<std::shared_ptr<void>> AdmitBytes(const BuildSpec& spec, uint64_t bytes) const {
    if (!options_.admit_bytes) return nullptr;
    // Replaced by this one, or its own from before a restart.
    const absl::StatusOr<ArtifactRow> there = services_.store->GetArtifact(spec.tenant, spec.corpus_id, spec.cache_id);
    return options_.admit_bytes(spec.tenant, bytes, there.ok() && !there->quarantined ? there->size : 0);
  }

  BuildInfo InfoLocked(const OperationRow& row) const {
    BuildInfo info;
    info.row = row;
    if (absl::StatusOr<BuildProgress> progress = BuildProgressFromJson(row.progress_json); progress.ok()) {
      info.progress = *std::move(progress);
    }
    const auto found = jobs_.find({row.tenant, row.operation_id});
    if (IsDone(row.state) || found == jobs_.end()) return info;
    info.progress = found->second->progress;
    info.row.state = found->second->running ? OperationState::kRunning : OperationState::kQueued;
    const auto order = OrderLocked();
    const auto place = std::find(order.begin(), order.end(), found->second);
    if (place != order.end()) info.queue_position = (place - order.begin()) + (running_ ? 1 : 0);
    return info;
  }

  // As they will run: tenants take turns, and each one's builds come in the order in which it asked for them. The
  // tenant that ran last has had its turn.
  std::vector<std::shared_ptr<Job>> OrderLocked() const {
    std::map<std::string, int> turns{{last_tenant_, 1}};
    std::vector<std::pair<int, std::shared_ptr<Job>>> rounds;
    for (const auto& job : waiting_) rounds.emplace_back(turns[job->row.tenant]++, job);
    std::stable_sort(rounds.begin(), rounds.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::shared_ptr<Job>> order;
    for (auto& [round, job] : rounds) order.push_back(std::move(job));
    return order;
  }

  // What a stopped server left behind, oldest first.
  void TakeUp() {
    absl::StatusOr<std::vector<OperationRow>> rows = services_.store->ListUnfinishedOperations();
    if (!rows.ok()) {
      STILLHOUSE_LOG(ERROR) << "unfinished builds cannot be listed: " << rows.status().ToString();
      return;
    }
    for (OperationRow& row : *rows) {
      if (row.kind != kKind) continue;
      auto job = std::make_shared<Job>();
      job->row = row;
      absl::StatusOr<BuildSpec> spec = BuildSpecFromJson(row.request_json);
      if (absl::StatusOr<BuildProgress> progress = BuildProgressFromJson(row.progress_json); progress.ok()) {
        job->progress = *std::move(progress);
      }
      if (!spec.ok()) {
        Finish(*job, absl::InternalError(StrCat("the build cannot be taken up again: ", spec.status().message())));
      } else if (row.cancel_requested) {
        Finish(*job, absl::CancelledError("the build was cancelled"));
      } else {
        job->spec = *std::move(spec);
        jobs_[{row.tenant, row.operation_id}] = job;
        waiting_.push_back(std::move(job));
      }
    }
    if (!waiting_.empty()) STILLHOUSE_LOG(INFO) << waiting_.size() << " unfinished builds go on";
  }

  void Loop() {
    while (true) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stop_.load() || !waiting_.empty(); });
        if (stop_.load()) return;
        job = OrderLocked().front();
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), job));
        last_tenant_ = job->row.tenant;
        job->running = true;
        running_ = job;
      }
      RunJob(*job);
      std::lock_guard<std::mutex> lock(mutex_);
      running_.reset();
    }
  }

  void RunJob(Job& job) {
    OperationUpdate update;
    update.state = OperationState::kRunning;
    const absl::StatusOr<OperationRow> row =
        services_.store->UpdateOperation(job.row.tenant, job.row.operation_id, update);
    if (!row.ok()) return Finish(job, row.status());
    // A Cancel between the row and the job's place in the queue found the row alone.
    if (row->cancel_requested) job.cancel.store(true);
    BuilderHooks hooks;
    hooks.check = [&]() -> absl::Status {
      if (job.cancel.load(std::memory_order_relaxed)) return absl::CancelledError("the build was cancelled");
      if (stop_.load(std::memory_order_relaxed)) return absl::UnavailableError("the server is stopping");
      return absl::OkStatus();
    };
    BuildStage stored_stage = BuildStage::kQueued;
    hooks.report = [&](const BuildProgress& progress) {
      bool stage_changed = false;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        job.progress = progress;
        stage_changed = std::exchange(stored_stage, progress.stage) != progress.stage;
      }
      if (stage_changed) StoreProgress(job, progress);
    };
    hooks.save = [&](std::string_view bytes) -> absl::Status {
      STILLHOUSE_RETURN_IF_ERROR(services_.store->PutCheckpoint(job.row.tenant, job.row.operation_id, bytes));
      StoreProgress(job, job.progress);
      return absl::OkStatus();
    };
    hooks.admit_bytes = [&](uint64_t bytes) { return AdmitBytes(job.spec, bytes); };
    hooks.save_every = options_.checkpoint_every;
    hooks.observer = options_.observer;
    CacheBuilder builder(services_, job.spec, job.row.operation_id, std::move(hooks));
    std::string checkpoint;
    if (job.row.has_checkpoint) {
      absl::StatusOr<std::string> bytes = services_.store->GetCheckpoint(job.row.tenant, job.row.operation_id);
      if (bytes.ok()) {
        checkpoint = *std::move(bytes);
      } else {
        STILLHOUSE_LOG(WARNING) << "build " << job.row.operation_id
                                << " begins again, its checkpoint is lost: " << bytes.status().message();
      }
    }
    BuildProgress progress = job.progress;
    progress.stage = BuildStage::kQueued;
    builder.Resume(checkpoint, progress);
    Finish(job, builder.Run().status());
  }

  // Only this thread writes job.progress while the job runs.
  void StoreProgress(const Job& job, const BuildProgress& progress) {
    OperationUpdate update;
    update.progress_json = BuildProgressToJson(progress);
    // A lost line of progress is no reason to stop.
    const absl::Status status = services_.store->UpdateOperation(job.row.tenant, job.row.operation_id, update).status();
    if (!status.ok()) STILLHOUSE_LOG(WARNING) << "build " << job.row.operation_id << ": " << status.message();
  }

  void Finish(Job& job, const absl::Status& status) {
    if (absl::IsUnavailable(status) && stop_.load()) return;  // stays unfinished: the next start goes on
    OperationUpdate update;
    BuildProgress progress;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      progress = job.progress;
    }
    progress.stage = BuildStage::kDone;
    progress.eta_seconds = -1.0;
    if (status.ok()) {
      progress.fraction = 1.0;
      update.state = OperationState::kSucceeded;
      update.result_json = json{{"cache", job.row.target}}.dump();
    } else {
      const bool cancelled = absl::IsCancelled(status);
      update.state = cancelled ? OperationState::kCancelled : OperationState::kFailed;
      update.error_code = static_cast<int>(status.code());
      update.error_message = std::string(ToStd(status.message()));
      if (!cancelled) {
        STILLHOUSE_LOG(WARNING) << "build " << job.row.operation_id << " of " << job.row.target
                                << " failed: " << status.ToString();
      }
    }
    update.progress_json = BuildProgressToJson(progress);
    const absl::Status stored = services_.store->UpdateOperation(job.row.tenant, job.row.operation_id, update).status();
    // An operation that a cancelled tenant took with it is gone already.
    if (!stored.ok() && !absl::IsNotFound(stored) && !absl::IsFailedPrecondition(stored)) {
      STILLHOUSE_LOG(ERROR) << "the end of build " << job.row.operation_id
                            << " could not be written: " << stored.ToString();
    }
    if (options_.observer != nullptr) options_.observer->OnEnd(job.spec.method, status);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.erase({job.row.tenant, job.row.operation_id});
    }
    changed_.notify_all();
  }

  const BuildServices services_;
  const BuildQueueOptions options_;
  std::mutex enqueue_mutex_;  // one Enqueue at a time: between its checks and its row nothing comes
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  mutable std::condition_variable changed_;
  std::map<JobKey, std::shared_ptr<Job>> jobs_;  // unfinished
  std::deque<std::shared_ptr<Job>> waiting_;     // oldest first
  std::string last_tenant_;                      // whose build ran last, or runs
  std::shared_ptr<Job> running_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

BuildQueue::BuildQueue(const BuildServices& services, const BuildQueueOptions& options)
    : impl_(std::make_unique<Impl>(services, options)) {}
BuildQueue::~BuildQueue() = default;
absl::StatusOr<BuildInfo> BuildQueue::Enqueue(const BuildSpec& spec, std::string_view request_id) {
  return impl_->Enqueue(spec, request_id);
}
absl::StatusOr<BuildInfo> BuildQueue::Get(std::string_view tenant, std::string_view operation_id) const {
  return impl_->Get(tenant, operation_id);
}
absl::StatusOr<Page<BuildInfo>> BuildQueue::List(std::string_view tenant, const OperationFilter& filter,
                                                 const PageRequest& page) const {
  return impl_->List(tenant, filter, page);
}
absl::StatusOr<BuildInfo> BuildQueue::Wait(std::string_view tenant, std::string_view operation_id, absl::Time deadline,
                                           const std::function<bool()>& stopped) const {
  return impl_->Wait(tenant, operation_id, deadline, stopped);
}
absl::StatusOr<BuildInfo> BuildQueue::Cancel(std::string_view tenant, std::string_view operation_id) {
  return impl_->Cancel(tenant, operation_id);
}

}  // namespace stillhouse
