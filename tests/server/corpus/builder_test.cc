#include "server/corpus/builder.h"

#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "kernels/tensor/bounded_memory.h"
#include "nlohmann/json.hpp"
#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

class BuilderTest : public CorpusTest {
 protected:
  // Runs one build; `stop_after` checks the hook says that the server stops. Checkpoints go to `checkpoint_`.
  absl::StatusOr<ArtifactRow> Build(const BuildSpec& spec, int64_t stop_after = -1) {
    int64_t checks = 0;
    BuilderHooks hooks;
    hooks.check = [&, stop_after]() -> absl::Status {
      if (stop_after >= 0 && checks >= stop_after) return absl::UnavailableError("stop");
      ++checks;
      if (on_check_) on_check_(checks);
      return cancel_at_ >= 0 && checks > cancel_at_ ? absl::CancelledError("cancelled") : absl::OkStatus();
    };
    hooks.report = [&](const BuildProgress& p) {
      EXPECT_GE(p.fraction, progress_.fraction);
      progress_ = p;
      stages_.insert(p.stage);
    };
    hooks.save = [&](std::string_view bytes) {
      // A stop without a last word (kill −9) keeps what was saved before.
      if (stop_after < 0 || checks < stop_after) checkpoint_ = std::string(bytes);
      if (keep_all_) all_checkpoints_.emplace_back(progress_.stage, bytes);
      return absl::OkStatus();
    };
    hooks.save_every = absl::ZeroDuration();
    BuildServices services = rig_->services();
    services.device_bytes = device_bytes_;
    CacheBuilder builder(services, spec, "build-" + spec.corpus_id + "-" + spec.cache_id, hooks);
    builder.Resume(checkpoint_, progress_);
    absl::StatusOr<ArtifactRow> row = builder.Run();
    checks_ = checks;
    return row;
  }

  PinnedMemory Pin(const BuildSpec& spec) {
    absl::StatusOr<PinnedMemory> pin = rig_->directory->Pin("acme", spec.corpus_id, spec.cache_id);
    STILLHOUSE_CHECK(pin.ok()) << pin.status().ToString();
    return *pin;
  }

  std::vector<float> Values(const Memory& memory) {
    std::vector<float> all;
    for (const LayerKv& kv : memory.layers) {
      for (const Tensor* t : {&kv.k, &kv.v, &kv.beta}) {
        if (!t->defined()) continue;
        const std::vector<float> values = rig_->ctx.ToFloats(*t);
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  }

  void Fresh() {
    checkpoint_.clear();
    progress_ = BuildProgress();
    stages_.clear();
  }

  std::string checkpoint_;
  bool keep_all_ = false;
  std::vector<std::pair<BuildStage, std::string>> all_checkpoints_;
  BuildProgress progress_;
  std::set<BuildStage> stages_;
  std::function<void(int64_t)> on_check_;
  std::optional<int64_t> device_bytes_;
  int64_t cancel_at_ = -1;
  int64_t checks_ = 0;
};

TEST_F(BuilderTest, EveryMethodEndsInAPublishedCache) {
  rig_->Upload("book", StoryOf(120));
  for (BuildMethod method : {BuildMethod::kCartridge, BuildMethod::kAttentionMatching, BuildMethod::kFull}) {
    Fresh();
    BuildSpec spec = SmallSpec(method, "book", "k" + std::to_string(static_cast<int>(method)));
    spec.evaluation.questions = {"Where did the grain go?", "Who rested for years?"};
    const absl::StatusOr<ArtifactRow> row = Build(spec);
    ASSERT_TRUE(row.ok()) << BuildMethodName(method) << ": " << row.status();
    EXPECT_TRUE(rig_->directory->IsResident("acme", "book", spec.cache_id));
    const PinnedMemory pin = Pin(spec);
    EXPECT_EQ(pin.method, BuildMethodName(method));
    const int64_t tokens = static_cast<int64_t>(pin.header.corpus_tokens);
    EXPECT_EQ(pin.memory->slots, method == BuildMethod::kFull ? tokens : tokens / 10);
    EXPECT_EQ(pin.memory->next_position, tokens);
    const absl::StatusOr<QualityReport> report = QualityReportFromJson(pin.header.quality_json);
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->rows.size(), 4u);
    EXPECT_EQ(report->question_source, "uploaded");
    EXPECT_GT(report->build_seconds, 0.0);
    EXPECT_TRUE(report->break_even_queries.has_value());
    EXPECT_EQ(report->training_tokens > 0, method == BuildMethod::kCartridge);
    // Loaded from the store it is the same.
    const std::vector<float> published = Values(*pin.memory);
    rig_->directory->Forget("acme", "book", spec.cache_id);
    EXPECT_EQ(Values(*Pin(spec).memory), published);
    // The catalog says the same without the file, and nothing of the tenant's texts.
    const nlohmann::json summary = nlohmann::json::parse(row->summary_json);
    EXPECT_EQ(summary["slots"], pin.header.slots);
    EXPECT_EQ(summary["quality"]["questions"], report->questions);
    EXPECT_THAT(row->summary_json, ::testing::Not(HasSubstr("grain")));
  }
}

TEST_F(BuilderTest, ResumesAnywhere) {
  rig_->Upload("book", StoryOf(100));
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "whole");
  const absl::StatusOr<ArtifactRow> whole = Build(spec);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const int64_t checks = checks_;
  const std::vector<float> expected = Values(*Pin(spec).memory);
  ASSERT_GT(checks, 40);
  std::set<BuildStage> resumed;
  for (int64_t stop = 0; stop <= checks; stop += 1 + checks / 17) {
    Fresh();
    spec.cache_id = "part-" + std::to_string(stop);
    const absl::StatusOr<ArtifactRow> first = Build(spec, stop);
    if (!first.ok()) EXPECT_EQ(first.status().code(), absl::StatusCode::kUnavailable) << first.status();
    EXPECT_EQ(rig_->store->GetArtifact("acme", "book", spec.cache_id).ok(), first.ok());
    resumed.insert(progress_.stage);
    // A new process: nothing but the store and the checkpoint.
    Open();
    const absl::StatusOr<ArtifactRow> second = Build(spec);
    ASSERT_TRUE(second.ok()) << "stopped after " << stop << ": " << second.status();
    // Batches of other sizes round otherwise, so that generation is the same but for the last bits.
    const std::vector<float> values = Values(*Pin(spec).memory);
    ASSERT_EQ(values.size(), expected.size());
    double apart = 0.0, norm = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
      apart += std::pow(values[i] - expected[i], 2);
      norm += std::pow(expected[i], 2);
    }
    EXPECT_LT(apart, 1e-4 * norm) << "stopped after " << stop << " checks";
  }
  EXPECT_GE(resumed.size(), 4u);
}

TEST_F(BuilderTest, OnceTheConversationsAreThereEveryResumeGivesTheSameBits) {
  rig_->Upload("book", StoryOf(100));
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "whole");
  keep_all_ = true;
  const absl::StatusOr<ArtifactRow> whole = Build(spec);
  ASSERT_TRUE(whole.ok()) << whole.status();
  keep_all_ = false;
  const std::vector<float> expected = Values(*Pin(spec).memory);
  const std::vector<std::pair<BuildStage, std::string>> all = std::move(all_checkpoints_);
  ASSERT_GT(all.size(), 20u);
  std::map<BuildStage, int> resumed;
  for (const auto& [stage, bytes] : all) {
    if (!BuildCheckpoint::FromBytes(bytes)->study.answers_done && stage <= BuildStage::kSelfStudy) continue;
    if (++resumed[stage] > 4) continue;
    Fresh();
    checkpoint_ = bytes;
    spec.cache_id = "s" + std::to_string(static_cast<int>(stage)) + "-" + std::to_string(resumed[stage]);
    Open();
    const absl::StatusOr<ArtifactRow> again = Build(spec);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(Values(*Pin(spec).memory), expected) << "from a checkpoint of stage " << static_cast<int>(stage);
  }
  EXPECT_TRUE(resumed.contains(BuildStage::kCompacting));
  EXPECT_TRUE(resumed.contains(BuildStage::kTraining));
  EXPECT_TRUE(resumed.contains(BuildStage::kEvaluating));
}

TEST_F(BuilderTest, ADamagedCheckpointIsForgotten) {
  rig_->Upload("book", StoryOf(60));
  const BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "book", "k");
  checkpoint_ = "rubbish";
  EXPECT_TRUE(Build(spec).ok());
}

TEST_F(BuilderTest, AfterTheCommitAnotherRunGivesTheSameRow) {
  rig_->Upload("book", StoryOf(60));
  const BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "book", "k");
  const absl::StatusOr<ArtifactRow> first = Build(spec);
  ASSERT_TRUE(first.ok()) << first.status();
  // The process died before the operation's end was written.
  Open();
  const absl::StatusOr<ArtifactRow> second = Build(spec);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->sha256, first->sha256);
  EXPECT_EQ(second->etag, first->etag);
}

TEST_F(BuilderTest, TinyDocumentsOfEveryMethod) {
  const std::vector<std::string> texts = {"a", "ab", "the", "?", "\n", "\xff\xfe\xfd", std::string("\0\0", 2)};
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string corpus = "tiny" + std::to_string(i);
    rig_->Upload(corpus, texts[i]);
    for (BuildMethod method : {BuildMethod::kCartridge, BuildMethod::kAttentionMatching, BuildMethod::kFull}) {
      Fresh();
      const BuildSpec spec = SmallSpec(method, corpus, "k" + std::to_string(static_cast<int>(method)));
      const absl::StatusOr<ArtifactRow> row = Build(spec);
      const bool nothing = TokeniseDocument(*rig_->model.tokenizer, *rig_->model.chat, texts[i]).tokens.empty();
      if (nothing) {
        EXPECT_EQ(row.status().code(), absl::StatusCode::kFailedPrecondition);
      } else {
        EXPECT_TRUE(row.ok()) << corpus << " " << BuildMethodName(method) << ": " << row.status();
      }
    }
  }
}

TEST_F(BuilderTest, AnEmptyDocumentIsRefusedInWords) {
  rig_->Upload("empty", "");
  const absl::Status status = Build(SmallSpec(BuildMethod::kCartridge, "empty", "k")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("empty"));
}

TEST_F(BuilderTest, BytesThatAreNotUtf8AreMentioned) {
  rig_->Upload("bytes", StoryOf(40) + "\xff\xfe\xfa" + StoryOf(10));
  const BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "bytes", "k");
  ASSERT_TRUE(Build(spec).ok());
  EXPECT_THAT(progress_.detail, HasSubstr("UTF-8"));
}

TEST_F(BuilderTest, AsManySlotsAsTokensIsTheWholeDocument) {
  rig_->Upload("book", StoryOf(50));
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  spec.compression_ratio = 0.0;
  spec.slots = 100000;
  ASSERT_TRUE(Build(spec).ok());
  BuildSpec full = SmallSpec(BuildMethod::kFull, "book", "f");
  Fresh();
  ASSERT_TRUE(Build(full).ok());
  EXPECT_EQ(Values(*Pin(spec).memory), Values(*Pin(full).memory));
  EXPECT_FALSE(stages_.contains(BuildStage::kTraining));
}

TEST_F(BuilderTest, FewSlots) {
  rig_->Upload("book", StoryOf(50));
  for (int64_t slots : {1, 2, 3}) {
    Fresh();
    BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "s" + std::to_string(slots));
    spec.compression_ratio = 0.0;
    spec.slots = slots;
    const absl::StatusOr<ArtifactRow> row = Build(spec);
    ASSERT_TRUE(row.ok()) << slots << ": " << row.status();
    EXPECT_EQ(Pin(spec).memory->slots, slots);
  }
  Fresh();
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "ratio");
  spec.compression_ratio = 1e5;
  ASSERT_TRUE(Build(spec).ok());
  EXPECT_EQ(Pin(spec).memory->slots, 4);
}

TEST_F(BuilderTest, LongDocumentsAreBuiltInWindows) {
  rig_->Upload("long", StoryOf(900));
  BuildSpec full = SmallSpec(BuildMethod::kFull, "long", "f");
  const absl::Status refused = Build(full).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("FULL"));
  for (const bool prefix : {false, true}) {
    Fresh();
    BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "long", prefix ? "p" : "a");
    spec.self_study.conversations = 20;
    spec.training.start = prefix ? StartMethod::kPrefix : StartMethod::kAttentionMatching;
    const absl::StatusOr<ArtifactRow> row = Build(spec);
    ASSERT_TRUE(row.ok()) << row.status();
    const PinnedMemory pin = Pin(spec);
    EXPECT_EQ(pin.memory->slots, static_cast<int64_t>(pin.header.corpus_tokens) / 10);
    EXPECT_GT(static_cast<int64_t>(pin.header.corpus_tokens), rig_->engine->context_limit());
    // Positions stay inside the context, with room for a conversation.
    EXPECT_LE(pin.memory->next_position, rig_->engine->context_limit() * 7 / 8);
    const absl::StatusOr<QualityReport> report = QualityReportFromJson(pin.header.quality_json);
    EXPECT_EQ(report->question_source, "held-out");
    EXPECT_EQ(report->rows.size(), 4u);
  }
}

TEST_F(BuilderTest, CancelsBetweenTasks) {
  rig_->Upload("book", StoryOf(100));
  const BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  for (int64_t at : {0, 3, 10, 25, 45}) {
    Fresh();
    cancel_at_ = at;
    EXPECT_EQ(Build(spec).status().code(), absl::StatusCode::kCancelled) << at;
    const EngineStats stats = rig_->engine->stats();
    EXPECT_EQ(stats.background_running + stats.background_waiting, 0);
    EXPECT_EQ(stats.pages_free, stats.pages_total);
    EXPECT_FALSE(rig_->store->GetArtifact("acme", "book", "k").ok());
  }
}

TEST_F(BuilderTest, WhatCannotFitItsPartOfTheDeviceIsRefusedBeforeTheWork) {
  rig_->Upload("book", StoryOf(100));
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  ASSERT_TRUE(Build(spec).ok());
  const int64_t document =
      static_cast<int64_t>(Pin(spec).header.corpus_tokens) * rig_->model.weights->config.kv_bytes_per_slot();
  const auto refused = [&](int64_t device_bytes) {
    Fresh();
    device_bytes_ = device_bytes;
    const absl::Status status = Build(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(stages_, (std::set<BuildStage>{BuildStage::kTokenising}));
    return std::string(status.message());
  };
  spec.cache_id = "large";
  spec.compression_ratio = 1.2;
  EXPECT_THAT(refused(6 * document), HasSubstr("ask for fewer slots"));
  EXPECT_THAT(refused(3 * document), HasSubstr("split the document"));
  Fresh();
  spec.compression_ratio = 10;
  device_bytes_ = 6 * document;
  EXPECT_TRUE(Build(spec).ok());
}

TEST_F(BuilderTest, OneThatTheDeviceHasNoMemoryForFailsAndGoesOnWhenThereIs) {
  rig_->Upload("book", StoryOf(100));
  const BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  for (int64_t at : {2, 10, 20, 30}) {
    on_check_ = [&](int64_t checks) {
      if (checks != at) return;
      rig_->ctx.pool().Trim();
      rig_->backend->LimitMemory(rig_->backend->memory().taken);
    };
    const absl::Status status = Build(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << at << ": " << status;
    const EngineStats stats = rig_->engine->stats();
    EXPECT_EQ(stats.background_running + stats.background_waiting, 0);
    EXPECT_EQ(stats.pages_free, stats.pages_total);
    EXPECT_FALSE(rig_->store->GetArtifact("acme", "book", "k").ok());
    rig_->backend->LimitMemory(BoundedMemory::kNoLimit);
  }
  on_check_ = nullptr;
  EXPECT_TRUE(Build(spec).ok());
}

TEST_F(BuilderTest, ACorpusDeletedMeanwhileEndsTheBuild) {
  for (int64_t at : {5, 30}) {
    Fresh();
    rig_->Upload("gone", StoryOf(100));
    on_check_ = [&](int64_t checks) {
      if (checks == at) EXPECT_TRUE(rig_->store->DeleteCorpus("acme", "gone").ok());
    };
    const absl::Status status = Build(SmallSpec(BuildMethod::kCartridge, "gone", "k")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
}

TEST_F(BuilderTest, HeldOutConversationsJudgeWhenNoQuestionsAreGiven) {
  rig_->Upload("book", StoryOf(100));
  BuildSpec spec = SmallSpec(BuildMethod::kAttentionMatching, "book", "k");
  ASSERT_TRUE(Build(spec).ok());
  absl::StatusOr<QualityReport> report = QualityReportFromJson(Pin(spec).header.quality_json);
  EXPECT_EQ(report->question_source, "held-out");
  EXPECT_GT(report->questions, 0);
  Fresh();
  spec.cache_id = "s";
  spec.evaluation.skip = true;
  ASSERT_TRUE(Build(spec).ok());
  report = QualityReportFromJson(Pin(spec).header.quality_json);
  EXPECT_TRUE(report->rows.empty());
  EXPECT_GT(report->build_seconds, 0.0);
}

TEST_F(BuilderTest, OptionsReachTheTrainer) {
  rig_->Upload("book", StoryOf(100));
  BuildSpec spec = SmallSpec(BuildMethod::kCartridge, "book", "k");
  spec.training.start = StartMethod::kPrefix;
  spec.training.train_beta = true;
  spec.training.train_on_question = true;
  spec.training.loss = LossKind::kCrossEntropy;
  spec.training.frozen_slots = 2;
  spec.self_study.questions = {"Where did the grain go?"};
  ASSERT_TRUE(Build(spec).ok());
  const PinnedMemory pin = Pin(spec);
  // A prefix is where its tokens are: queries continue behind it.
  EXPECT_EQ(pin.memory->next_position, pin.memory->slots);
  EXPECT_TRUE(pin.memory->layers[0].beta.defined());
  EXPECT_EQ(pin.header.frozen_slots, 2u);
  EXPECT_FALSE(pin.header.has_positions);
}

}  // namespace
}  // namespace stillhouse
