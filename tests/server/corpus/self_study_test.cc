#include "server/corpus/self_study.h"

#include <gmock/gmock.h>

#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

using ::testing::Eq;
using ::testing::Optional;

TEST(CleanQuestion, CutsAndTrims) {
  EXPECT_THAT(CleanQuestion("  What is the mill? It is a house."), Optional(Eq("What is the mill?")));
  EXPECT_THAT(CleanQuestion("List the barrels\nand more?"), Optional(Eq("List the barrels")));
  EXPECT_THAT(CleanQuestion("Who was \xc3?"), Optional(Eq("Who was \xef\xbf\xbd?")));
  EXPECT_THAT(CleanQuestion("What?"), Eq(std::nullopt));
  EXPECT_THAT(CleanQuestion(""), Eq(std::nullopt));
  EXPECT_THAT(CleanQuestion(" \n "), Eq(std::nullopt));
  EXPECT_THAT(CleanQuestion(std::string(500, 'x')), Eq(std::nullopt));
}

TEST(QuestionKey, IgnoresCaseSpaceAndPunctuation) {
  EXPECT_EQ(QuestionKey("What is the Mill?"), QuestionKey("what is  the mill"));
  EXPECT_NE(QuestionKey("What is the mill?"), QuestionKey("What is the hill?"));
  EXPECT_NE(QuestionKey("Wo ist Köln?"), QuestionKey("Wo ist Kln?"));
}

class SelfStudyTest : public CorpusTest {
 protected:
  SelfStudyTest() : spec_(SmallSpec(BuildMethod::kCartridge, "c", "k").self_study) { Prepare(StoryOf(120), 128); }

  void Prepare(const std::string& text, int64_t reserve) {
    runtime_.engine = rig_->engine.get();
    runtime_.tokenizer = rig_->model.tokenizer.get();
    runtime_.chat = rig_->model.chat.get();
    runtime_.tenant = "acme";
    runtime_.check = [this] { return checks_ < 0 || checks_-- > 0 ? absl::OkStatus() : absl::CancelledError("stop"); };
    document_ = TokeniseDocument(*rig_->model.tokenizer, *rig_->model.chat, text);
    auto teacher = Teacher::Create(&runtime_, &document_, reserve);
    ASSERT_TRUE(teacher.ok()) << teacher.status();
    teacher_ = *std::move(teacher);
  }

  absl::Status Run(SelfStudyState* state, std::function<absl::Status(double)> tick = nullptr) {
    if (!tick) tick = [](double) { return absl::OkStatus(); };
    return RunSelfStudy(runtime_, spec_, teach_questions_, 5, teacher_.get(), tick, state);
  }

  SelfStudySpec spec_;
  bool teach_questions_ = false;
  int64_t checks_ = -1;
  BuildRuntime runtime_;
  Document document_;
  std::unique_ptr<Teacher> teacher_;
};

TEST_F(SelfStudyTest, MakesDistinctAnsweredConversations) {
  SelfStudyState state;
  std::vector<double> ticks;
  ASSERT_TRUE(Run(&state, [&](double f) {
                ticks.push_back(f);
                return absl::OkStatus();
              }).ok());
  EXPECT_TRUE(state.answers_done);
  EXPECT_GE(state.generated.size(), 5u);
  EXPECT_LE(state.generated.size(), 10u);
  std::set<std::vector<int32_t>> prompts;
  for (const Conversation& c : state.generated) {
    EXPECT_TRUE(prompts.insert(c.prompt).second);
    EXPECT_LE(c.answer.size(), 6u);
    EXPECT_EQ(c.answer_teacher.width, 20);
    ASSERT_EQ(c.answer_teacher.ids.size(), c.answer.size() * 20);
    for (size_t t = 0; t < c.answer.size(); ++t) {
      // Greedy: the answer is the best candidate, and candidates descend.
      EXPECT_EQ(c.answer[t], c.answer_teacher.ids[t * 20]);
      EXPECT_GE(c.answer_teacher.logprobs[t * 20], c.answer_teacher.logprobs[t * 20 + 1]);
    }
  }
  EXPECT_GT(state.generated_tokens, 0);
  EXPECT_DOUBLE_EQ(ticks.back(), 1.0);
  EXPECT_TRUE(std::is_sorted(ticks.begin(), ticks.end()));
}

TEST_F(SelfStudyTest, AnswersAreThoseBehindTheWindow) {
  SelfStudyState state;
  ASSERT_TRUE(Run(&state).ok());
  const Conversation& c = state.generated.front();
  // The same greedy tokens from one plain pass over window, question and answer.
  std::vector<int32_t> text = document_.Framed(teacher_->windows()[static_cast<size_t>(c.window)]);
  const size_t offset = text.size() + c.prompt.size();
  text.insert(text.end(), c.prompt.begin(), c.prompt.end());
  text.insert(text.end(), c.answer.begin(), c.answer.end());
  std::vector<float> logits;
  const int64_t vocabulary = rig_->model.weights->config.vocabulary;
  ASSERT_TRUE(runtime_
                  .Run([&](const Context& ctx) {
                    SequenceState plain({});
                    Batch batch;
                    batch.Add(&plain, text, Batch::Outputs::kAll);
                    logits = ctx.ToFloats(
                        Logits(ctx, *rig_->model.weights, Forward(ctx, *rig_->model.weights, batch).hidden));
                    return absl::OkStatus();
                  })
                  .ok());
  for (size_t t = 0; t < c.answer.size(); ++t) {
    const float* row = logits.data() + static_cast<int64_t>(offset + t - 1) * vocabulary;
    const int64_t best = std::max_element(row, row + rig_->model.tokenizer->vocab_size()) - row;
    EXPECT_EQ(best, c.answer[t]) << t << ": " << row[best] << " and " << row[c.answer[t]];
  }
}

TEST_F(SelfStudyTest, GivenQuestionsAreAskedToo) {
  spec_.questions = {"Where did the grain go?", "How many barrels were there?"};
  teach_questions_ = true;
  SelfStudyState state;
  ASSERT_TRUE(Run(&state).ok());
  ASSERT_EQ(state.given.size(), 2u);
  EXPECT_EQ(state.given[0].prompt, *QuestionPrompt(*rig_->model.chat, spec_.questions[0]));
  for (const std::vector<Conversation>* set : {&state.generated, &state.given}) {
    for (const Conversation& c : *set) EXPECT_EQ(c.prompt_teacher.ids.size(), (c.prompt.size() - 1) * 20);
  }
}

TEST_F(SelfStudyTest, GoesOnFromItsBytesWherever) {
  SelfStudyState whole;
  ASSERT_TRUE(Run(&whole).ok());
  for (int64_t checks : {1, 4, 8, 12, 20, 30}) {
    checks_ = checks;
    SelfStudyState first;
    std::string saved;
    const absl::Status status = Run(&first, [&](double) {
      ByteWriter out;
      first.AppendTo(&out);
      saved = out.Take();
      return absl::OkStatus();
    });
    checks_ = -1;
    SelfStudyState second;
    if (!saved.empty()) {
      ByteReader in(saved);
      ASSERT_TRUE(second.ReadFrom(&in).ok());
      EXPECT_TRUE(in.empty());
    }
    ASSERT_TRUE(Run(&second).ok());
    ASSERT_EQ(second.generated.size(), whole.generated.size()) << checks << " " << status;
    for (size_t i = 0; i < whole.generated.size(); ++i) {
      EXPECT_EQ(second.generated[i].prompt, whole.generated[i].prompt);
      EXPECT_EQ(second.generated[i].answer, whole.generated[i].answer);
    }
  }
}

TEST_F(SelfStudyTest, StopsCleanlyWhenCancelled) {
  checks_ = 3;
  SelfStudyState state;
  EXPECT_EQ(Run(&state).code(), absl::StatusCode::kCancelled);
  // Nothing is left behind in the engine.
  const EngineStats stats = rig_->engine->stats();
  EXPECT_EQ(stats.background_running + stats.background_waiting, 0);
  EXPECT_EQ(stats.pages_free, stats.pages_total);
}

TEST_F(SelfStudyTest, LongDocumentsAreAskedAboutInEveryWindow) {
  Prepare(StoryOf(700), 128);
  ASSERT_GE(teacher_->window_count(), 2);
  spec_.conversations = 16;
  SelfStudyState state;
  ASSERT_TRUE(Run(&state).ok());
  std::set<int32_t> windows;
  for (const Conversation& c : state.generated) windows.insert(c.window);
  EXPECT_EQ(static_cast<int64_t>(windows.size()), teacher_->window_count());
}

TEST_F(SelfStudyTest, OneTokenIsEnough) {
  Prepare("a", 128);
  SelfStudyState state;
  ASSERT_TRUE(Run(&state).ok());
  EXPECT_FALSE(state.generated.empty());
}

TEST_F(SelfStudyTest, AQuestionThatDoesNotFitIsNamed) {
  spec_.questions = {std::string(2000, 'x')};
  SelfStudyState state;
  EXPECT_EQ(Run(&state).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stillhouse
