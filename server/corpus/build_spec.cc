#include "server/corpus/build_spec.h"

#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cache_store/store.h"
#include "cache_store/strict_json.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "nlohmann/json.hpp"

namespace stillhouse {
namespace {

using nlohmann::json;

template <typename E>
struct EnumName {
  E value;
  const char* name;
};

constexpr EnumName<BuildMethod> kMethods[] = {{BuildMethod::kCartridge, "CARTRIDGE"},
                                              {BuildMethod::kAttentionMatching, "ATTENTION_MATCHING"},
                                              {BuildMethod::kFull, "FULL"}};
constexpr EnumName<BuildProfile> kProfiles[] = {
    {BuildProfile::kQuick, "QUICK"}, {BuildProfile::kStandard, "STANDARD"}, {BuildProfile::kThorough, "THOROUGH"}};
constexpr EnumName<StartMethod> kStarts[] = {{StartMethod::kAttentionMatching, "ATTENTION_MATCHING"},
                                             {StartMethod::kPrefix, "PREFIX"}};
constexpr EnumName<SeedKind> kSeedKinds[] = {{SeedKind::kStructuring, "STRUCTURING"},
                                             {SeedKind::kSummarisation, "SUMMARISATION"},
                                             {SeedKind::kQuestion, "QUESTION"},
                                             {SeedKind::kUseCase, "USE_CASE"},
                                             {SeedKind::kCreative, "CREATIVE"}};
constexpr EnumName<LossKind> kLosses[] = {{LossKind::kRenormalised, "RENORMALISED"},
                                          {LossKind::kRaw, "RAW"},
                                          {LossKind::kTail, "TAIL"},
                                          {LossKind::kCrossEntropy, "CE"}};

template <typename E, size_t N>
const char* NameOf(const EnumName<E> (&table)[N], E value) {
  for (const EnumName<E>& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "UNKNOWN";
}

// Visits every field of a spec under its name, for writing and for reading.
template <typename Spec, typename Visitor>
void VisitSelfStudy(Spec& s, Visitor& v) {
  v("conversations", s.conversations);
  v("max_question_tokens", s.max_question_tokens);
  v("max_answer_tokens", s.max_answer_tokens);
  v("temperature", s.temperature);
  v("seed_kinds", s.seed_kinds);
  v("min_chunk_tokens", s.min_chunk_tokens);
  v("max_chunk_tokens", s.max_chunk_tokens);
  v("top_logprobs", s.top_logprobs);
  v("questions", s.questions);
}
template <typename Spec, typename Visitor>
void VisitTraining(Spec& s, Visitor& v) {
  v("start", s.start);
  v("learning_rate", s.learning_rate);
  v("relative_learning_rate", s.relative_learning_rate);
  v("warmup_fraction", s.warmup_fraction);
  v("rows_per_step", s.rows_per_step);
  v("row_tokens", s.row_tokens);
  v("steps", s.steps);
  v("max_training_tokens", s.max_training_tokens);
  v("frozen_slots", s.frozen_slots);
  v("train_beta", s.train_beta);
  v("loss", s.loss);
  v("train_on_question", s.train_on_question);
  v("clip_norm", s.clip_norm);
  v("validation_fraction", s.validation_fraction);
  v("early_stop_patience", s.early_stop_patience);
  v("evaluate_every", s.evaluate_every);
  v("weight_decay", s.weight_decay);
  v("beta1", s.beta1);
  v("beta2", s.beta2);
}
template <typename Spec, typename Visitor>
void VisitMatching(Spec& s, Visitor& v) {
  v("queries", s.queries);
  v("ridge", s.ridge);
  v("fit_beta", s.fit_beta);
  v("fit_values", s.fit_values);
}
template <typename Spec, typename Visitor>
void VisitEvaluation(Spec& s, Visitor& v) {
  v("questions", s.questions);
  v("answers", s.answers);
  v("skip", s.skip);
  v("max_answer_tokens", s.max_answer_tokens);
}
template <typename Spec, typename Visitor>
void VisitTop(Spec& s, Visitor& v) {
  v("tenant", s.tenant);
  v("corpus_id", s.corpus_id);
  v("cache_id", s.cache_id);
  v("display_name", s.display_name);
  v("method", s.method);
  v("profile", s.profile);
  v("slots", s.slots);
  v("compression_ratio", s.compression_ratio);
  v("replace", s.replace);
  v("expected_etag", s.expected_etag);
  v("seed", s.seed);
}

class JsonWriter {
 public:
  explicit JsonWriter(json* out) : out_(*out) {}
  template <typename T>
  void operator()(const char* name, const T& value) {
    out_[name] = Value(value);
  }

 private:
  static json Value(BuildMethod v) { return NameOf(kMethods, v); }
  static json Value(BuildProfile v) { return NameOf(kProfiles, v); }
  static json Value(StartMethod v) { return NameOf(kStarts, v); }
  static json Value(SeedKind v) { return NameOf(kSeedKinds, v); }
  static json Value(LossKind v) { return NameOf(kLosses, v); }
  template <typename T>
  static json Value(const std::vector<T>& values) {
    json list = json::array();
    for (const T& v : values) list.push_back(Value(v));
    return list;
  }
  template <typename T>
  static json Value(const T& v) {
    return v;
  }

  json& out_;
};

// Reads fields that must all be there, and complains about any other.
class JsonReader {
 public:
  JsonReader(const json& in, std::string where) : in_(in), where_(std::move(where)) {
    if (!in.is_object()) Fail(where_, "is not an object");
  }

  template <typename T>
  void operator()(const char* name, T& value) {
    if (!status_.ok()) return;
    seen_.insert(name);
    const auto it = in_.find(name);
    if (it == in_.end()) return Fail(name, "is missing");
    if (!Take(*it, &value)) Fail(name, "has the wrong type or value");
  }

  void Seen(const char* name) { seen_.insert(name); }

  absl::Status Finish() {
    if (!status_.ok()) return status_;
    for (const auto& [name, value] : in_.items()) {
      if (!seen_.contains(name)) Fail(name, "is unknown");
    }
    return status_;
  }

 private:
  void Fail(const std::string& name, const char* what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(StrCat("a build's specification: ", where_, name, " ", what));
  }
  template <typename E, size_t N>
  static bool TakeName(const EnumName<E> (&table)[N], const json& in, E* out) {
    if (!in.is_string()) return false;
    for (const EnumName<E>& entry : table) {
      if (in.get_ref<const std::string&>() == entry.name) {
        *out = entry.value;
        return true;
      }
    }
    return false;
  }
  static bool Take(const json& in, BuildMethod* out) { return TakeName(kMethods, in, out); }
  static bool Take(const json& in, BuildProfile* out) { return TakeName(kProfiles, in, out); }
  static bool Take(const json& in, StartMethod* out) { return TakeName(kStarts, in, out); }
  static bool Take(const json& in, SeedKind* out) { return TakeName(kSeedKinds, in, out); }
  static bool Take(const json& in, LossKind* out) { return TakeName(kLosses, in, out); }
  static bool Take(const json& in, std::string* out) {
    if (!in.is_string()) return false;
    *out = in.get<std::string>();
    return true;
  }
  static bool Take(const json& in, bool* out) {
    if (!in.is_boolean()) return false;
    *out = in.get<bool>();
    return true;
  }
  static bool Take(const json& in, double* out) {
    if (!in.is_number()) return false;
    *out = in.get<double>();
    return true;
  }
  static bool Take(const json& in, int64_t* out) {
    if (!in.is_number_integer() || (in.is_number_unsigned() && in.get<uint64_t>() > INT64_MAX)) return false;
    *out = in.get<int64_t>();
    return true;
  }
  static bool Take(const json& in, uint64_t* out) {
    if (!in.is_number_unsigned()) return false;
    *out = in.get<uint64_t>();
    return true;
  }
  template <typename T>
  static bool Take(const json& in, std::vector<T>* out) {
    if (!in.is_array()) return false;
    out->clear();
    for (const json& item : in) {
      out->emplace_back();
      if (!Take(item, &out->back())) return false;
    }
    return true;
  }

  const json& in_;
  std::string where_;
  std::set<std::string> seen_;
  absl::Status status_;
};

absl::Status Invalid(std::string_view field, const std::string& value, std::string_view range) {
  return absl::InvalidArgumentError(StrCat(field, " is ", value, ", it must be ", range));
}

absl::Status CheckInteger(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Invalid(field, StrCat(value), StrCat("from ", least, " to ", most));
}

// Written so that NaN fails.
absl::Status CheckNumber(std::string_view field, double value, double least, bool least_open, double most,
                         bool most_open = false) {
  const bool above = least_open ? value > least : value >= least;
  const bool below = most_open ? value < most : value <= most;
  if (above && below) return absl::OkStatus();
  return Invalid(field, StrCat(value), StrCat("in ", least_open ? "(" : "[", least, ", ", most, most_open ? ")" : "]"));
}

absl::Status CheckTexts(std::string_view field, const std::vector<std::string>& texts, size_t most, size_t bytes) {
  if (texts.size() > most) return Invalid(field, StrCat("a list of ", texts.size()), StrCat("at most ", most));
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string item = StrCat(field, "[", i, "]");
    if (texts[i].empty()) return Invalid(item, "empty", "a text");
    if (texts[i].size() > bytes) {
      return Invalid(item, StrCat("of ", texts[i].size(), " bytes"), StrCat("at most ", bytes, " bytes long"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

const char* BuildMethodName(BuildMethod method) { return NameOf(kMethods, method); }

BuildSpec DefaultBuildSpec(BuildMethod method, BuildProfile profile) {
  BuildSpec spec;
  spec.method = method;
  spec.profile = profile;
  spec.compression_ratio = method == BuildMethod::kFull ? 0.0 : 10.0;

  SelfStudySpec& study = spec.self_study;
  TrainingSpec& training = spec.training;
  study.temperature = 0.6;
  // Drawn uniformly: plain questions teach the most, the others keep the memory general.
  study.seed_kinds.assign(6, SeedKind::kQuestion);
  study.seed_kinds.insert(study.seed_kinds.end(),
                          {SeedKind::kStructuring, SeedKind::kSummarisation, SeedKind::kUseCase, SeedKind::kCreative});
  study.min_chunk_tokens = 96;
  study.max_chunk_tokens = 224;
  study.max_question_tokens = 32;
  study.max_answer_tokens = 64;
  training.row_tokens = 1024;
  training.learning_rate = 1e-2;
  switch (profile) {
    case BuildProfile::kQuick:
      study.conversations = 100;
      training.rows_per_step = 2;
      training.steps = 90;
      training.max_training_tokens = 14000;
      training.validation_fraction = 0.15;
      training.evaluate_every = 45;
      spec.matching.queries = 2048;
      break;
    case BuildProfile::kStandard:
      study.conversations = 480;
      training.rows_per_step = 2;
      training.steps = 370;
      training.max_training_tokens = 60000;
      training.validation_fraction = 0.05;
      training.evaluate_every = 93;
      spec.matching.queries = 4096;
      break;
    case BuildProfile::kThorough:
      study.conversations = 900;
      training.rows_per_step = 12;
      training.steps = 260;
      training.max_training_tokens = 260000;
      training.validation_fraction = 0.04;
      training.evaluate_every = 65;
      spec.matching.queries = 8192;
      break;
  }
  // Attention matching alone needs conversations for its queries and for the report only.
  if (method == BuildMethod::kAttentionMatching) {
    study.conversations = profile == BuildProfile::kQuick ? 64 : profile == BuildProfile::kStandard ? 160 : 320;
  }
  return spec;
}

absl::Status ValidateBuildSpec(const BuildSpec& spec) {
  for (const auto& [field, id] : {std::pair<const char*, const std::string*>{"tenant", &spec.tenant},
                                  {"corpus_id", &spec.corpus_id},
                                  {"cache_id", &spec.cache_id}}) {
    if (!IsResourceId(*id) && !(id->empty() && id == &spec.cache_id)) {
      return Invalid(field, StrCat("\"", *id, "\""),
                     "1 to 63 lower-case letters, digits and dashes that begin with a letter");
    }
  }
  if (spec.display_name.size() > 1024) return Invalid("display_name", "too long", "at most 1024 bytes");
  if (!spec.expected_etag.empty() && !spec.replace) return Invalid("expected_etag", "set", "empty without replace");
  if (spec.method != BuildMethod::kFull) {
    if ((spec.slots != 0) == (spec.compression_ratio != 0.0)) {
      return absl::InvalidArgumentError("set one of slots and compression_ratio");
    }
    if (spec.slots != 0) {
      STILLHOUSE_RETURN_IF_ERROR(CheckInteger("slots", spec.slots, 1, 1 << 24));
    } else {
      STILLHOUSE_RETURN_IF_ERROR(CheckNumber("compression_ratio", spec.compression_ratio, 1.0, false, 1e6));
    }
  }
  const SelfStudySpec& study = spec.self_study;
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("self_study.conversations", study.conversations, 1, 100000));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("self_study.max_question_tokens", study.max_question_tokens, 1, 2048));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("self_study.max_answer_tokens", study.max_answer_tokens, 1, 4096));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("self_study.temperature", study.temperature, 0.0, false, 2.0));
  if (study.seed_kinds.empty()) return Invalid("self_study.seed_kinds", "empty", "at least one kind");
  STILLHOUSE_RETURN_IF_ERROR(
      CheckInteger("self_study.seed_kinds", static_cast<int64_t>(study.seed_kinds.size()), 1, 1000));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("self_study.min_chunk_tokens", study.min_chunk_tokens, 1, 1 << 20));
  STILLHOUSE_RETURN_IF_ERROR(
      CheckInteger("self_study.max_chunk_tokens", study.max_chunk_tokens, study.min_chunk_tokens, 1 << 20));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("self_study.top_logprobs", study.top_logprobs, 1, 20));
  STILLHOUSE_RETURN_IF_ERROR(CheckTexts("self_study.questions", study.questions, 10000, 4096));

  const TrainingSpec& t = spec.training;
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.learning_rate", t.learning_rate, 0.0, true, 1.0));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.warmup_fraction", t.warmup_fraction, 0.0, false, 1.0, true));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.rows_per_step", t.rows_per_step, 1, 256));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.row_tokens", t.row_tokens, 16, 1 << 20));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.steps", t.steps, 1, 100000));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.max_training_tokens", t.max_training_tokens, 1, int64_t{1} << 40));
  STILLHOUSE_RETURN_IF_ERROR(
      CheckInteger("training.frozen_slots", t.frozen_slots, 1, spec.slots > 1 ? spec.slots - 1 : 1 << 24));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.clip_norm", t.clip_norm, 0.0, false, 1e9));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.validation_fraction", t.validation_fraction, 0.0, true, 0.5));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.early_stop_patience", t.early_stop_patience, 0, 100000));
  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("training.evaluate_every", t.evaluate_every, 1, 100000));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.weight_decay", t.weight_decay, 0.0, false, 1e3));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.beta1", t.beta1, 0.0, false, 1.0, true));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("training.beta2", t.beta2, 0.0, false, 1.0, true));

  STILLHOUSE_RETURN_IF_ERROR(CheckInteger("attention_matching.queries", spec.matching.queries, 16, 65536));
  STILLHOUSE_RETURN_IF_ERROR(CheckNumber("attention_matching.ridge", spec.matching.ridge, 0.0, true, 1e3));

  const EvaluationSpec& e = spec.evaluation;
  STILLHOUSE_RETURN_IF_ERROR(CheckTexts("evaluation.questions", e.questions, 1000, 4096));
  STILLHOUSE_RETURN_IF_ERROR(CheckTexts("evaluation.answers", e.answers, 1000, 65536));
  if (!e.answers.empty() && e.answers.size() != e.questions.size()) {
    return Invalid("evaluation.answers", StrCat("a list of ", e.answers.size()),
                   StrCat("empty, or one for each of the ", e.questions.size(), " questions"));
  }
  return CheckInteger("evaluation.max_answer_tokens", e.max_answer_tokens, 1, 1024);
}

std::string BuildSpecToJson(const BuildSpec& spec) {
  json out = json::object(), study = json::object(), training = json::object(), matching = json::object(),
       evaluation = json::object();
  JsonWriter top_writer(&out), study_writer(&study), training_writer(&training), matching_writer(&matching),
      evaluation_writer(&evaluation);
  VisitTop(spec, top_writer);
  VisitSelfStudy(spec.self_study, study_writer);
  VisitTraining(spec.training, training_writer);
  VisitMatching(spec.matching, matching_writer);
  VisitEvaluation(spec.evaluation, evaluation_writer);
  out["self_study"] = std::move(study);
  out["training"] = std::move(training);
  out["attention_matching"] = std::move(matching);
  out["evaluation"] = std::move(evaluation);
  // Questions come from outside and need not be UTF-8: replaced, never thrown at.
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<BuildSpec> BuildSpecFromJson(std::string_view text) {
  JsonLimits limits;
  limits.bytes = size_t{256} << 20;
  limits.depth = 8;
  STILLHOUSE_ASSIGN_OR_RETURN(const json in, ParseStrictJson(text, limits));
  BuildSpec spec;
  JsonReader top(in, "");
  VisitTop(spec, top);
  const json missing;
  auto section = [&](const char* name, auto visit, auto& part) -> absl::Status {
    top.Seen(name);
    const bool there = in.is_object() && in.contains(name);
    JsonReader reader(there ? in[name] : missing, StrCat(name, "."));
    visit(part, reader);
    return reader.Finish();
  };
  STILLHOUSE_RETURN_IF_ERROR(section(
      "self_study", [](auto& s, auto& v) { VisitSelfStudy(s, v); }, spec.self_study));
  STILLHOUSE_RETURN_IF_ERROR(section(
      "training", [](auto& s, auto& v) { VisitTraining(s, v); }, spec.training));
  STILLHOUSE_RETURN_IF_ERROR(section(
      "attention_matching", [](auto& s, auto& v) { VisitMatching(s, v); }, spec.matching));
  STILLHOUSE_RETURN_IF_ERROR(section(
      "evaluation", [](auto& s, auto& v) { VisitEvaluation(s, v); }, spec.evaluation));
  STILLHOUSE_RETURN_IF_ERROR(top.Finish());
  return spec;
}

}  // namespace stillhouse
