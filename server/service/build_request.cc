#include "server/service/build_request.h"

#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/service/validation.h"
#include "server/tenancy/reason.h"
#include "stillhouse/v1/caches.pb.h"

namespace stillhouse {
namespace {

constexpr int kMaxSeedKinds = 1000;
constexpr int kMaxQuestions = 10000;
constexpr int kMaxEvaluationQuestions = 1000;
constexpr size_t kMaxQuestionBytes = 4096;
constexpr size_t kMaxAnswerBytes = 64 << 10;

absl::StatusOr<BuildMethod> ParseMethod(v1::Method method) {
  switch (method) {
    case v1::METHOD_UNSPECIFIED:
    case v1::CARTRIDGE:
      return BuildMethod::kCartridge;
    case v1::ATTENTION_MATCHING:
      return BuildMethod::kAttentionMatching;
    case v1::FULL:
      return BuildMethod::kFull;
    case v1::STILL:
    case v1::SINK_WINDOW:
    case v1::L2:
    case v1::SNAPKV:
    case v1::H2O:
      return WithReason(absl::UnimplementedError(StrCat("this server cannot build ", v1::Method_Name(method),
                                                        " caches; use CARTRIDGE, ATTENTION_MATCHING or FULL")),
                        "METHOD_NOT_SUPPORTED", {{"method", v1::Method_Name(method)}});
    default:
      return BadField("method", StrCat("has the unknown value ", static_cast<int>(method)));
  }
}

absl::StatusOr<BuildProfile> ParseProfile(v1::Profile profile) {
  switch (profile) {
    case v1::PROFILE_UNSPECIFIED:
    case v1::QUICK:
      return BuildProfile::kQuick;
    case v1::STANDARD:
      return BuildProfile::kStandard;
    case v1::THOROUGH:
      return BuildProfile::kThorough;
    default:
      return BadField("profile", StrCat("has the unknown value ", static_cast<int>(profile)));
  }
}

absl::StatusOr<SeedKind> ParseSeedKind(int kind) {
  switch (kind) {
    case v1::STRUCTURING:
      return SeedKind::kStructuring;
    case v1::SUMMARISATION:
      return SeedKind::kSummarisation;
    case v1::QUESTION:
      return SeedKind::kQuestion;
    case v1::USE_CASE:
      return SeedKind::kUseCase;
    case v1::CREATIVE:
      return SeedKind::kCreative;
    default:
      return BadField("self_study.seed_kinds", StrCat("holds the unknown value ", kind));
  }
}

template <typename Strings>
absl::Status CopyTexts(std::string_view field, const Strings& texts, int max_count, size_t max_bytes,
                       std::vector<std::string>* out) {
  if (texts.size() > max_count) {
    return BadField(field, StrCat("has ", texts.size(), " entries; at most ", max_count, " are allowed"));
  }
  for (const std::string& text : texts) {
    if (text.empty()) return BadField(field, "holds an empty text");
    STILLHOUSE_RETURN_IF_ERROR(CheckTextField(field, text, max_bytes));
    out->push_back(text);
  }
  return absl::OkStatus();
}

absl::Status ParseSelfStudy(const v1::SelfStudyOptions& in, SelfStudySpec* out) {
  if (in.has_conversations()) out->conversations = in.conversations();
  if (in.has_max_question_tokens()) out->max_question_tokens = in.max_question_tokens();
  if (in.has_max_answer_tokens()) out->max_answer_tokens = in.max_answer_tokens();
  if (in.has_temperature()) out->temperature = in.temperature();
  if (in.has_min_chunk_tokens()) out->min_chunk_tokens = in.min_chunk_tokens();
  if (in.has_max_chunk_tokens()) out->max_chunk_tokens = in.max_chunk_tokens();
  if (in.has_top_logprobs()) out->top_logprobs = in.top_logprobs();
  if (in.seed_kinds_size() > kMaxSeedKinds) {
    return BadField("self_study.seed_kinds", StrCat("has ", in.seed_kinds_size(), " entries; at most ", kMaxSeedKinds));
  }
  if (in.seed_kinds_size() > 0) {
    out->seed_kinds.clear();
    for (int kind : in.seed_kinds()) {
      STILLHOUSE_ASSIGN_OR_RETURN(const SeedKind parsed, ParseSeedKind(kind));
      out->seed_kinds.push_back(parsed);
    }
  }
  return CopyTexts("self_study.questions", in.questions(), kMaxQuestions, kMaxQuestionBytes, &out->questions);
}

absl::Status ParseTraining(const v1::TrainingOptions& in, TrainingSpec* out) {
  if (in.has_start()) {
    switch (in.start()) {
      case v1::START_UNSPECIFIED:
        break;
      case v1::ATTENTION_MATCHING_START:
        out->start = StartMethod::kAttentionMatching;
        break;
      case v1::PREFIX_START:
        out->start = StartMethod::kPrefix;
        break;
      default:
        return BadField("training.start", StrCat("has the unknown value ", static_cast<int>(in.start())));
    }
  }
  if (in.has_loss_mode()) {
    switch (in.loss_mode()) {
      case v1::LOSS_MODE_UNSPECIFIED:
        break;
      case v1::RENORMALISED:
        out->loss = LossKind::kRenormalised;
        break;
      case v1::RAW:
        out->loss = LossKind::kRaw;
        break;
      case v1::TAIL:
        out->loss = LossKind::kTail;
        break;
      case v1::CE:
        out->loss = LossKind::kCrossEntropy;
        break;
      default:
        return BadField("training.loss_mode", StrCat("has the unknown value ", static_cast<int>(in.loss_mode())));
    }
  }
  if (in.has_learning_rate()) out->learning_rate = in.learning_rate();
  if (in.has_warmup_fraction()) out->warmup_fraction = in.warmup_fraction();
  if (in.has_rows_per_step()) out->rows_per_step = in.rows_per_step();
  if (in.has_row_tokens()) out->row_tokens = in.row_tokens();
  if (in.has_steps()) out->steps = in.steps();
  if (in.has_max_training_tokens()) out->max_training_tokens = in.max_training_tokens();
  if (in.has_frozen_slots()) out->frozen_slots = in.frozen_slots();
  if (in.has_train_beta()) out->train_beta = in.train_beta();
  if (in.has_train_on_question()) out->train_on_question = in.train_on_question();
  if (in.has_clip_norm()) out->clip_norm = in.clip_norm();
  if (in.has_validation_fraction()) out->validation_fraction = in.validation_fraction();
  if (in.has_early_stop_patience()) out->early_stop_patience = in.early_stop_patience();
  if (in.has_evaluate_every()) out->evaluate_every = in.evaluate_every();
  if (in.has_weight_decay()) out->weight_decay = in.weight_decay();
  if (in.has_adam_beta1()) out->beta1 = in.adam_beta1();
  if (in.has_adam_beta2()) out->beta2 = in.adam_beta2();
  return absl::OkStatus();
}

absl::Status ParseEvaluation(const v1::EvaluationOptions& in, EvaluationSpec* out) {
  STILLHOUSE_RETURN_IF_ERROR(
      CopyTexts("evaluation.questions", in.questions(), kMaxEvaluationQuestions, kMaxQuestionBytes, &out->questions));
  STILLHOUSE_RETURN_IF_ERROR(
      CopyTexts("evaluation.answers", in.answers(), kMaxEvaluationQuestions, kMaxAnswerBytes, &out->answers));
  if (!out->answers.empty() && out->answers.size() != out->questions.size()) {
    return BadField("evaluation.answers", StrCat("has ", out->answers.size(), " entries for ", out->questions.size(),
                                                 " questions; send one each, or none"));
  }
  if (in.has_skip()) out->skip = in.skip();
  if (in.has_max_answer_tokens()) out->max_answer_tokens = in.max_answer_tokens();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BuildSpec> ParseBuildRequest(const v1::BuildCacheRequest& request, std::string_view tenant,
                                            std::string_view corpus_id, std::string_view cache_id) {
  STILLHOUSE_ASSIGN_OR_RETURN(const BuildMethod method, ParseMethod(request.method()));
  STILLHOUSE_ASSIGN_OR_RETURN(const BuildProfile profile, ParseProfile(request.profile()));
  BuildSpec spec = DefaultBuildSpec(method, profile);
  spec.tenant = std::string(tenant);
  spec.corpus_id = std::string(corpus_id);
  spec.cache_id = std::string(cache_id);
  STILLHOUSE_RETURN_IF_ERROR(CheckTextField("display_name", request.display_name(), kMaxDisplayName));
  spec.display_name = request.display_name();
  switch (request.size_case()) {
    case v1::BuildCacheRequest::kSlots:
      if (request.slots() < 1) return BadField("slots", StrCat("is ", request.slots(), "; it must be at least 1"));
      spec.slots = request.slots();
      spec.compression_ratio = 0.0;
      break;
    case v1::BuildCacheRequest::kCompressionRatio: {
      const double ratio = request.compression_ratio();
      if (!(1.0 <= ratio && ratio <= 1e6)) {
        return BadField("compression_ratio", StrCat("is ", ratio, "; it must be in [1, 1000000]"));
      }
      spec.slots = 0;
      spec.compression_ratio = ratio;
      break;
    }
    case v1::BuildCacheRequest::SIZE_NOT_SET:
      break;
  }
  if (request.has_seed()) spec.seed = request.seed();
  spec.replace = request.replace();
  if (!request.etag().empty() && !request.replace()) return BadField("etag", "is set without replace");
  spec.expected_etag = request.etag();
  STILLHOUSE_RETURN_IF_ERROR(ParseSelfStudy(request.self_study(), &spec.self_study));
  STILLHOUSE_RETURN_IF_ERROR(ParseTraining(request.training(), &spec.training));
  const v1::AttentionMatchingOptions& matching = request.attention_matching();
  if (matching.has_queries()) spec.matching.queries = matching.queries();
  if (matching.has_ridge()) spec.matching.ridge = matching.ridge();
  if (matching.has_fit_beta()) spec.matching.fit_beta = matching.fit_beta();
  if (matching.has_fit_values()) spec.matching.fit_values = matching.fit_values();
  STILLHOUSE_RETURN_IF_ERROR(ParseEvaluation(request.evaluation(), &spec.evaluation));
  const absl::Status valid = ValidateBuildSpec(spec);
  if (!valid.ok()) return WithReason(valid, "INVALID_BUILD_OPTIONS");
  return spec;
}

}  // namespace stillhouse
