#include "server/corpus/evaluator.h"

#include <gmock/gmock.h>

#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

class EvaluatorTest : public CorpusTest {
 protected:
  EvaluatorTest() {
    runtime_.engine = rig_->engine.get();
    runtime_.tokenizer = rig_->model.tokenizer.get();
    runtime_.chat = rig_->model.chat.get();
    runtime_.tenant = "acme";
    runtime_.check = [] { return absl::OkStatus(); };
    document_ = TokeniseDocument(*rig_->model.tokenizer, *rig_->model.chat, StoryOf(100));
    teacher_ = *Teacher::Create(&runtime_, &document_, 128);
  }

  std::shared_ptr<const Memory> Prefix(int64_t slots) {
    std::shared_ptr<const Memory> full = *teacher_->Window(0);
    std::shared_ptr<const Memory> out;
    STILLHOUSE_CHECK(runtime_
                         .Run([&](const Context& ctx) {
                           out = SliceMemory(ctx, *full, 0, slots, slots);
                           return absl::OkStatus();
                         })
                         .ok());
    return out;
  }

  const QualityReport::Row& Row(const QualityReport& report, const std::string& memory) {
    for (const QualityReport::Row& row : report.rows) {
      if (row.memory == memory) return row;
    }
    STILLHOUSE_CHECK(false) << memory;
    return report.rows[0];
  }

  BuildRuntime runtime_;
  Document document_;
  std::unique_ptr<Teacher> teacher_;
  const std::vector<std::string> questions_ = {"Where did the grain go?", "Who rested?", "What is the mill made of?"};
};

TEST_F(EvaluatorTest, TheFullMemoryRecoversAll) {
  Evaluator evaluator(&runtime_);
  int64_t generated = 0;
  const auto conversations = evaluator.PrepareUploaded(questions_, {}, 8, teacher_.get(), &generated);
  ASSERT_TRUE(conversations.ok()) << conversations.status();
  EXPECT_GT(generated, 0);
  QualityReport report;
  std::shared_ptr<const Memory> full = *teacher_->Window(0);
  ASSERT_TRUE(evaluator
                  .Judge(
                      *conversations, true, full, teacher_.get(), [](double) { return absl::OkStatus(); }, &report)
                  .ok());
  ASSERT_EQ(report.rows.size(), 4u);
  EXPECT_EQ(report.questions, static_cast<int64_t>(conversations->size()));
  EXPECT_NEAR(Row(report, "cache").mean_nll, Row(report, "full").mean_nll, 1e-4);
  EXPECT_NEAR(*Row(report, "cache").mean_kl, 0.0, 1e-4);
  EXPECT_NEAR(*report.recovered, 1.0, 1e-3);
  EXPECT_NEAR(*Row(report, "none").recovered, 0.0, 1e-9);
  // A prefix of the same size is the same memory.
  EXPECT_NEAR(Row(report, "truncated").mean_nll, Row(report, "cache").mean_nll, 1e-6);
  EXPECT_EQ(Row(report, "full").kv_bytes, full->canonical_bytes());
  EXPECT_TRUE(report.off_context_damage.has_value());

  // The same with a second pass over the teacher instead of the kept candidates.
  QualityReport again;
  ASSERT_TRUE(evaluator
                  .Judge(
                      *conversations, false, full, teacher_.get(), [](double) { return absl::OkStatus(); }, &again)
                  .ok());
  EXPECT_NEAR(Row(again, "full").mean_nll, Row(report, "full").mean_nll, 1e-4);
}

TEST_F(EvaluatorTest, GivenAnswersAreJudged) {
  Evaluator evaluator(&runtime_);
  int64_t generated = 0;
  const auto conversations =
      evaluator.PrepareUploaded(questions_, {"To the mill.", "Nobody.", "Stone."}, 8, teacher_.get(), &generated);
  ASSERT_TRUE(conversations.ok());
  EXPECT_EQ(generated, 0);
  EXPECT_EQ((*conversations)[1].answer.size(), 8u);  // cut
  EXPECT_EQ((*conversations)[2].answer.back(), rig_->model.chat->end_of_turn());
  EXPECT_EQ((*conversations)[0].answer_teacher.width, 20);
  QualityReport report;
  ASSERT_TRUE(
      evaluator
          .Judge(
              *conversations, false, Prefix(9), teacher_.get(), [](double) { return absl::OkStatus(); }, &report)
          .ok());
  EXPECT_GT(*Row(report, "cache").mean_kl, 0.0);
  EXPECT_EQ(Row(report, "cache").kv_bytes, Row(report, "truncated").kv_bytes);
}

TEST(QualityReport, SurvivesJson) {
  QualityReport report;
  report.rows = {{"none", 1.5, 0.25, 1000, 0.0}, {"full", 0.1, std::nullopt, 2000, std::nullopt}};
  report.recovered = 0.1 + 0.2;
  report.off_context_damage = -0.125;
  report.questions = 7;
  report.answer_tokens = 70;
  report.question_source = "uploaded";
  report.build_seconds = 12.5;
  report.best_step = 3;
  const std::string json = QualityReportToJson(report);
  const absl::StatusOr<QualityReport> back = QualityReportFromJson(json);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(QualityReportToJson(*back), json);
  EXPECT_EQ(*back->recovered, 0.1 + 0.2);
  EXPECT_FALSE(back->rows[1].mean_kl.has_value());
  EXPECT_FALSE(back->break_even_queries.has_value());
  for (const char* text : {"", "[]", "{\"rows\":3}", "{\"questions\":\"7\"}", "{\"rows\":[1]}"}) {
    EXPECT_FALSE(QualityReportFromJson(text).ok()) << text;
  }
}

}  // namespace
}  // namespace stillhouse
