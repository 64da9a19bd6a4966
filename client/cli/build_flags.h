#ifndef STILLHOUSE_CLIENT_CLI_BUILD_FLAGS_H_
#define STILLHOUSE_CLIENT_CLI_BUILD_FLAGS_H_

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "stillhouse/v1/caches.pb.h"

namespace stillhouse::client {

// The recipe's flags, shared by `cache build` and `eval`. What is not given stays unset in the request: the server's
// profile fills it in. The server checks every range.
class BuildFlags {
 public:
  // Declares the flags; this object must outlive the parse. Without `evaluation_file` the caller brings the evaluation
  // questions itself.
  void Declare(CLI::App& command, bool evaluation_file = true);
  // Writes what was given. Reads the question files.
  absl::Status Fill(v1::BuildCacheRequest& request) const;

 private:
  std::string profile_ = "quick";
  std::optional<uint64_t> seed_;
  // Self-study.
  std::optional<int32_t> conversations_, max_question_tokens_, max_answer_tokens_, min_chunk_tokens_, max_chunk_tokens_,
      top_logprobs_;
  std::optional<double> temperature_;
  std::vector<std::string> seed_kinds_;
  std::string questions_file_;
  // Training.
  std::string start_, loss_;
  std::optional<double> learning_rate_, clip_norm_, validation_fraction_, weight_decay_;
  std::optional<int32_t> rows_per_step_, row_tokens_, steps_, frozen_slots_, patience_, evaluate_every_;
  std::optional<int64_t> max_training_tokens_;
  bool train_beta_ = false, train_on_question_ = false;
  // Attention matching.
  std::optional<int32_t> queries_;
  std::optional<double> ridge_;
  bool no_beta_ = false, no_values_ = false;
  // Evaluation.
  std::string evaluation_file_;
  std::optional<int32_t> evaluation_answer_tokens_;
  bool no_report_ = false;
};

// A question per line; after a tab, its reference answer. Empty lines and lines that start with # are left out. All
// lines have an answer or none has.
struct Questions {
  std::vector<std::string> questions;
  std::vector<std::string> answers;
};
absl::StatusOr<Questions> ReadQuestions(const std::string& path);
absl::StatusOr<Questions> ParseQuestions(absl::string_view text);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_BUILD_FLAGS_H_
