#include "server/engine/engine.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "kernels/base/trace.h"
#include "server/engine/scheduler.h"
#include "server/engine/sequence.h"
#include "server/engine/step_runner.h"

namespace stillhouse {
namespace {

// How often attention on memories is measured, in steps: it is a gauge, not a ledger.
constexpr int64_t kMeasureEvery = 8;

struct Task {
  const std::function<absl::Status(const Context&)>* run = nullptr;
  absl::Time deadline;
  bool done = false;
  absl::Status status;
};

// The waiting and running of one priority.
struct Lane {
  std::list<std::unique_ptr<Sequence>> waiting;
  std::vector<std::unique_ptr<Sequence>> running;
  std::deque<Task*> tasks;
  int64_t committed_pages = 0;

  bool idle() const { return waiting.empty() && running.empty() && tasks.empty(); }
};

struct Finished {
  std::unique_ptr<Sequence> sequence;
  FinishReason reason;
  absl::Status status;
};

}  // namespace

class Engine::Impl {
 public:
  Impl(const Context& ctx, std::shared_ptr<const Weights> weights, const EngineOptions& options)
      : ctx_(ctx),
        weights_(std::move(weights)),
        options_(ResolveOptions(options, ctx.backend->device())),
        pages_(ctx, weights_->config, options.page_budget_bytes, options.kv_dtype),
        turns_(options.background_share) {
    ctx_.tape = nullptr;
    if (options_.vocabulary <= 0) options_.vocabulary = weights_->config.vocabulary;
    const int64_t model_limit = weights_->config.context_length;
    steps_ = std::make_unique<StepRunner>(ctx_, weights_, options_, &pages_);
    context_limit_ = options_.context_limit > 0 ? std::min(options_.context_limit, model_limit) : model_limit;
    thread_ = std::thread([this] { Loop(); });
  }

  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  absl::StatusOr<GenerationHandle> Submit(GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
    auto sequence = std::make_unique<Sequence>();
    if (request.prompt.empty()) return absl::InvalidArgumentError("the prompt is empty");
    if (absl::Status known = CheckTokens(weights_->config, request.prompt); !known.ok()) return known;
    if (request.max_tokens < 1) return absl::InvalidArgumentError("max_tokens must be at least 1");
    int64_t start = 0;
    for (const auto& memory : request.memories) start += memory->next_position;
    const int64_t prompt = static_cast<int64_t>(request.prompt.size());
    // The last token drawn needs no position of its own: it is never fed back.
    const int64_t room = context_limit_ - start - prompt + 1;
    if (room < 1) {
      return absl::OutOfRangeError(absl::StrCat(
          "the prompt has ", prompt, " tokens",
          start > 0 ? absl::StrCat(" after memories that end at position ", start) : "", ", but the context has ",
          context_limit_, " positions: shorten the prompt by ", 1 - room, " tokens"));
    }
    sequence->token_limit = std::min(request.max_tokens, room);
    sequence->limited_by_context = room < request.max_tokens;
    sequence->pages = (prompt + sequence->token_limit - 1 + PagePool::kPageSlots - 1) / PagePool::kPageSlots;
    if (sequence->pages > LanePages(request.priority)) {
      return absl::OutOfRangeError(absl::StrCat("prompt and max_tokens need ", sequence->pages * PagePool::kPageSlots,
                                                " tokens of private context, and the server's memory budget holds ",
                                                LanePages(request.priority) * PagePool::kPageSlots,
                                                ": lower max_tokens or shorten the prompt"));
    }
    sequence->request = std::move(request);
    sequence->sink = std::move(sink);
    sequence->submitted = absl::Now();
    for (const auto& memory : sequence->request.memories) sequence->usage.stored_slots += memory->slots;

    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return absl::UnavailableError("the server is stopping");
    Lane& lane = LaneOf(sequence->request.priority);
    const bool interactive = sequence->request.priority == Priority::kInteractive;
    // Those that have a place, and were not seen by the engine's thread yet, do not wait.
    const int64_t places = options_.max_sequences - static_cast<int64_t>(lane.running.size());
    if (interactive && static_cast<int64_t>(lane.waiting.size()) >= options_.max_waiting + places) {
      return absl::UnavailableError(
          absl::StrCat("the server's queue is full (", options_.max_waiting, " requests wait): try again in a moment"));
    }
    sequence->id = next_id_++;
    const GenerationHandle handle(sequence->id);
    ActivateTenant(lane, sequence->request.tenant);
    lane.waiting.push_back(std::move(sequence));
    wake_.notify_one();
    return handle;
  }

  void Cancel(GenerationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_.insert(handle.id());
    wake_.notify_one();
  }

  absl::Status Execute(Priority priority, const std::function<absl::Status(const Context&)>& run, absl::Time deadline) {
    STILLHOUSE_CHECK(std::this_thread::get_id() != thread_.get_id()) << "Execute from the engine's own thread";
    Task task;
    task.run = &run;
    task.deadline = deadline;
    std::unique_lock<std::mutex> lock(mutex_);
    if (stop_) return absl::UnavailableError("the server is stopping");
    LaneOf(priority).tasks.push_back(&task);
    wake_.notify_one();
    task_done_.wait(lock, [&] { return task.done; });
    return task.status;
  }

  EngineStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    EngineStats s = stats_;
    s.running = static_cast<int64_t>(interactive_.running.size());
    s.waiting = static_cast<int64_t>(interactive_.waiting.size());
    s.background_running = static_cast<int64_t>(background_.running.size());
    s.background_waiting = static_cast<int64_t>(background_.waiting.size() + background_.tasks.size());
    s.pages_total = pages_.total_pages();
    s.pages_free = pages_.free_pages();
    s.page_bytes = pages_.page_bytes();
    return s;
  }

  const Weights& weights() const { return *weights_; }
  const EngineOptions& options() const { return options_; }
  PagePool& pages() { return pages_; }
  int64_t context_limit() const { return context_limit_; }

 private:
  Lane& LaneOf(Priority p) { return p == Priority::kInteractive ? interactive_ : background_; }

  // Pages that a lane may commit at once. Background generation leaves half of the budget to queries.
  int64_t LanePages(Priority p) const {
    return p == Priority::kInteractive ? pages_.total_pages() : std::max<int64_t>(1, pages_.total_pages() / 2);
  }

  void ActivateTenant(const Lane& lane, const std::string& tenant) {
    std::vector<std::string> active;
    for (const auto& s : lane.waiting) active.push_back(s->request.tenant);
    for (const auto& s : lane.running) active.push_back(s->request.tenant);
    if (std::find(active.begin(), active.end(), tenant) == active.end()) shares_.Activate(tenant, active);
  }

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      std::vector<Finished> finished;
      Sweep(&finished);
      if (stop_) {
        for (Lane* lane : {&interactive_, &background_}) StopLane(lane, &finished);
        Deliver(&lock, std::move(finished));
        return;
      }
      if (!finished.empty()) {
        Deliver(&lock, std::move(finished));
        continue;
      }
      Admit(&interactive_, Priority::kInteractive);
      Admit(&background_, Priority::kBackground);
      const bool interactive = !interactive_.running.empty() || !interactive_.tasks.empty();
      const bool background = !background_.running.empty() || !background_.tasks.empty();
      if (!interactive && !background) {
        turns_.Idle();
        WaitForWork(&lock);
        continue;
      }
      const bool background_turn = turns_.BackgroundTurn(interactive, background);
      Lane* lane = background_turn ? &background_ : &interactive_;
      const absl::Time begin = absl::Now();
      RunTurn(&lock, lane, background_turn ? Priority::kBackground : Priority::kInteractive);
      const absl::Duration took = absl::Now() - begin;
      if (background_turn) {
        turns_.RanBackground(took, !interactive_.idle());
      } else {
        turns_.RanInteractive(took);
      }
      ++stats_.steps;
    }
  }

  void WaitForWork(std::unique_lock<std::mutex>* lock) {
    absl::Time next = absl::InfiniteFuture();
    for (const Lane* lane : {&interactive_, &background_}) {
      for (const auto& s : lane->waiting) next = std::min(next, s->request.deadline);
    }
    auto ready = [this] { return stop_ || !cancelled_.empty() || !interactive_.idle() || !background_.idle(); };
    if (next == absl::InfiniteFuture()) {
      wake_.wait(*lock, ready);
    } else {
      // Something waits that could not be admitted (the other lane's pages): look again soon, or at its deadline.
      const absl::Duration left = std::clamp(next - absl::Now(), absl::ZeroDuration(), absl::Milliseconds(50));
      wake_.wait_for(*lock, absl::ToChronoNanoseconds(left));
    }
  }

  // Takes out what was cancelled or whose deadline passed.
  void Sweep(std::vector<Finished>* finished) {
    const absl::Time now = absl::Now();
    auto verdict = [&](const Sequence& s) -> absl::Status {
      if (cancelled_.contains(s.id)) return absl::CancelledError("the request was cancelled");
      if (s.request.deadline <= now) return absl::DeadlineExceededError("the deadline passed");
      return absl::OkStatus();
    };
    for (Lane* lane : {&interactive_, &background_}) {
      for (auto it = lane->waiting.begin(); it != lane->waiting.end();) {
        absl::Status status = verdict(**it);
        if (status.ok()) {
          ++it;
          continue;
        }
        finished->push_back({std::move(*it), FinishReason::kCancelled, std::move(status)});
        it = lane->waiting.erase(it);
      }
      for (auto it = lane->running.begin(); it != lane->running.end();) {
        absl::Status status = verdict(**it);
        if (status.ok()) {
          ++it;
          continue;
        }
        lane->committed_pages -= (*it)->pages;
        finished->push_back({std::move(*it), FinishReason::kCancelled, std::move(status)});
        it = lane->running.erase(it);
      }
      for (auto it = lane->tasks.begin(); it != lane->tasks.end();) {
        if ((*it)->deadline > now) {
          ++it;
          continue;
        }
        (*it)->status = absl::DeadlineExceededError("the deadline passed");
        (*it)->done = true;
        task_done_.notify_all();
        it = lane->tasks.erase(it);
      }
    }
    // Handles that match nothing are of requests that ended before.
    cancelled_.clear();
  }

  void StopLane(Lane* lane, std::vector<Finished>* finished) {
    const absl::Status stopping = absl::UnavailableError("the server is stopping");
    for (auto& s : lane->waiting) finished->push_back({std::move(s), FinishReason::kError, stopping});
    for (auto& s : lane->running) finished->push_back({std::move(s), FinishReason::kError, stopping});
    lane->waiting.clear();
    lane->running.clear();
    for (Task* task : lane->tasks) {
      task->status = stopping;
      task->done = true;
    }
    lane->tasks.clear();
    task_done_.notify_all();
  }

  int64_t FreePages(const Lane& lane, Priority priority) const {
    return std::min(LanePages(priority) - lane.committed_pages,
                    pages_.total_pages() - interactive_.committed_pages - background_.committed_pages);
  }

  void Admit(Lane* lane, Priority priority) {
    const int64_t most =
        priority == Priority::kInteractive ? options_.max_sequences : options_.max_background_sequences;
    const auto waiting = [lane] {
      std::vector<WaitingView> views;
      for (const auto& s : lane->waiting) views.push_back({s->request.tenant, s->pages});
      return views;
    };
    if (priority == Priority::kBackground &&
        !RoomForGroup(waiting(), static_cast<int64_t>(lane->running.size()), most, FreePages(*lane, priority))) {
      return;
    }
    while (!lane->waiting.empty() && static_cast<int64_t>(lane->running.size()) < most) {
      const int64_t next = PickNext(waiting(), shares_, FreePages(*lane, priority));
      if (next < 0) return;
      auto it = std::next(lane->waiting.begin(), next);
      std::unique_ptr<Sequence> s = std::move(*it);
      lane->waiting.erase(it);
      lane->committed_pages += s->pages;
      s->started = absl::Now();
      s->usage.queue_time = s->started - s->submitted;
      s->usage.prompt_tokens = static_cast<int64_t>(s->request.prompt.size());
      lane->running.push_back(std::move(s));
    }
  }

  // Runs one task or one step of the lane, without the lock.
  void RunTurn(std::unique_lock<std::mutex>* lock, Lane* lane, Priority priority) {
    // Tasks and steps of a lane take turns, so that neither starves the other.
    if (!lane->tasks.empty() && (lane->running.empty() || (task_toggle_ = !task_toggle_))) {
      RunTask(lock, lane, priority);
    } else {
      RunStep(lock, lane, priority);
    }
  }

  void RunTask(std::unique_lock<std::mutex>* lock, Lane* lane, Priority priority) {
    Task* task = lane->tasks.front();
    lane->tasks.pop_front();
    lock->unlock();
    absl::Status status;
    {
      const Span span("engine task");
      const DeviceMemoryWatch memory(ctx_.pool());
      status = (*task->run)(ctx_);
      if (priority == Priority::kBackground) {
        if (status.ok()) status = memory.status();
      } else if (memory.missing() > 0) {
        steps_->WarnOfMemory(memory.missing());
      }
    }
    lock->lock();
    task->status = std::move(status);
    task->done = true;
    task_done_.notify_all();
  }

  void RunStep(std::unique_lock<std::mutex>* lock, Lane* lane, Priority priority) {
    const bool interactive = priority == Priority::kInteractive;
    // Sequences are moved out of the lane only by this thread: the pointers stay valid without the lock.
    std::vector<Sequence*> running;
    for (const auto& s : lane->running) running.push_back(s.get());
    const bool measure = interactive && stats_.steps % kMeasureEvery == 0;
    lock->unlock();
    StepRunner::Result step = steps_->Run(running, priority, measure);
    lock->lock();
    stats_.recorded_steps = steps_->recordings().steps;
    stats_.recordings = steps_->recordings().recordings;
    stats_.invalid_logits += step.invalid_logits;
    if (interactive) {
      for (const PlannedRows& planned : step.plan) {
        shares_.Charge(running[static_cast<size_t>(planned.sequence)]->request.tenant, planned.rows);
      }
      stats_.prompt_tokens += step.prefill_tokens;
      stats_.generated_tokens += step.drawn;
    } else {
      stats_.background_tokens += step.prefill_tokens + step.decode_tokens;
    }
    std::vector<Finished> finished;
    for (StepRunner::Ended& ended : step.ended) {
      auto it = std::find_if(lane->running.begin(), lane->running.end(),
                             [&](const auto& s) { return s.get() == ended.sequence; });
      finished.push_back({std::move(*it), ended.reason, std::move(ended.status)});
      lane->committed_pages -= finished.back().sequence->pages;
      lane->running.erase(it);
    }
    Deliver(lock, std::move(finished));
  }

  // Frees what the sequences held, then tells their sinks, without the lock.
  void Deliver(std::unique_lock<std::mutex>* lock, std::vector<Finished> finished) {
    if (finished.empty()) return;
    lock->unlock();
    const Span span("deliver");
    for (Finished& f : finished) {
      Sequence& s = *f.sequence;
      const absl::Time now = absl::Now();
      if (s.state) {
        s.usage.kv_bytes = s.state->rows() * weights_->config.kv_bytes_per_slot();
        for (const auto& memory : s.state->memories()) s.usage.kv_bytes += memory->canonical_bytes();
        s.state.reset();
      } else {
        if (s.started == absl::InfiniteFuture()) s.usage.queue_time = now - s.submitted;
        s.request.memories.clear();
      }
      if (s.usage.completion_tokens > 0) s.usage.decode_time = now - s.first_token;
      if (s.mass_count > 0) s.usage.stored_mass = s.mass_sum / static_cast<double>(s.mass_count);
    }
    for (Finished& f : finished) {
      Sequence& s = *f.sequence;
      if (options_.observer) options_.observer->OnFinished(s.request.priority, f.reason, s.usage);
      s.sink->OnFinish(f.reason, s.usage, f.status);
      s.sink.reset();
    }
    finished.clear();
    lock->lock();
  }

  Context ctx_;
  const std::shared_ptr<const Weights> weights_;
  EngineOptions options_;
  PagePool pages_;
  std::unique_ptr<StepRunner> steps_;  // used by the engine's thread
  int64_t context_limit_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, task_done_;
  Lane interactive_, background_;
  std::set<uint64_t> cancelled_;
  FairShares shares_;
  TurnKeeper turns_;
  EngineStats stats_;
  uint64_t next_id_ = 1;
  bool stop_ = false;
  bool task_toggle_ = false;
  std::thread thread_;  // last: it uses everything above
};

EngineOptions ResolveOptions(EngineOptions options, DeviceType device) {
  // A processor is full with a few rows; a GPU wants many for one pass over the weights.
  const bool gpu = device != DeviceType::kCpu;
  if (options.max_background_sequences <= 0) options.max_background_sequences = gpu ? 256 : 32;
  if (options.prefill_chunk <= 0) options.prefill_chunk = gpu ? 2048 : 256;
  return options;
}

Engine::Engine(const Context& ctx, std::shared_ptr<const Weights> weights, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(ctx, std::move(weights), options)) {}
Engine::~Engine() = default;

absl::StatusOr<GenerationHandle> Engine::Submit(GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
  return impl_->Submit(std::move(request), std::move(sink));
}
void Engine::Cancel(GenerationHandle handle) { impl_->Cancel(handle); }
absl::Status Engine::Execute(Priority priority, const std::function<absl::Status(const Context&)>& task,
                             absl::Time deadline) {
  return impl_->Execute(priority, task, deadline);
}
EngineStats Engine::stats() const { return impl_->stats(); }
const Weights& Engine::weights() const { return impl_->weights(); }
const EngineOptions& Engine::options() const { return impl_->options(); }
PagePool& Engine::pages() { return impl_->pages(); }
int64_t Engine::context_limit() const { return impl_->context_limit(); }

}  // namespace stillhouse
