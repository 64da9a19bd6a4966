#include "server/corpus/build_queue.h"

#include <gmock/gmock.h>

#include <functional>
#include <future>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

class BuildQueueTest : public CorpusTest {
 protected:
  BuildQueueTest() {
    rig_->Upload("book", StoryOf(80));
    Start();
  }
  ~BuildQueueTest() override { queue_.reset(); }

  void Start() { queue_ = std::make_unique<BuildQueue>(rig_->services(), options_); }
  void Restart() {
    queue_.reset();
    Open();
    Start();
  }

  BuildInfo Enqueue(const BuildSpec& spec, const std::string& request_id = "") {
    absl::StatusOr<BuildInfo> info = queue_->Enqueue(spec, request_id);
    STILLHOUSE_CHECK(info.ok()) << info.status().ToString();
    return *info;
  }

  BuildInfo WaitFor(const BuildInfo& info) {
    absl::StatusOr<BuildInfo> done = queue_->Wait("acme", info.row.operation_id, absl::Now() + absl::Seconds(120));
    STILLHOUSE_CHECK(done.ok()) << done.status().ToString();
    return *done;
  }

  // A build that takes long enough to be caught in the act.
  BuildSpec Long(const std::string& cache_id) {
    BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", cache_id);
    spec.training.steps = 5000;
    spec.training.evaluate_every = 50;
    spec.training.max_training_tokens = int64_t{1} << 40;
    spec.training.early_stop_patience = 0;
    return spec;
  }

  void WaitUntilTraining(const BuildInfo& info) {
    for (int i = 0; i < 6000; ++i) {
      const absl::StatusOr<BuildInfo> now =
          queue_->Wait("acme", info.row.operation_id, absl::Now() + absl::Milliseconds(10));
      ASSERT_TRUE(now.ok());
      ASSERT_FALSE(IsDone(now->row.state)) << now->row.error_message;
      if (now->progress.stage == BuildStage::kTraining && now->progress.detail.find("loss") != std::string::npos)
        return;
    }
    FAIL() << "the build never trained";
  }

  BuildQueueOptions options_;
  std::unique_ptr<BuildQueue> queue_;
};

TEST_F(BuildQueueTest, BuildsAndReports) {
  const BuildInfo queued = Enqueue(SmallSpec(BuildMethod::kCartridge, "book", "k"));
  EXPECT_EQ(queued.row.kind, "BUILD_CACHE");
  EXPECT_EQ(queued.row.target, "corpora/book/caches/k");
  const BuildInfo done = WaitFor(queued);
  EXPECT_EQ(done.row.state, OperationState::kSucceeded) << done.row.error_message;
  EXPECT_EQ(done.progress.stage, BuildStage::kDone);
  EXPECT_DOUBLE_EQ(done.progress.fraction, 1.0);
  EXPECT_NE(done.progress.start_time, absl::InfinitePast());
  EXPECT_THAT(done.row.result_json, HasSubstr("corpora/book/caches/k"));
  EXPECT_FALSE(done.row.has_checkpoint);
  EXPECT_TRUE(rig_->directory->Pin("acme", "book", "k").ok());
}

TEST_F(BuildQueueTest, RefusesWhatCannotBegin) {
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "missing", "k");
  EXPECT_EQ(queue_->Enqueue(spec, "").status().code(), absl::StatusCode::kNotFound);
  spec.corpus_id = "book";
  spec.training.steps = 0;
  EXPECT_EQ(queue_->Enqueue(spec, "").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(queue_->Get("acme", "build-0").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(queue_->Cancel("acme", "build-0").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(BuildQueueTest, OneBuildPerCacheAndReplaceOnRequest) {
  const BuildInfo first = Enqueue(Long("k"));
  EXPECT_EQ(queue_->Enqueue(Long("k"), "").status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(queue_->Cancel("acme", first.row.operation_id).ok());
  EXPECT_EQ(WaitFor(first).row.state, OperationState::kCancelled);
  BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "book", "k");
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.state, OperationState::kSucceeded);
  EXPECT_EQ(queue_->Enqueue(spec, "").status().code(), absl::StatusCode::kAlreadyExists);
  const absl::StatusOr<PinnedMemory> old = rig_->directory->Pin("acme", "book", "k");
  spec.replace = true;
  spec.expected_etag = "nonsense";
  EXPECT_EQ(queue_->Enqueue(spec, "").status().code(), absl::StatusCode::kAborted);
  spec.expected_etag = rig_->store->GetArtifact("acme", "book", "k")->etag;
  spec.compression_ratio = 5.0;
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.state, OperationState::kSucceeded);
  EXPECT_GT(rig_->directory->Pin("acme", "book", "k")->memory->slots, old->memory->slots);
}

TEST_F(BuildQueueTest, ABuildThatIsDoneIsNotInTheWayOfTheNext) {
  // Between the end that others can read and the last of the build.
  class AtTheEnd final : public BuildObserver {
   public:
    void OnEnd(BuildMethod, const absl::Status&) override {
      if (std::function<void()> call = std::exchange(once, nullptr)) call();
    }
    std::function<void()> once;
  } observer;
  queue_.reset();
  options_.observer = &observer;
  Start();
  BuildSpec spec = SmallSpec(BuildMethod::kFull, "book", "k");
  spec.replace = true;
  std::promise<absl::StatusOr<BuildInfo>> next;
  observer.once = [&] { next.set_value(queue_->Enqueue(spec, "")); };
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.state, OperationState::kSucceeded);
  const absl::StatusOr<BuildInfo> second = next.get_future().get();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(WaitFor(*second).row.state, OperationState::kSucceeded);
  queue_.reset();
}

TEST_F(BuildQueueTest, ARequestIdMakesOneBuild) {
  BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "book", "");
  const BuildInfo first = Enqueue(spec, "11111111-2222-3333-4444-555555555555");
  EXPECT_THAT(first.row.target, HasSubstr("corpora/book/caches/matched-"));
  const BuildInfo again = Enqueue(spec, "11111111-2222-3333-4444-555555555555");
  EXPECT_EQ(again.row.operation_id, first.row.operation_id);
  WaitFor(first);
  // Also when it is long done.
  EXPECT_EQ(Enqueue(spec, "11111111-2222-3333-4444-555555555555").row.state, OperationState::kSucceeded);
  spec.seed = 9;
  EXPECT_EQ(queue_->Enqueue(spec, "11111111-2222-3333-4444-555555555555").status().code(),
            absl::StatusCode::kInvalidArgument);
  const BuildInfo other = Enqueue(spec, "");
  EXPECT_NE(other.row.target, first.row.target);
  WaitFor(other);
}

TEST_F(BuildQueueTest, QueuesInOrderAndCancelsWaitingOnesAtOnce) {
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  const BuildInfo second = Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "b"));
  const BuildInfo third = Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "c"));
  EXPECT_EQ(queue_->Get("acme", running.row.operation_id)->queue_position, 0);
  EXPECT_EQ(queue_->Get("acme", second.row.operation_id)->queue_position, 1);
  EXPECT_EQ(queue_->Get("acme", third.row.operation_id)->queue_position, 2);
  EXPECT_EQ(queue_->Cancel("acme", second.row.operation_id)->row.state, OperationState::kCancelled);
  EXPECT_EQ(queue_->Get("acme", third.row.operation_id)->queue_position, 1);
  OperationFilter unfinished;
  unfinished.done = false;
  EXPECT_EQ(queue_->List("acme", unfinished, {})->rows.size(), 2u);
  EXPECT_EQ(queue_->List("acme", {}, {})->rows.size(), 3u);
  ASSERT_TRUE(queue_->Cancel("acme", running.row.operation_id).ok());
  const BuildInfo cancelled = WaitFor(running);
  EXPECT_EQ(cancelled.row.state, OperationState::kCancelled);
  EXPECT_EQ(cancelled.row.error_code, static_cast<int>(absl::StatusCode::kCancelled));
  EXPECT_EQ(WaitFor(third).row.state, OperationState::kSucceeded);
  // A done operation stays as it is.
  EXPECT_EQ(queue_->Cancel("acme", third.row.operation_id)->row.state, OperationState::kSucceeded);
}

TEST_F(BuildQueueTest, ACancelThatFoundTheRowAloneIsHeeded) {
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  const BuildInfo second = Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "b"));
  // As a Cancel does that comes before the job is in its place.
  OperationUpdate update;
  update.cancel_requested = true;
  ASSERT_TRUE(rig_->store->UpdateOperation("acme", second.row.operation_id, update).ok());
  ASSERT_TRUE(queue_->Cancel("acme", running.row.operation_id).ok());
  EXPECT_EQ(WaitFor(second).row.state, OperationState::kCancelled);
}

TEST_F(BuildQueueTest, ACacheWithoutRoomIsRefusedBeforeAnythingIsComputed) {
  // Room as a tenant's quota gives it: what is asked for is held until the store has it.
  std::mutex mutex;
  uint64_t limit = 0, held = 0;
  std::vector<uint64_t> freed_bytes;
  queue_.reset();
  options_.admit_bytes = [&](std::string_view tenant, uint64_t bytes,
                             uint64_t freed) -> absl::StatusOr<std::shared_ptr<void>> {
    EXPECT_EQ(tenant, "acme");
    std::lock_guard<std::mutex> lock(mutex);
    freed_bytes.push_back(freed);
    if (held + bytes > limit) return absl::ResourceExhaustedError("no room");
    held += bytes;
    return std::shared_ptr<void>(nullptr, [&, bytes](void*) {
      std::lock_guard<std::mutex> lock(mutex);
      held -= bytes;
    });
  };
  Start();
  BuildSpec spec = SmallSpec(BuildMethod::kFull, "book", "k");
  spec.replace = true;
  EXPECT_EQ(queue_->Enqueue(spec, "").status().code(), absl::StatusCode::kResourceExhausted);
  limit = 100;  // of keys and values alone it has more
  const BuildInfo small = WaitFor(Enqueue(spec));
  EXPECT_EQ(small.row.state, OperationState::kFailed);
  EXPECT_EQ(small.row.error_code, static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(small.progress.fraction, 0.0);  // it was known when the document was read
  EXPECT_FALSE(small.row.has_checkpoint);
  limit = uint64_t{1} << 30;
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.state, OperationState::kSucceeded);
  const auto size = [this] { return rig_->store->GetArtifact("acme", "book", "k")->size; };
  // In place of the one before. Reports differ by some digits.
  constexpr uint64_t kDigits = 100;
  freed_bytes.clear();
  uint64_t before = size();
  limit = before + kDigits;
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.state, OperationState::kSucceeded);
  EXPECT_THAT(freed_bytes, ::testing::Each(before));
  limit = size() - kDigits;  // more than its keys and values
  EXPECT_EQ(WaitFor(Enqueue(spec)).row.error_code, static_cast<int>(absl::StatusCode::kResourceExhausted));
  queue_.reset();
  EXPECT_EQ(held, 0u);
}

TEST_F(BuildQueueTest, FullQueuesSayItIsTheServer) {
  queue_.reset();
  options_.max_waiting = 1;
  Start();
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  Enqueue(Long("b"));
  EXPECT_EQ(queue_->Enqueue(Long("c"), "").status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(BuildQueueTest, TenantsTakeTurns) {
  queue_.reset();
  options_.max_waiting_per_tenant = 3;
  Start();
  rig_->Upload("book", StoryOf(80), "other");
  const auto of_other = [&](BuildSpec spec) {
    spec.tenant = "other";
    return spec;
  };
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  const BuildInfo second = Enqueue(Long("b"));
  const BuildInfo third = Enqueue(Long("c"));
  const BuildInfo theirs = Enqueue(of_other(Long("a")));
  const BuildInfo theirs_too = Enqueue(of_other(Long("b")));
  const auto position = [&](const BuildInfo& info) {
    return queue_->Get(info.row.tenant, info.row.operation_id)->queue_position;
  };
  EXPECT_EQ(position(theirs), 1);
  EXPECT_EQ(position(second), 2);
  EXPECT_EQ(position(theirs_too), 3);
  EXPECT_EQ(position(third), 4);
  Enqueue(Long("d"));
  EXPECT_EQ(queue_->Enqueue(Long("e"), "").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(queue_->Enqueue(of_other(Long("e")), "").ok());
  ASSERT_TRUE(queue_->Cancel("acme", running.row.operation_id).ok());
  WaitFor(running);
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (position(theirs) != 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(queue_->Get("other", theirs.row.operation_id)->row.state, OperationState::kRunning);
  EXPECT_EQ(position(second), 1);
}

TEST_F(BuildQueueTest, WaitEndsAtItsDeadlineOrWhenStopped) {
  const BuildInfo running = Enqueue(Long("a"));
  absl::StatusOr<BuildInfo> early =
      queue_->Wait("acme", running.row.operation_id, absl::Now() + absl::Milliseconds(20));
  EXPECT_FALSE(IsDone(early->row.state));
  early = queue_->Wait("acme", running.row.operation_id, absl::InfiniteFuture(), [] { return true; });
  EXPECT_FALSE(IsDone(early->row.state));
}

TEST_F(BuildQueueTest, UnfinishedBuildsGoOnAfterARestart) {
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  spec.training.steps = 60;
  const BuildInfo reference = Enqueue(spec);
  ASSERT_EQ(WaitFor(reference).row.state, OperationState::kSucceeded);
  const std::vector<float> expected =
      rig_->ctx.ToFloats(rig_->directory->Pin("acme", "book", "k")->memory->layers[1].v);

  spec.cache_id = "again";
  const BuildInfo first = Enqueue(spec);
  const BuildInfo second = Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "other"));
  const BuildInfo third = Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "never"));
  WaitUntilTraining(first);
  ASSERT_TRUE(queue_->Cancel("acme", third.row.operation_id).ok());
  Restart();
  const BuildInfo done = WaitFor(first);
  EXPECT_EQ(done.row.state, OperationState::kSucceeded) << done.row.error_message;
  // Generation repeats itself but for the last bits (batches of other sizes round otherwise).
  const std::vector<float> values =
      rig_->ctx.ToFloats(rig_->directory->Pin("acme", "book", "again")->memory->layers[1].v);
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 0.02) << i;
  EXPECT_EQ(WaitFor(second).row.state, OperationState::kSucceeded);
  EXPECT_EQ(WaitFor(third).row.state, OperationState::kCancelled);
}

TEST_F(BuildQueueTest, ACancelThatTheServerDidNotSurviveStillCounts) {
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  queue_.reset();
  OperationUpdate update;
  update.cancel_requested = true;
  ASSERT_TRUE(rig_->store->UpdateOperation("acme", running.row.operation_id, update).ok());
  Restart();
  EXPECT_EQ(WaitFor(running).row.state, OperationState::kCancelled);
}

TEST_F(BuildQueueTest, ACorpusDeletedDuringItsBuildFailsTheBuildAlone) {
  queue_.reset();
  options_.checkpoint_every = absl::Milliseconds(20);
  Start();
  const BuildInfo running = Enqueue(Long("a"));
  WaitUntilTraining(running);
  ASSERT_TRUE(rig_->store->DeleteCorpus("acme", "book").ok());
  const BuildInfo done = WaitFor(running);
  EXPECT_EQ(done.row.state, OperationState::kFailed);
  EXPECT_EQ(done.row.error_code, static_cast<int>(absl::StatusCode::kNotFound));
  rig_->Upload("book", StoryOf(60));
  EXPECT_EQ(WaitFor(Enqueue(SmallSpec(BuildMethod::kAttentionMatching, "book", "b"))).row.state,
            OperationState::kSucceeded);
}

TEST(BuildProgress, SurvivesJson) {
  BuildProgress progress;
  progress.stage = BuildStage::kTraining;
  progress.fraction = 0.25;
  progress.eta_seconds = 12.0;
  progress.detail = "step 3 of \"12\"";
  progress.start_time = absl::FromUnixMicros(1700000000123456);
  const std::string json = BuildProgressToJson(progress);
  const absl::StatusOr<BuildProgress> back = BuildProgressFromJson(json);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(BuildProgressToJson(*back), json);
  for (const char* text : {"", "{}", "[]", "{\"stage\":\"COOKING\"}", "{\"stage\":\"QUEUED\",\"x\":1}"}) {
    EXPECT_FALSE(BuildProgressFromJson(text).ok()) << text;
  }
}

}  // namespace
}  // namespace stillhouse
