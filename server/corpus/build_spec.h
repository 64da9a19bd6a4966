// Everything that decides a build: filled with defaults, stored with the operation, and written to the artifact's
// provenance.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILD_SPEC_H_
#define STILLHOUSE_SERVER_CORPUS_BUILD_SPEC_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops/loss.h"

namespace stillhouse {

enum class BuildMethod : uint8_t { kCartridge, kAttentionMatching, kFull };
enum class BuildProfile : uint8_t { kQuick, kStandard, kThorough };
enum class StartMethod : uint8_t { kAttentionMatching, kPrefix };
enum class SeedKind : uint8_t { kStructuring, kSummarisation, kQuestion, kUseCase, kCreative };
enum class LossKind : uint8_t { kRenormalised, kRaw, kTail, kCrossEntropy };

const char* BuildMethodName(BuildMethod method);  // "CARTRIDGE", as in artifacts and metrics

struct SelfStudySpec {
  int64_t conversations = 0;
  int64_t max_question_tokens = 0;
  int64_t max_answer_tokens = 0;
  double temperature = 0.0;
  std::vector<SeedKind> seed_kinds;
  int64_t min_chunk_tokens = 0, max_chunk_tokens = 0;
  int64_t top_logprobs = 20;
  std::vector<std::string> questions;  // the user's own, trained on
};

struct TrainingSpec {
  StartMethod start = StartMethod::kAttentionMatching;
  double learning_rate = 0.0;
  // Each layer's keys and values learn at learning_rate times their own root mean square over the mean of all layers.
  bool relative_learning_rate = true;
  double warmup_fraction = 0.05;
  int64_t rows_per_step = 0;
  int64_t row_tokens = 0;
  int64_t steps = 0;
  int64_t max_training_tokens = 0;
  int64_t frozen_slots = 1;
  bool train_beta = false;
  LossKind loss = LossKind::kRenormalised;
  bool train_on_question = false;
  double clip_norm = 0.0;  // 0: never
  double validation_fraction = 0.1;
  int64_t early_stop_patience = 5;  // 0: never
  int64_t evaluate_every = 0;
  double weight_decay = 0.0;
  double beta1 = 0.9, beta2 = 0.99;
};

struct AttentionMatchingSpec {
  int64_t queries = 0;
  double ridge = 1e-3;
  bool fit_beta = true;
  bool fit_values = true;
};

struct EvaluationSpec {
  std::vector<std::string> questions;  // empty: held-out self-study conversations
  std::vector<std::string> answers;    // empty, or one per question
  bool skip = false;
  int64_t max_answer_tokens = 64;
};

struct BuildSpec {
  std::string tenant, corpus_id, cache_id, display_name;
  BuildMethod method = BuildMethod::kCartridge;
  BuildProfile profile = BuildProfile::kQuick;
  // One of them is set: slots, or corpus tokens per slot.
  int64_t slots = 0;
  double compression_ratio = 0.0;
  bool replace = false;  // an existing cache of this id is replaced when the new one is done
  std::string expected_etag;
  uint64_t seed = 0;
  SelfStudySpec self_study;
  TrainingSpec training;
  AttentionMatchingSpec matching;
  EvaluationSpec evaluation;
};

// The profile's values for every field that has one. Callers then overwrite what their request sets.
BuildSpec DefaultBuildSpec(BuildMethod method, BuildProfile profile);
// INVALID_ARGUMENT names the field, its value and its range.
absl::Status ValidateBuildSpec(const BuildSpec& spec);

// For the operation's row and the artifact's provenance. Parsing refuses unknown or malformed fields.
std::string BuildSpecToJson(const BuildSpec& spec);
absl::StatusOr<BuildSpec> BuildSpecFromJson(std::string_view json);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILD_SPEC_H_
