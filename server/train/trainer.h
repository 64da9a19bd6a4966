// Trains a memory: gradient descent on its keys and values (and biases) so that the frozen model, answering behind it,
// says what it said with the whole document in view (Cartridges; Eyuboglu et al. 2025).
#ifndef STILLHOUSE_SERVER_TRAIN_TRAINER_H_
#define STILLHOUSE_SERVER_TRAIN_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/train/distill_batch.h"

namespace stillhouse {

enum class TrainingLoss : uint8_t { kRenormalised, kRaw, kTail, kCrossEntropy };

struct TrainerOptions {
  double learning_rate = 1e-2;
  // Each layer's keys, and its values, learn at the rate times their root mean square in the start memory over the mean
  // of all layers: values grow fortyfold from the first layer to the last, and one rate for all wrecks the early ones.
  bool relative_learning_rate = true;
  double beta_learning_rate = 0.0;  // of the biases; 0: as the others
  double warmup_fraction = 0.05;    // of the steps, linear; then a cosine to zero
  int64_t rows_per_step = 2;        // conversations behind one optimiser step
  int64_t row_tokens = 1024;        // longer conversations lose the end of their answer
  int64_t steps = 170;
  int64_t max_training_tokens = 30000;
  int64_t frozen_slots = 1;  // the first slots never change: the attention sink
  bool train_beta = false;
  TrainingLoss loss = TrainingLoss::kRenormalised;
  bool train_on_question = false;
  double clip_norm = 0.0;           // of the gradient over everything trained; 0: never
  int64_t early_stop_patience = 0;  // evaluations without improvement; 0: never
  int64_t evaluate_every = 0;       // steps; 0: only before the first and after the last
  double weight_decay = 0.0;
  double beta1 = 0.9, beta2 = 0.99;
  uint64_t seed = 0;
  int64_t task_rows = 256;         // rows of one Advance; larger steps are summed over several
  int64_t checkpoint_rows = 2048;  // batches above this recompute layers in the backward pass
};

// Deterministic: the same start, conversations, options and backend give the same bits, also through Save and Restore.
// One thread at a time, and always the one that may use the context's backend. Conversations are kept by value.
//
// The start is evaluated too, so the result is never worse on the held-out conversations than where it began.
class CartridgeTrainer {
 public:
  // INVALID_ARGUMENT if there is nothing to train (slots ≤ frozen_slots) or to train on, or if a loss needs candidates
  // that the conversations lack.
  static absl::StatusOr<std::unique_ptr<CartridgeTrainer>> Create(const Context& ctx,
                                                                  std::shared_ptr<const Weights> weights,
                                                                  const Memory& start, const TrainerOptions& options,
                                                                  std::vector<Conversation> training,
                                                                  std::vector<Conversation> held_out);
  ~CartridgeTrainer();

  // Does the next piece of work: some of a step's conversations, or of an evaluation. FAILED_PRECONDITION if training
  // diverges before any evaluation was better than the start; later divergence ends training with the best so far.
  absl::Status Advance(const Context& ctx);
  bool done() const { return phase_ == Phase::kDone; }

  int64_t planned_steps() const { return planned_steps_; }  // what the token budget allows of options.steps
  int64_t step() const { return step_; }
  int64_t best_step() const { return best_step_; }
  double last_loss() const { return last_loss_; }    // of the last step; NaN before
  double start_loss() const { return start_loss_; }  // held-out, before the first step
  double best_loss() const { return best_loss_; }    // held-out
  int64_t trained_tokens() const { return trained_tokens_; }
  int64_t planned_tokens() const { return planned_tokens_; }
  // Rows of forward passes still to come, evaluations included: for estimates of the time left.
  double rows_done_fraction() const;

  // A copy of the best memory, in storage of its own.
  std::shared_ptr<Memory> Best(const Context& ctx) const;

  // Everything that training needs to go on, without the conversations. A step in progress is begun again.
  std::string Save(const Context& ctx) const;
  // DATA_LOSS if the bytes do not fit this trainer.
  absl::Status Restore(const Context& ctx, std::string_view bytes);

  // What a trainer and its result take, in memories of so many slots: what it starts from, the values, the best ones,
  // both moments, the gradient, a task's own gradient, and a copy of the best.
  static constexpr int64_t kMemories = 8;

 private:
  enum class Phase : uint8_t { kEvaluate, kStep, kDone };
  // Values of the trained tensors: [layers, kv_heads, slots, head_dim] twice, [layers, kv_heads, slots] or empty.
  struct Values {
    Tensor k, v, beta;
  };

  CartridgeTrainer() = default;
  Values MakeValues(const Context& ctx) const;
  Tensor Trained(const Tensor& t) const;  // without the frozen slots
  void Prepare();
  std::vector<const Conversation*> StepConversations(int64_t step);
  double LearningRate(int64_t step) const;
  absl::Status RunStepPiece(const Context& ctx);
  absl::Status FinishStep(const Context& ctx);
  absl::Status RunEvaluationPiece(const Context& ctx);
  absl::Status FinishEvaluation(const Context& ctx);
  // Mean loss over the batch's rows; with a tape in ctx it may be differentiated.
  Tensor Loss(const Context& ctx, const DistillBatch& batch, const Tensor& hidden) const;
  Supervise supervise() const {
    return options_.train_on_question ? Supervise::kAnswerAndQuestion : Supervise::kAnswer;
  }
  int64_t SupervisedRows(const Conversation& c) const;

  std::shared_ptr<const Weights> weights_;
  TrainerOptions options_;
  std::vector<Conversation> training_, held_out_;
  int64_t epoch_ = -1;          // whose order the next line has
  std::vector<int64_t> order_;  // of training_
  int64_t slots_ = 0, next_position_ = 0, frozen_ = 0;
  std::string label_;

  std::vector<float> k_scale_, v_scale_;  // of the learning rate, per layer
  Values current_, best_, m_, v_;         // moments leave out the frozen slots
  std::shared_ptr<const Memory> memory_;  // views of current_
  Phase phase_ = Phase::kEvaluate;
  int64_t step_ = 0, planned_steps_ = 0;
  int64_t best_step_ = 0, evaluations_without_gain_ = 0;
  double last_loss_ = 0.0, start_loss_ = 0.0, best_loss_ = 0.0;
  int64_t trained_tokens_ = 0, planned_tokens_ = 0;
  double rows_done_ = 0.0, rows_planned_ = 0.0;

  // The step or evaluation in progress.
  std::vector<std::vector<const Conversation*>> groups_;
  size_t group_ = 0;
  int64_t group_rows_total_ = 0;                   // supervised
  double loss_sum_ = 0.0;                          // Σ loss·rows
  std::vector<std::pair<Tensor, double>> losses_;  // of the step's groups, with their shares, not yet read
  Values gradient_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TRAIN_TRAINER_H_
