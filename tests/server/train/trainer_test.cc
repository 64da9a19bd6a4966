#include "server/train/trainer.h"

#include <cmath>

#include "server/train/scorer.h"
#include "tests/server/train/tiny_fixture.h"

namespace stillhouse {
namespace {

class TrainerTest : public TinyModelTest {
 protected:
  TrainerTest() {
    teacher_ = Prefilled(RandomTokens(120, 1));
    start_ = SliceMemory(ctx_, *teacher_, 0, 12, 12);
    training_ = Taught(Conversations(14, 100));
    held_out_ = Taught(Conversations(4, 900));
    options_.steps = 12;
    options_.rows_per_step = 3;
    options_.max_training_tokens = 0;
    options_.evaluate_every = 4;
    options_.learning_rate = 2e-2;
  }

  std::vector<Conversation> Taught(std::vector<Conversation> conversations) {
    std::vector<Conversation*> learners;
    for (Conversation& c : conversations) learners.push_back(&c);
    TeachAnswers(ctx_, *model_.weights, learners, teacher_, 20);
    TeachQuestions(ctx_, *model_.weights, learners, teacher_, 20);
    return conversations;
  }

  std::unique_ptr<CartridgeTrainer> Make() {
    auto trainer = CartridgeTrainer::Create(ctx_, model_.weights, *start_, options_, training_, held_out_);
    STILLHOUSE_CHECK(trainer.ok()) << trainer.status().ToString();
    return *std::move(trainer);
  }

  void RunToEnd(CartridgeTrainer* trainer) {
    while (!trainer->done()) ASSERT_TRUE(trainer->Advance(ctx_).ok());
  }

  std::vector<float> Values(const Memory& memory) {
    std::vector<float> all;
    for (const LayerKv& kv : memory.layers) {
      for (const Tensor* t : {&kv.k, &kv.v, &kv.beta}) {
        if (!t->defined()) continue;
        const std::vector<float> values = ctx_.ToFloats(*t);
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  }

  double HeldOutLoss(const std::shared_ptr<const Memory>& memory) {
    std::vector<const Conversation*> all;
    for (const Conversation& c : held_out_) all.push_back(&c);
    return ScoreAnswers(ctx_, *model_.weights, all, memory, true).mean_kl();
  }

  std::shared_ptr<Memory> teacher_, start_;
  std::vector<Conversation> training_, held_out_;
  TrainerOptions options_;
};

TEST_F(TrainerTest, LearnsWhatTheTeacherSays) {
  options_.steps = 60;
  options_.learning_rate = 5e-2;
  auto trainer = Make();
  RunToEnd(trainer.get());
  EXPECT_EQ(trainer->step(), 60);
  EXPECT_LT(trainer->best_loss(), trainer->start_loss());
  // On what it was trained on it comes much nearer to the teacher; held out, never worse.
  std::vector<const Conversation*> all;
  for (const Conversation& c : training_) all.push_back(&c);
  const double before = ScoreAnswers(ctx_, *model_.weights, all, start_, true).mean_kl();
  const double after = ScoreAnswers(ctx_, *model_.weights, all, trainer->Best(ctx_), true).mean_kl();
  EXPECT_LT(after, 0.7 * before);
  EXPECT_LT(HeldOutLoss(trainer->Best(ctx_)), HeldOutLoss(start_));
}

TEST_F(TrainerTest, FrozenSlotsNeverChange) {
  options_.frozen_slots = 3;
  auto trainer = Make();
  RunToEnd(trainer.get());
  const std::shared_ptr<Memory> best = trainer->Best(ctx_);
  for (size_t l = 0; l < best->layers.size(); ++l) {
    for (const auto& [now, then] : {std::pair<Tensor, Tensor>{best->layers[l].k, start_->layers[l].k},
                                    {best->layers[l].v, start_->layers[l].v}}) {
      EXPECT_EQ(ctx_.ToFloats(now.Slice(1, 0, 3)), ctx_.ToFloats(then.Slice(1, 0, 3)));
      EXPECT_NE(ctx_.ToFloats(now.Slice(1, 3, 12)), ctx_.ToFloats(then.Slice(1, 3, 12)));
    }
  }
}

TEST_F(TrainerTest, SameSeedSameBits) {
  auto a = Make(), b = Make();
  RunToEnd(a.get());
  RunToEnd(b.get());
  EXPECT_EQ(Values(*a->Best(ctx_)), Values(*b->Best(ctx_)));
  options_.seed = 1;
  auto c = Make();
  RunToEnd(c.get());
  EXPECT_NE(Values(*a->Best(ctx_)), Values(*c->Best(ctx_)));
}

TEST_F(TrainerTest, RestoredAnywhereItEndsWithTheSameBits) {
  options_.task_rows = 16;  // several pieces to a step
  options_.train_beta = true;
  auto whole = Make();
  RunToEnd(whole.get());
  const std::vector<float> expected = Values(*whole->Best(ctx_));
  int pieces = 0;
  for (auto count = Make(); !count->done(); ++pieces) ASSERT_TRUE(count->Advance(ctx_).ok());
  ASSERT_GT(pieces, 30);
  for (int stop : {0, 1, 2, 5, 9, 17, pieces / 2, pieces - 1, pieces}) {
    auto first = Make();
    for (int i = 0; i < stop; ++i) ASSERT_TRUE(first->Advance(ctx_).ok());
    const std::string saved = first->Save(ctx_);
    auto second = Make();
    ASSERT_TRUE(second->Restore(ctx_, saved).ok());
    RunToEnd(second.get());
    EXPECT_EQ(Values(*second->Best(ctx_)), expected) << "stopped after " << stop;
    EXPECT_EQ(second->best_step(), whole->best_step());
    EXPECT_EQ(second->trained_tokens(), whole->trained_tokens());
  }
}

TEST_F(TrainerTest, RefusesForeignCheckpoints) {
  auto trainer = Make();
  const std::string saved = trainer->Save(ctx_);
  for (size_t size : {size_t{0}, size_t{7}, size_t{40}, saved.size() / 2, saved.size() - 1}) {
    EXPECT_EQ(Make()->Restore(ctx_, saved.substr(0, size)).code(), absl::StatusCode::kDataLoss) << size;
  }
  options_.steps = 5;
  EXPECT_EQ(Make()->Restore(ctx_, saved).code(), absl::StatusCode::kDataLoss);
}

TEST_F(TrainerTest, PiecesOfAStepAddUpToIt) {
  // One step with everything in one pass against many small passes: the same up to rounding.
  options_.steps = 1;
  options_.rows_per_step = 14;
  options_.evaluate_every = 0;
  held_out_.clear();
  auto one = Make();
  RunToEnd(one.get());
  options_.task_rows = 8;
  auto many = Make();
  RunToEnd(many.get());
  EXPECT_NEAR(one->last_loss(), many->last_loss(), 1e-4);
  const std::vector<float> a = Values(*one->Best(ctx_)), b = Values(*many->Best(ctx_)), start = Values(*start_);
  double apart = 0.0, moved = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    apart += std::pow(a[i] - b[i], 2);
    moved += std::pow(a[i] - start[i], 2);
  }
  EXPECT_GT(moved, 0.0);
  EXPECT_LT(apart, 1e-2 * moved);  // Adam's first step is the sign of the gradient: tiny ones may turn
}

TEST_F(TrainerTest, TheTokenBudgetPlansTheSteps) {
  options_.max_training_tokens = 100;
  auto trainer = Make();
  EXPECT_LE(trainer->planned_tokens(), 100);
  EXPECT_LT(trainer->planned_steps(), 12);
  RunToEnd(trainer.get());
  EXPECT_EQ(trainer->trained_tokens(), trainer->planned_tokens());
  options_.max_training_tokens = 5;
  EXPECT_EQ(CartridgeTrainer::Create(ctx_, model_.weights, *start_, options_, training_, held_out_).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(TrainerTest, StopsEarlyAndKeepsTheBest) {
  options_.steps = 200;
  options_.learning_rate = 1.0;  // far too much: it only gets worse
  options_.evaluate_every = 1;
  options_.early_stop_patience = 3;
  auto trainer = Make();
  RunToEnd(trainer.get());
  EXPECT_LT(trainer->step(), 200);
  EXPECT_LE(HeldOutLoss(trainer->Best(ctx_)), HeldOutLoss(start_) + 1e-6);
}

TEST_F(TrainerTest, EveryLossLearns) {
  for (TrainingLoss loss :
       {TrainingLoss::kRenormalised, TrainingLoss::kRaw, TrainingLoss::kTail, TrainingLoss::kCrossEntropy}) {
    for (bool questions : {false, true}) {
      options_.loss = loss;
      options_.train_on_question = questions;
      options_.steps = 30;
      options_.rows_per_step = 14;
      held_out_ = training_;
      auto trainer = Make();
      RunToEnd(trainer.get());
      EXPECT_LT(trainer->best_loss(), trainer->start_loss()) << static_cast<int>(loss) << questions;
    }
  }
}

TEST_F(TrainerTest, LongAnswersAreCutAndHopelessInputRefused) {
  options_.row_tokens = 5;
  auto trainer = Make();
  RunToEnd(trainer.get());
  options_.frozen_slots = 12;
  EXPECT_FALSE(CartridgeTrainer::Create(ctx_, model_.weights, *start_, options_, training_, held_out_).ok());
  options_.frozen_slots = 1;
  EXPECT_FALSE(CartridgeTrainer::Create(ctx_, model_.weights, *start_, options_, {}, held_out_).ok());
  EXPECT_FALSE(CartridgeTrainer::Create(ctx_, model_.weights, *start_, options_, Conversations(3, 1), held_out_).ok());
}

TEST_F(TrainerTest, ClippingBoundsNothingButTheGradient) {
  options_.clip_norm = 1e-3;
  auto trainer = Make();
  RunToEnd(trainer.get());
  EXPECT_LT(trainer->best_loss(), trainer->start_loss());
}

}  // namespace
}  // namespace stillhouse
