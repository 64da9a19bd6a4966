// How well a memory predicts the teacher's answers.
#ifndef STILLHOUSE_SERVER_TRAIN_SCORER_H_
#define STILLHOUSE_SERVER_TRAIN_SCORER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/train/distill_batch.h"

namespace stillhouse {

// Sums over answer tokens; they add up over batches.
struct AnswerScore {
  int64_t tokens = 0;
  double nll = 0.0;  // −Σ ln p(token), nats
  // Σ KL(teacher ‖ memory), nats, over the teacher's kept candidates and one bucket for all other tokens: a lower bound
  // of the divergence over the whole vocabulary, ≥ 0. Zero tokens: no teacher was kept.
  int64_t kl_tokens = 0;
  double kl = 0.0;

  void Add(const AnswerScore& other);
  double mean_nll() const { return tokens > 0 ? nll / static_cast<double>(tokens) : 0.0; }
  double mean_kl() const { return kl_tokens > 0 ? kl / static_cast<double>(kl_tokens) : 0.0; }
};

// One forward pass.
AnswerScore ScoreAnswers(const Context& ctx, const Weights& weights,
                         const std::vector<const Conversation*>& conversations,
                         const std::shared_ptr<const Memory>& memory, bool with_kl);

// Mean log-probability of each conversation's question (its tokens after the first): which memory a question is about.
std::vector<double> ScoreQuestions(const Context& ctx, const Weights& weights,
                                   const std::vector<const Conversation*>& conversations,
                                   const std::shared_ptr<const Memory>& memory);

// Fills prompt_teacher (question) or answer_teacher from the model's own view behind `memory`, k best each.
void TeachQuestions(const Context& ctx, const Weights& weights, const std::vector<Conversation*>& conversations,
                    const std::shared_ptr<const Memory>& memory, int64_t k);
void TeachAnswers(const Context& ctx, const Weights& weights, const std::vector<Conversation*>& conversations,
                  const std::shared_ptr<const Memory>& memory, int64_t k);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TRAIN_SCORER_H_
