#include "server/train/scorer.h"

#include <cmath>

#include "tests/server/train/tiny_fixture.h"

namespace stillhouse {
namespace {

class ScorerTest : public TinyModelTest {
 protected:
  // ln p of every answer token behind the document, from the plain logits of the whole text.
  std::vector<std::vector<double>> AllLogprobs(const std::vector<int32_t>& document, const Conversation& c) {
    std::vector<int32_t> text = document;
    text.insert(text.end(), c.prompt.begin(), c.prompt.end());
    text.insert(text.end(), c.answer.begin(), c.answer.end());
    SequenceState state({});
    Batch batch;
    batch.Add(&state, text, Batch::Outputs::kAll);
    const Tensor logits = Logits(ctx_, *model_.weights, Forward(ctx_, *model_.weights, batch).hidden);
    const std::vector<float> z = ctx_.ToFloats(logits);
    const size_t vocabulary = static_cast<size_t>(logits.dim(1));
    std::vector<std::vector<double>> out;
    for (size_t t = 0; t < c.answer.size(); ++t) {
      const float* row = z.data() + (document.size() + c.prompt.size() + t - 1) * vocabulary;
      double top = row[0], sum = 0.0;
      for (size_t v = 0; v < vocabulary; ++v) top = std::max<double>(top, row[v]);
      for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(row[v] - top);
      out.emplace_back();
      for (size_t v = 0; v < vocabulary; ++v) out.back().push_back(row[v] - top - std::log(sum));
    }
    return out;
  }
};

TEST_F(ScorerTest, NllIsThatOfTheWholeText) {
  const std::vector<int32_t> document = RandomTokens(41, 1);
  const std::shared_ptr<Memory> memory = Prefilled(document);
  const std::vector<Conversation> conversations = Conversations(5, 10);
  std::vector<const Conversation*> all;
  double nll = 0.0;
  int64_t tokens = 0;
  for (const Conversation& c : conversations) {
    all.push_back(&c);
    const auto logprobs = AllLogprobs(document, c);
    for (size_t t = 0; t < c.answer.size(); ++t) nll -= logprobs[t][static_cast<size_t>(c.answer[t])];
    tokens += static_cast<int64_t>(c.answer.size());
  }
  const AnswerScore score = ScoreAnswers(ctx_, *model_.weights, all, memory, false);
  EXPECT_EQ(score.tokens, tokens);
  EXPECT_NEAR(score.nll, nll, 1e-3 * nll);
  EXPECT_EQ(score.kl_tokens, 0);
}

TEST_F(ScorerTest, DivergenceFromTheTeacherItselfIsZero) {
  const std::shared_ptr<Memory> memory = Prefilled(RandomTokens(41, 1));
  std::vector<Conversation> conversations = Conversations(4, 20);
  std::vector<Conversation*> learners;
  std::vector<const Conversation*> all;
  for (Conversation& c : conversations) {
    learners.push_back(&c);
    all.push_back(&c);
  }
  TeachAnswers(ctx_, *model_.weights, learners, memory, 20);
  EXPECT_NEAR(ScoreAnswers(ctx_, *model_.weights, all, memory, true).mean_kl(), 0.0, 1e-4);
  // Behind another document it is what the formula says, in fp64.
  const std::vector<int32_t> other = RandomTokens(30, 99);
  double kl = 0.0;
  int64_t tokens = 0;
  for (const Conversation& c : conversations) {
    const auto student = AllLogprobs(other, c);
    for (size_t t = 0; t < c.answer.size(); ++t, ++tokens) {
      double q_rest = 1.0, p_rest = 1.0;
      for (int i = 0; i < 20; ++i) {
        const double lq = c.answer_teacher.logprobs[t * 20 + static_cast<size_t>(i)];
        const double lp = student[t][static_cast<size_t>(c.answer_teacher.ids[t * 20 + static_cast<size_t>(i)])];
        kl += std::exp(lq) * (lq - lp);
        q_rest -= std::exp(lq);
        p_rest -= std::exp(lp);
      }
      kl += q_rest * std::log(q_rest / p_rest);
    }
  }
  const AnswerScore score = ScoreAnswers(ctx_, *model_.weights, all, Prefilled(other), true);
  EXPECT_EQ(score.kl_tokens, tokens);
  EXPECT_GT(kl, 0.0);
  EXPECT_NEAR(score.kl, kl, 1e-2 * kl + 1e-3);
}

TEST_F(ScorerTest, QuestionsPreferTheMemoryThatBeginsThem) {
  // A repeated text is likelier behind its first half than behind another text.
  std::vector<int32_t> document;
  for (int i = 0; i < 6; ++i) {
    for (int32_t id : {40, 41, 42, 43, 44}) document.push_back(id);
  }
  Conversation c;
  c.prompt = {40, 41, 42, 43, 44, 40, 41};
  c.answer = {2};
  const std::vector<double> scores = ScoreQuestions(ctx_, *model_.weights, {&c, &c}, Prefilled(document));
  ASSERT_EQ(scores.size(), 2u);
  EXPECT_NEAR(scores[0], scores[1], 1e-5);
  EXPECT_LT(scores[0], 0.0);
}

}  // namespace
}  // namespace stillhouse
