// The engine with a tiny model: the same tokens whatever else is in the batch, and every way in which a request can
// end.
#include "server/engine/engine.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/tensor/bounded_memory.h"
#include "tests/server/model/loaded_model.h"

namespace stillhouse {
namespace {

using testing::LoadedModel;

// Collects one request's events; WaitFinished blocks until the end.
class Collector : public GenerationSink {
 public:
  explicit Collector(int64_t stop_after = -1) : stop_after_(stop_after) {}

  bool OnToken(const SampledToken& token) override {
    std::lock_guard<std::mutex> lock(mutex_);
    tokens_.push_back(token);
    changed_.notify_all();
    return stop_after_ < 0 || static_cast<int64_t>(tokens_.size()) < stop_after_;
  }
  void OnFinish(FinishReason reason, const GenerationUsage& usage, const absl::Status& status) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++finishes_;
    reason_ = reason;
    usage_ = usage;
    status_ = status;
    changed_.notify_all();
  }

  bool WaitFinished() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return finishes_ > 0; });
  }
  bool WaitTokens(size_t n) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return tokens_.size() >= n || finishes_ > 0; });
  }
  std::vector<int32_t> ids() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int32_t> out;
    for (const auto& t : tokens_) out.push_back(t.id);
    return out;
  }
  int finishes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finishes_;
  }
  FinishReason reason_ = FinishReason::kError;
  GenerationUsage usage_;
  absl::Status status_;

 private:
  const int64_t stop_after_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<SampledToken> tokens_;
  int finishes_ = 0;
};

class EngineTest : public ::testing::Test {
 protected:
  EngineTest() : model_(LoadedModel::Tiny()) {}

  std::unique_ptr<Engine> Start(EngineOptions options = {}) {
    options.page_budget_bytes = options.page_budget_bytes == EngineOptions().page_budget_bytes
                                    ? 64 * model_.weights->config.kv_bytes_per_slot() * PagePool::kPageSlots
                                    : options.page_budget_bytes;
    return std::make_unique<Engine>(model_.ctx, model_.weights, options);
  }

  static GenerationRequest Request(std::vector<int32_t> prompt, int64_t max_tokens) {
    GenerationRequest r;
    r.id = "test";
    r.tenant = "default";
    r.prompt = std::move(prompt);
    r.max_tokens = max_tokens;
    return r;
  }

  std::vector<int32_t> Prompt(const std::string& text) { return model_.tokenizer->Encode(text); }

  std::vector<int32_t> Generate(Engine& engine, GenerationRequest request) {
    auto sink = std::make_shared<Collector>();
    auto handle = engine.Submit(std::move(request), sink);
    EXPECT_TRUE(handle.ok()) << handle.status();
    EXPECT_TRUE(sink->WaitFinished());
    return sink->ids();
  }

  LoadedModel model_;
};

TEST_F(EngineTest, GreedyTokensDoNotDependOnTheBatch) {
  auto engine = Start();
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < 6; ++i) {
    alone.push_back(Generate(*engine, Request(Prompt("prompt number " + std::to_string(i * i * 31)), 20 + i)));
    EXPECT_EQ(alone.back().size(), 20u + i);
  }
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 6; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(
        engine->Submit(Request(Prompt("prompt number " + std::to_string(i * i * 31)), 20 + i), sinks.back()).ok());
  }
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(sinks[i]->WaitFinished());
    EXPECT_EQ(sinks[i]->ids(), alone[i]);
    EXPECT_EQ(sinks[i]->reason_, FinishReason::kMaxTokens);
    EXPECT_EQ(sinks[i]->usage_.completion_tokens, 20 + i);
  }
}

TEST_F(EngineTest, SeededSamplingDoesNotDependOnTheBatch) {
  auto engine = Start();
  auto request = [&](int i) {
    GenerationRequest r = Request(Prompt("seeded " + std::to_string(i)), 16);
    r.sampling.temperature = 1.0f;
    r.sampling.seed = 1000 + i;
    return r;
  };
  std::vector<std::vector<int32_t>> alone;
  for (int i = 0; i < 4; ++i) alone.push_back(Generate(*engine, request(i)));
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 4; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(engine->Submit(request(i), sinks.back()).ok());
  }
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(sinks[i]->WaitFinished());
    EXPECT_EQ(sinks[i]->ids(), alone[i]);
  }
  EXPECT_NE(alone[0], alone[1]);
}

TEST_F(EngineTest, AMemoryOfAPrefixGivesTheTokensOfTheWholePrompt) {
  auto engine = Start();
  const std::vector<int32_t> whole = Prompt("a document that is remembered, and a question about it");
  const auto expected = Generate(*engine, Request(whole, 12));
  std::shared_ptr<const Memory> memory;
  ASSERT_TRUE(engine
                  ->Execute(Priority::kBackground,
                            [&](const Context& ctx) -> absl::Status {
                              SequenceState state({}, &engine->pages());
                              auto last = Prefill(ctx, *model_.weights, &state, absl::MakeConstSpan(whole).first(9), 4);
                              if (!last.ok()) return last.status();
                              memory = state.Freeze(ctx, model_.weights->config);
                              return absl::OkStatus();
                            })
                  .ok());
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 3; ++i) {
    GenerationRequest r = Request({whole.begin() + 9, whole.end()}, 12);
    r.memories = {memory};
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(engine->Submit(std::move(r), sinks.back()).ok());
  }
  for (auto& sink : sinks) {
    ASSERT_TRUE(sink->WaitFinished());
    EXPECT_EQ(sink->ids(), expected);
    EXPECT_EQ(sink->usage_.stored_slots, 9);
  }
  std::weak_ptr<const Memory> weak = memory;
  memory.reset();
  EXPECT_TRUE(weak.expired()) << "the engine kept a memory past the end of its requests";
}

// A model that gives NaN fails the request that it was given for, is counted, and harms no other.
TEST_F(EngineTest, InvalidLogitsFailTheirRequestAlone) {
  auto engine = Start();
  const auto expected = Generate(*engine, Request(Prompt("beside it"), 10));
  std::shared_ptr<const Memory> broken;
  ASSERT_TRUE(engine
                  ->Execute(Priority::kBackground,
                            [&](const Context& ctx) -> absl::Status {
                              SequenceState state({}, &engine->pages());
                              auto last = Prefill(ctx, *model_.weights, &state, Prompt("a broken document"), 64);
                              if (!last.ok()) return last.status();
                              auto memory = state.Freeze(ctx, model_.weights->config);
                              const Tensor& v = memory->layers[0].v;
                              const std::vector<float> nan(static_cast<size_t>(v.elements()), std::nanf(""));
                              ctx.backend->Upload(nan.data(), v);
                              broken = memory;
                              return absl::OkStatus();
                            })
                  .ok());
  auto bad = std::make_shared<Collector>(), good = std::make_shared<Collector>();
  GenerationRequest r = Request(Prompt("on it"), 10);
  r.memories = {broken};
  ASSERT_TRUE(engine->Submit(std::move(r), bad).ok());
  ASSERT_TRUE(engine->Submit(Request(Prompt("beside it"), 10), good).ok());
  ASSERT_TRUE(bad->WaitFinished());
  ASSERT_TRUE(good->WaitFinished());
  EXPECT_EQ(bad->reason_, FinishReason::kError);
  EXPECT_EQ(bad->status_.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(bad->ids().empty());
  EXPECT_EQ(good->ids(), expected);
  EXPECT_EQ(engine->stats().invalid_logits, 1);
}

// Where the backend records decode steps, the engine runs them; with keys and values in bf16 it answers as well.
TEST_F(EngineTest, DecodeStepsAreRecorded) {
  auto engine = Start();
  if (!model_.ctx.backend->fused().has_steps()) GTEST_SKIP() << "a backend without recorded steps";
  const auto tokens = Generate(*engine, Request(Prompt("again and again"), 30));
  const EngineStats stats = engine->stats();
  EXPECT_GE(stats.recorded_steps, 28);
  EXPECT_LT(stats.recordings, 4);
  EngineOptions plain;
  plain.record_steps = false;
  auto other = std::make_unique<Engine>(model_.ctx, model_.weights, plain);
  EXPECT_EQ(Generate(*other, Request(Prompt("again and again"), 30)), tokens);
  EXPECT_EQ(other->stats().recorded_steps, 0);
  if (model_.ctx.backend->device() != DeviceType::kCuda) return;
  EngineOptions narrow;
  narrow.kv_dtype = DType::kBF16;
  other = std::make_unique<Engine>(model_.ctx, model_.weights, narrow);
  EXPECT_EQ(Generate(*other, Request(Prompt("again and again"), 30)).size(), 30u);
  EXPECT_EQ(other->stats().page_bytes, stats.page_bytes / 2);
}

TEST_F(EngineTest, StopIdIsReportedAndEnds) {
  auto engine = Start();
  const auto free_run = Generate(*engine, Request(Prompt("stop here"), 20));
  GenerationRequest r = Request(Prompt("stop here"), 20);
  r.stop_ids = {free_run[5]};
  const auto stopped = Generate(*engine, r);
  const auto first = std::find(free_run.begin(), free_run.end(), free_run[5]) - free_run.begin();
  EXPECT_EQ(stopped, std::vector<int32_t>(free_run.begin(), free_run.begin() + first + 1));
  r.ignore_stop_ids = true;
  EXPECT_EQ(Generate(*engine, r), free_run);
}

TEST_F(EngineTest, SinkEndsTheSequence) {
  auto engine = Start();
  auto sink = std::make_shared<Collector>(/*stop_after=*/3);
  ASSERT_TRUE(engine->Submit(Request(Prompt("x"), 100), sink).ok());
  ASSERT_TRUE(sink->WaitFinished());
  EXPECT_EQ(sink->ids().size(), 3u);
  EXPECT_EQ(sink->reason_, FinishReason::kSink);
}

TEST_F(EngineTest, ContextLimits) {
  auto engine = Start();
  const int64_t limit = engine->context_limit();
  std::vector<int32_t> prompt(static_cast<size_t>(limit), 100);
  // Exactly at the limit: one token can still be drawn.
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(engine->Submit(Request(prompt, 5), sink).ok());
  ASSERT_TRUE(sink->WaitFinished());
  EXPECT_EQ(sink->ids().size(), 1u);
  EXPECT_EQ(sink->reason_, FinishReason::kContextFull);
  prompt.push_back(100);
  const auto refused = engine->Submit(Request(prompt, 5), std::make_shared<Collector>());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("513 tokens"));
  EXPECT_EQ(Generate(*engine, Request(Prompt("next one works"), 4)).size(), 4u);
}

TEST_F(EngineTest, RefusesWhatItCannotRun) {
  auto engine = Start();
  const auto code = [&](GenerationRequest r) {
    return engine->Submit(std::move(r), std::make_shared<Collector>()).status().code();
  };
  EXPECT_EQ(code(Request({}, 5)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({-1}, 5)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({static_cast<int32_t>(model_.weights->config.vocabulary)}, 5)),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Request({1}, 0)), absl::StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, CancelRunningAndWaitingReturnsEveryPage) {
  EngineOptions options;
  options.max_sequences = 1;
  auto engine = Start(options);
  auto running = std::make_shared<Collector>();
  auto first = engine->Submit(Request(Prompt("long one"), 400), running);
  ASSERT_TRUE(first.ok());
  auto waiting = std::make_shared<Collector>();
  auto second = engine->Submit(Request(Prompt("behind it"), 400), waiting);
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE(running->WaitTokens(2));
  engine->Cancel(*second);
  ASSERT_TRUE(waiting->WaitFinished());
  EXPECT_EQ(waiting->ids().size(), 0u);
  EXPECT_EQ(waiting->status_.code(), absl::StatusCode::kCancelled);
  engine->Cancel(*first);
  ASSERT_TRUE(running->WaitFinished());
  EXPECT_EQ(running->reason_, FinishReason::kCancelled);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.pages_free, stats.pages_total);
  engine->Cancel(*first);  // after its end: nothing happens
  EXPECT_EQ(Generate(*engine, Request(Prompt("still alive"), 3)).size(), 3u);
  EXPECT_EQ(running->finishes(), 1);
}

TEST_F(EngineTest, ADeadlineInTheQueueIsNeverExecuted) {
  EngineOptions options;
  options.max_sequences = 1;
  auto engine = Start(options);
  auto running = std::make_shared<Collector>();
  auto first = engine->Submit(Request(Prompt("long one"), 400), running);
  ASSERT_TRUE(first.ok());
  GenerationRequest late = Request(Prompt("late"), 4);
  late.deadline = absl::Now() + absl::Milliseconds(1);
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(engine->Submit(std::move(late), sink).ok());
  ASSERT_TRUE(sink->WaitFinished());
  EXPECT_EQ(sink->status_.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(sink->usage_.prompt_tokens, 0);
  EXPECT_EQ(sink->usage_.completion_tokens, 0);
  engine->Cancel(*first);
  ASSERT_TRUE(running->WaitFinished());
}

TEST_F(EngineTest, AFullQueueRefuses) {
  EngineOptions options;
  options.max_sequences = 1;
  options.max_waiting = 2;
  auto engine = Start(options);
  std::vector<std::shared_ptr<Collector>> sinks;
  std::vector<GenerationHandle> handles;
  absl::Status refused;
  for (int i = 0; i < 8 && refused.ok(); ++i) {
    sinks.push_back(std::make_shared<Collector>());
    auto handle = engine->Submit(Request(Prompt("q"), 400), sinks.back());
    if (handle.ok()) handles.push_back(*handle);
    refused = handle.status();
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  for (const auto& handle : handles) engine->Cancel(handle);
  for (size_t i = 0; i < handles.size(); ++i) EXPECT_TRUE(sinks[i]->WaitFinished());
}

TEST_F(EngineTest, WithoutAQueueThePlacesAreStillGiven) {
  EngineOptions options;
  options.max_sequences = 4;
  options.max_waiting = 0;
  auto engine = Start(options);
  // They come while the engine's thread is busy.
  absl::Notification busy, go_on;
  std::thread task([&] {
    const auto wait = [&](const Context&) {
      busy.Notify();
      go_on.WaitForNotification();
      return absl::OkStatus();
    };
    EXPECT_TRUE(engine->Execute(Priority::kInteractive, wait).ok());
  });
  busy.WaitForNotification();
  std::vector<std::shared_ptr<Collector>> sinks;
  std::vector<GenerationHandle> handles;
  for (int i = 0; i < 4; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    auto handle = engine->Submit(Request(Prompt("q"), 400), sinks.back());
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (handle.ok()) handles.push_back(*handle);
  }
  EXPECT_EQ(engine->Submit(Request(Prompt("q"), 400), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kUnavailable);
  go_on.Notify();
  task.join();
  for (const auto& handle : handles) engine->Cancel(handle);
  for (size_t i = 0; i < handles.size(); ++i) EXPECT_TRUE(sinks[i]->WaitFinished());
}

// What another sequence has at this one's first and last tokens: counted on the engine's thread, so that nothing
// depends on when the test's own thread runs.
class Witness : public Collector {
 public:
  explicit Witness(std::shared_ptr<Collector> other) : other_(std::move(other)) {}
  bool OnToken(const SampledToken& token) override {
    last_ = other_->ids().size();
    if (first_ == 0) first_ = last_;
    return Collector::OnToken(token);
  }
  size_t gained() const { return last_ - first_; }

 private:
  std::shared_ptr<Collector> other_;
  size_t first_ = 0, last_ = 0;
};

TEST_F(EngineTest, QueriesGoBeforeBackgroundWork) {
  auto engine = Start();
  auto slow = std::make_shared<Collector>();
  GenerationRequest background = Request(Prompt("background"), 400);
  background.priority = Priority::kBackground;
  auto handle = engine->Submit(std::move(background), slow);
  ASSERT_TRUE(handle.ok());
  ASSERT_TRUE(slow->WaitTokens(1));
  auto query = std::make_shared<Witness>(slow);
  ASSERT_TRUE(engine->Submit(Request(Prompt("query"), 100), query).ok());
  ASSERT_TRUE(query->WaitFinished());
  EXPECT_EQ(query->ids().size(), 100u);
  EXPECT_LT(query->gained(), 60u) << "a query of 100 tokens shared the engine evenly with background work";
  engine->Cancel(*handle);
  ASSERT_TRUE(slow->WaitFinished());
}

TEST_F(EngineTest, ExecuteReturnsItsStatusAndHonoursDeadlines) {
  auto engine = Start();
  EXPECT_EQ(engine->Execute(Priority::kInteractive, [](const Context&) { return absl::NotFoundError("x"); }).code(),
            absl::StatusCode::kNotFound);
  bool ran = false;
  EXPECT_EQ(engine
                ->Execute(
                    Priority::kInteractive,
                    [&](const Context&) {
                      ran = true;
                      return absl::OkStatus();
                    },
                    absl::Now() - absl::Seconds(1))
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(ran);
}

TEST_F(EngineTest, WorkThatTheDeviceHasNoMemoryForFailsAloneAndQueriesGoOn) {
  auto engine = Start();
  const std::vector<int32_t> prompt = Prompt("to the end");
  const std::vector<int32_t> alone = Generate(*engine, Request(prompt, 10));
  const BufferPool& pool = model_.ctx.pool();
  const auto fill_device = [&](int64_t but) {
    model_.ctx.pool().Trim();
    model_.backend->LimitMemory(model_.backend->memory().taken + but);
  };
  const auto task = [](const Context& ctx) {
    const Tensor work = ctx.EmptyF32({1 << 18});
    ctx.backend->Zero(work);
    return absl::OkStatus();
  };
  fill_device(0);
  const absl::Status build = engine->Execute(Priority::kBackground, task);
  EXPECT_EQ(build.code(), absl::StatusCode::kResourceExhausted) << build;
  EXPECT_THAT(std::string(build.message()), ::testing::HasSubstr("lacks 0.001 GiB (1048576 bytes)"));
  EXPECT_THAT(std::string(build.message()), ::testing::HasSubstr("--device-memory"));
  EXPECT_TRUE(engine->Execute(Priority::kInteractive, task).ok());

  // A query whose pages are there has its answer.
  fill_device(engine->pages().page_bytes());
  size_t before = pool.overflowed_bytes();
  EXPECT_EQ(Generate(*engine, Request(prompt, 10)), alone);
  EXPECT_GT(pool.overflowed_bytes(), before);
  fill_device(engine->pages().page_bytes());
  GenerationRequest study = Request(prompt, 10);
  study.priority = Priority::kBackground;
  auto sink = std::make_shared<Collector>();
  ASSERT_TRUE(engine->Submit(study, sink).ok());
  ASSERT_TRUE(sink->WaitFinished());
  EXPECT_EQ(sink->reason_, FinishReason::kError);
  EXPECT_EQ(sink->status_.code(), absl::StatusCode::kResourceExhausted) << sink->status_;
  // And one whose pages are not is told so.
  fill_device(0);
  sink = std::make_shared<Collector>();
  ASSERT_TRUE(engine->Submit(Request(prompt, 10), sink).ok());
  ASSERT_TRUE(sink->WaitFinished());
  EXPECT_EQ(sink->status_.code(), absl::StatusCode::kResourceExhausted) << sink->status_;

  model_.backend->LimitMemory(BoundedMemory::kNoLimit);
  before = pool.overflowed_bytes();
  EXPECT_TRUE(engine->Execute(Priority::kBackground, task).ok());
  EXPECT_EQ(Generate(*engine, study), alone);
  EXPECT_EQ(pool.overflowed_bytes(), before);
  EXPECT_EQ(engine->stats().pages_free, engine->stats().pages_total);
}

TEST_F(EngineTest, DestructionEndsEverything) {
  auto engine = Start();
  std::vector<std::shared_ptr<Collector>> sinks;
  for (int i = 0; i < 4; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ASSERT_TRUE(engine->Submit(Request(Prompt("running"), 400), sinks.back()).ok());
  }
  engine.reset();
  for (auto& sink : sinks) EXPECT_EQ(sink->finishes(), 1);
}

TEST_F(EngineTest, CancelRacesCompletion) {
  auto engine = Start();
  for (int i = 0; i < 50; ++i) {
    auto sink = std::make_shared<Collector>();
    auto handle = engine->Submit(Request(Prompt("race"), 1 + i % 4), sink);
    ASSERT_TRUE(handle.ok());
    std::thread canceller([&] { engine->Cancel(*handle); });
    ASSERT_TRUE(sink->WaitFinished());
    canceller.join();
    EXPECT_EQ(sink->finishes(), 1);
  }
  EXPECT_EQ(engine->stats().pages_free, engine->stats().pages_total);
}

}  // namespace
}  // namespace stillhouse
