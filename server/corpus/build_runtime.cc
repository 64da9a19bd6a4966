#include "server/corpus/build_runtime.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

// Finished jobs on their way from the engine's thread to the builder's.
struct Mailbox {
  struct Letter {
    int64_t job;
    GenerationOutput output;
    absl::Status status;
  };
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<Letter> letters;

  // The next letter, or nothing after a short wait.
  bool Take(Letter* letter) {
    std::unique_lock<std::mutex> lock(mutex);
    if (!arrived.wait_for(lock, std::chrono::milliseconds(50), [&] { return !letters.empty(); })) return false;
    *letter = std::move(letters.front());
    letters.pop_front();
    return true;
  }
};

class JobSink : public GenerationSink {
 public:
  JobSink(int64_t job, std::shared_ptr<Mailbox> mailbox, std::function<bool(const SampledToken&)> keep_going)
      : mailbox_(std::move(mailbox)), keep_going_(std::move(keep_going)) {
    letter_.job = job;
  }
  bool OnToken(const SampledToken& token) override {
    letter_.output.tokens.push_back(token);
    return !keep_going_ || keep_going_(token);
  }
  void OnFinish(FinishReason reason, const GenerationUsage& usage, const absl::Status& status) override {
    letter_.output.reason = reason;
    letter_.output.prompt_tokens = usage.prompt_tokens;
    letter_.status = status;
    std::lock_guard<std::mutex> lock(mailbox_->mutex);
    mailbox_->letters.push_back(std::move(letter_));
    mailbox_->arrived.notify_one();
  }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  std::function<bool(const SampledToken&)> keep_going_;
  Mailbox::Letter letter_;
};

}  // namespace

absl::Status BuildRuntime::Run(const std::function<absl::Status(const Context&)>& task) const {
  STILLHOUSE_RETURN_IF_ERROR(check());
  return engine->Execute(Priority::kBackground, task);
}

absl::StatusOr<std::shared_ptr<Memory>> BuildRuntime::PrefillMemory(const std::vector<int32_t>& tokens,
                                                                    double* seconds) const {
  // Pages of its own: a teacher's document is the builder's memory, not the queries'.
  std::unique_ptr<PagePool> pool;
  std::unique_ptr<SequenceState> state;
  std::shared_ptr<Memory> memory;
  auto timed = [&](const std::function<absl::Status(const Context&)>& work) {
    return Run([&](const Context& ctx) {
      const absl::Time begin = absl::Now();
      absl::Status status = work(ctx);
      if (seconds != nullptr) *seconds += absl::ToDoubleSeconds(absl::Now() - begin);
      return status;
    });
  };
  for (size_t begin = 0; begin < tokens.size(); begin += static_cast<size_t>(task_rows)) {
    STILLHOUSE_RETURN_IF_ERROR(timed([&](const Context& ctx) -> absl::Status {
      if (!state) {
        const int64_t slots = static_cast<int64_t>(tokens.size());
        pool = std::make_unique<PagePool>(ctx, config(), PagePool::BytesFor(ctx, config(), DType::kF32, slots));
        state = std::make_unique<SequenceState>(std::vector<std::shared_ptr<const Memory>>{}, pool.get());
      }
      const auto piece = absl::MakeConstSpan(tokens).subspan(begin, static_cast<size_t>(task_rows));
      STILLHOUSE_RETURN_IF_ERROR(state->Reserve(static_cast<int64_t>(piece.size())));
      Batch batch;
      batch.Add(state.get(), piece, Batch::Outputs::kNone);
      Forward(ctx, engine->weights(), batch);
      return absl::OkStatus();
    }));
  }
  STILLHOUSE_RETURN_IF_ERROR(Run([&](const Context& ctx) {
    memory = state->Freeze(ctx, config());
    return absl::OkStatus();
  }));
  return memory;
}

absl::Status GenerateAll(const BuildRuntime& runtime, int64_t count,
                         const std::function<absl::StatusOr<GenerationJob>(int64_t)>& make,
                         const std::function<absl::Status(int64_t, GenerationOutput)>& done) {
  auto mailbox = std::make_shared<Mailbox>();
  std::map<int64_t, GenerationHandle> in_flight;
  // As many again as run at once, and handed over in groups: the engine takes them up in groups too, so that few of its
  // steps are of prompts.
  const size_t at_once = static_cast<size_t>(runtime.engine->options().max_background_sequences);
  const size_t most = 2 * at_once, group = std::max<size_t>(1, at_once / 4);
  int64_t next = 0;
  absl::Status status;
  while ((status.ok() && next < count) || !in_flight.empty()) {
    if (status.ok()) {
      status = runtime.check();
      std::vector<GenerationJob> jobs;
      const size_t room = in_flight.size() + group <= most ? most - in_flight.size() : 0;
      const int64_t last = std::min<int64_t>(count, next + static_cast<int64_t>(room));
      while (status.ok() && next + static_cast<int64_t>(jobs.size()) < last) {
        absl::StatusOr<GenerationJob> job = make(next + static_cast<int64_t>(jobs.size()));
        if (job.ok()) {
          jobs.push_back(*std::move(job));
        } else {
          status = job.status();
        }
      }
      for (size_t i = 0; status.ok() && i < jobs.size(); ++i) {
        GenerationRequest request;
        request.id = StrCat(runtime.operation_id, "/", next);
        request.tenant = runtime.tenant;
        request.priority = Priority::kBackground;
        request.prompt = std::move(jobs[i].prompt);
        if (jobs[i].memory) request.memories.push_back(std::move(jobs[i].memory));
        request.sampling = jobs[i].sampling;
        request.max_tokens = jobs[i].max_tokens;
        request.stop_ids = runtime.tokenizer->end_of_generation();
        absl::StatusOr<GenerationHandle> handle = runtime.engine->Submit(
            std::move(request), std::make_shared<JobSink>(next, mailbox, std::move(jobs[i].keep_going)));
        if (handle.ok()) {
          in_flight.emplace(next++, *handle);
        } else {
          status = handle.status();
        }
      }
      if (!status.ok()) {
        for (const auto& [job, handle] : in_flight) runtime.engine->Cancel(handle);
        continue;
      }
    }
    Mailbox::Letter letter;
    if (!mailbox->Take(&letter)) continue;
    in_flight.erase(letter.job);
    if (!status.ok()) continue;
    status = letter.status;
    if (status.ok()) status = done(letter.job, std::move(letter.output));
    if (!status.ok()) {
      for (const auto& [job, handle] : in_flight) runtime.engine->Cancel(handle);
    }
  }
  return status;
}

}  // namespace stillhouse
