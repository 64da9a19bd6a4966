// The quality report of a memory, on questions that it was never trained on.
#ifndef STILLHOUSE_SERVER_CORPUS_EVALUATOR_H_
#define STILLHOUSE_SERVER_CORPUS_EVALUATOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/corpus/teacher.h"
#include "server/train/scorer.h"

namespace stillhouse {

// Field for field the wire's QualityReport. NLL and KL are nats per answer token; KL is taken over the teacher's kept
// candidates and one bucket for all other tokens (train/scorer.h).
struct QualityReport {
  struct Row {
    std::string memory;  // "none", "full", "cache", "truncated"
    double mean_nll = 0.0;
    std::optional<double> mean_kl;
    int64_t kv_bytes = 0;
    std::optional<double> recovered;
  };
  std::vector<Row> rows;
  std::optional<double> recovered;
  std::optional<double> off_context_damage;
  int64_t questions = 0;
  int64_t answer_tokens = 0;
  std::string question_source;  // "uploaded", "held-out" or empty
  double build_seconds = 0.0;
  int64_t training_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t best_step = 0;
  int64_t last_step = 0;
  std::optional<double> break_even_queries;
};

std::string QualityReportToJson(const QualityReport& report);
absl::StatusOr<QualityReport> QualityReportFromJson(std::string_view json);

// Judges memories by how they predict the same answers.
class Evaluator {
 public:
  explicit Evaluator(const BuildRuntime* runtime) : runtime_(runtime) {}

  // The caller's questions with the given answers, or the full context's greedy ones, and the teacher's candidates.
  // Adds to `generated`. Conversations whose answer is empty are left out.
  absl::StatusOr<std::vector<Conversation>> PrepareUploaded(const std::vector<std::string>& questions,
                                                            const std::vector<std::string>& answers,
                                                            int64_t max_answer_tokens, Teacher* teacher,
                                                            int64_t* generated);

  // Fills rows, recovered, off_context_damage, questions and answer_tokens. `answers_are_greedy`: they are the full
  // context's own, so that its row follows from the kept candidates without another pass. `tick(fraction)` now and
  // then.
  absl::Status Judge(const std::vector<Conversation>& conversations, bool answers_are_greedy,
                     const std::shared_ptr<const Memory>& cache, Teacher* teacher,
                     const std::function<absl::Status(double)>& tick, QualityReport* report);

 private:
  absl::StatusOr<AnswerScore> Score(const std::vector<const Conversation*>& conversations,
                                    const std::shared_ptr<const Memory>& memory, bool with_kl);
  // What a conversation without the document begins with: the model's own system message.
  absl::StatusOr<std::shared_ptr<const Memory>> NoDocument();
  absl::StatusOr<std::vector<Conversation>> UnrelatedConversations();

  const BuildRuntime* runtime_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_EVALUATOR_H_
