#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "client/cli/build_flags.h"
#include "client/source.h"

namespace stillhouse::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(ParseQuestions, LinesCommentsAndBlanks) {
  const auto questions = ParseQuestions("# about the text\n\nWho?\r\n  What is it?  \n");
  ASSERT_TRUE(questions.ok());
  EXPECT_THAT(questions->questions, ElementsAre("Who?", "What is it?"));
  EXPECT_THAT(questions->answers, IsEmpty());
}

TEST(ParseQuestions, AnswersAfterATab) {
  const auto questions = ParseQuestions("Who?\tInga\nWhen?\t six\n");
  ASSERT_TRUE(questions.ok());
  EXPECT_THAT(questions->answers, ElementsAre("Inga", "six"));
}

TEST(ParseQuestions, AllAnswersOrNone) {
  EXPECT_THAT(std::string(ParseQuestions("Who?\tInga\nWhen?\n").status().message()), HasSubstr("line 2"));
  EXPECT_THAT(std::string(ParseQuestions("Who?\nWhen?\tsix\n").status().message()), HasSubstr("line 2"));
  EXPECT_FALSE(ParseQuestions("").ok());
  EXPECT_FALSE(ParseQuestions("# nothing\n").ok());
}

TEST(Questions, TheShippedOnesCanBeRead) {
  for (const char* name : {"apache-2.0.txt", "gpl-2.txt"}) {
    const auto questions = ReadQuestions(std::string(STILLHOUSE_SOURCE_DIR "/deploy/questions/") + name);
    ASSERT_TRUE(questions.ok()) << questions.status();
    EXPECT_GE(questions->questions.size(), 30u);
  }
}

v1::BuildCacheRequest Built(std::vector<std::string> arguments, absl::Status* status = nullptr) {
  CLI::App app;
  BuildFlags flags;
  flags.Declare(app);
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  v1::BuildCacheRequest request;
  const absl::Status filled = flags.Fill(request);
  if (status != nullptr) *status = filled;
  return request;
}

TEST(BuildFlags, UnsetStaysUnset) {
  const v1::BuildCacheRequest request = Built({});
  EXPECT_EQ(request.profile(), v1::QUICK);
  EXPECT_FALSE(request.has_self_study());
  EXPECT_FALSE(request.has_training());
  EXPECT_FALSE(request.has_attention_matching());
  EXPECT_FALSE(request.has_evaluation());
  EXPECT_FALSE(request.has_seed());
}

TEST(BuildFlags, ZeroIsAValue) {
  const v1::BuildCacheRequest request = Built({"--seed", "0", "--patience", "0", "--study-temperature", "0"});
  EXPECT_TRUE(request.has_seed());
  EXPECT_TRUE(request.training().has_early_stop_patience());
  EXPECT_TRUE(request.self_study().has_temperature());
}

TEST(BuildFlags, FillsTheRecipe) {
  const v1::BuildCacheRequest request =
      Built({"--profile", "standard", "--conversations", "12", "--seed-kinds", "question,use-case", "--start", "prefix",
             "--loss", "tail", "--steps", "7", "--max-training-tokens", "5000000000", "--no-fit-beta", "--no-report"});
  EXPECT_EQ(request.profile(), v1::STANDARD);
  EXPECT_EQ(request.self_study().conversations(), 12);
  EXPECT_THAT(request.self_study().seed_kinds(), ElementsAre(v1::QUESTION, v1::USE_CASE));
  EXPECT_EQ(request.training().start(), v1::PREFIX_START);
  EXPECT_EQ(request.training().loss_mode(), v1::TAIL);
  EXPECT_EQ(request.training().steps(), 7);
  EXPECT_EQ(request.training().max_training_tokens(), 5000000000);
  EXPECT_FALSE(request.attention_matching().fit_beta());
  EXPECT_TRUE(request.attention_matching().has_fit_beta());
  EXPECT_FALSE(request.attention_matching().has_fit_values());
  EXPECT_TRUE(request.evaluation().skip());
}

TEST(BuildFlags, RefusesUnknownWords) {
  absl::Status status;
  Built({"--profile", "fast"}, &status);
  EXPECT_THAT(std::string(status.message()), HasSubstr("quick, standard or thorough"));
  Built({"--seed-kinds", "poetry"}, &status);
  EXPECT_THAT(std::string(status.message()), HasSubstr("poetry"));
  EXPECT_THROW(Built({"--loss", "mse"}), CLI::ParseError);
  EXPECT_THROW(Built({"--steps", "many"}), CLI::ParseError);
}

TEST(BuildFlags, ReadsEvaluationQuestions) {
  const v1::BuildCacheRequest request =
      Built({"--eval-questions", STILLHOUSE_SOURCE_DIR "/deploy/questions/apache-2.0.txt"});
  EXPECT_THAT(request.evaluation().questions(), SizeIs(30));
  absl::Status status;
  Built({"--eval-questions", "/none"}, &status);
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace stillhouse::client
