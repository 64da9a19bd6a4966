#include "server/corpus/evaluator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache_store/strict_json.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"

namespace stillhouse {
namespace {

using nlohmann::json;

// Small talk that has nothing to do with any document.
struct Exchange {
  const char* question;
  const char* answer;
};
constexpr Exchange kUnrelated[] = {
    {"What is the capital of France?", "The capital of France is Paris."},
    {"Name the first four days of the week.", "Monday, Tuesday, Wednesday and Thursday."},
    {"What is 7 plus 5?", "7 plus 5 is 12."},
    {"Why is the sky blue?",
     "The sky is blue because the air scatters the blue part of the sunlight more than the red part."},
    {"Write one sentence about a cat.", "The cat slept in the warm sun by the window."},
    {"How many legs does a spider have?", "A spider has eight legs."},
    {"What do plants need to grow?", "Plants need water, light, air and nutrients to grow."},
    {"Translate \"good morning\" into Spanish.", "\"Good morning\" in Spanish is \"buenos días\"."},
};

int64_t CanonicalBytes(const std::shared_ptr<const Memory>& memory) { return memory ? memory->canonical_bytes() : 0; }

}  // namespace

std::string QualityReportToJson(const QualityReport& report) {
  json out = json::object();
  auto number = [](double value) { return std::isfinite(value) ? json(value) : json(0.0); };
  if (!report.rows.empty()) {
    json rows = json::array();
    for (const QualityReport::Row& row : report.rows) {
      json r = {{"memory", row.memory}, {"mean_nll", number(row.mean_nll)}, {"kv_bytes", row.kv_bytes}};
      if (row.mean_kl) r["mean_kl"] = number(*row.mean_kl);
      if (row.recovered) r["recovered"] = number(*row.recovered);
      rows.push_back(std::move(r));
    }
    out["rows"] = std::move(rows);
  }
  if (report.recovered) out["recovered"] = number(*report.recovered);
  if (report.off_context_damage) out["off_context_damage"] = number(*report.off_context_damage);
  out["questions"] = report.questions;
  out["answer_tokens"] = report.answer_tokens;
  if (!report.question_source.empty()) out["question_source"] = report.question_source;
  out["build_seconds"] = number(report.build_seconds);
  out["training_tokens"] = report.training_tokens;
  out["generated_tokens"] = report.generated_tokens;
  out["best_step"] = report.best_step;
  out["last_step"] = report.last_step;
  if (report.break_even_queries) out["break_even_queries"] = number(*report.break_even_queries);
  return out.dump();
}

absl::StatusOr<QualityReport> QualityReportFromJson(std::string_view text) {
  STILLHOUSE_ASSIGN_OR_RETURN(const json in, ParseStrictJson(text));
  if (!in.is_object()) return absl::InvalidArgumentError("a quality report is a JSON object");
  QualityReport report;
  bool sound = true;
  auto real = [&](const json& from, const char* name, auto* out) {
    const auto it = from.find(name);
    if (it == from.end()) return;
    if (!it->is_number()) {
      sound = false;
    } else {
      *out = it->get<double>();
    }
  };
  auto whole = [&](const json& from, const char* name, int64_t* out) {
    const auto it = from.find(name);
    if (it == from.end()) return;
    if (!it->is_number_integer()) {
      sound = false;
    } else {
      *out = it->get<int64_t>();
    }
  };
  auto text_of = [&](const json& from, const char* name, std::string* out) {
    const auto it = from.find(name);
    if (it == from.end()) return;
    if (!it->is_string()) {
      sound = false;
    } else {
      *out = it->get<std::string>();
    }
  };
  if (const auto rows = in.find("rows"); rows != in.end()) {
    if (!rows->is_array()) return absl::InvalidArgumentError("a quality report's rows are a list");
    for (const json& r : *rows) {
      if (!r.is_object()) return absl::InvalidArgumentError("a quality report's row is an object");
      QualityReport::Row row;
      text_of(r, "memory", &row.memory);
      real(r, "mean_nll", &row.mean_nll);
      real(r, "mean_kl", &row.mean_kl);
      whole(r, "kv_bytes", &row.kv_bytes);
      real(r, "recovered", &row.recovered);
      report.rows.push_back(std::move(row));
    }
  }
  real(in, "recovered", &report.recovered);
  real(in, "off_context_damage", &report.off_context_damage);
  whole(in, "questions", &report.questions);
  whole(in, "answer_tokens", &report.answer_tokens);
  text_of(in, "question_source", &report.question_source);
  real(in, "build_seconds", &report.build_seconds);
  whole(in, "training_tokens", &report.training_tokens);
  whole(in, "generated_tokens", &report.generated_tokens);
  whole(in, "best_step", &report.best_step);
  whole(in, "last_step", &report.last_step);
  real(in, "break_even_queries", &report.break_even_queries);
  if (!sound) return absl::InvalidArgumentError("a quality report's field has the wrong type");
  return report;
}

absl::StatusOr<std::vector<Conversation>> Evaluator::PrepareUploaded(const std::vector<std::string>& questions,
                                                                     const std::vector<std::string>& answers,
                                                                     int64_t max_answer_tokens, Teacher* teacher,
                                                                     int64_t* generated) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::vector<Conversation> conversations, teacher->PlaceQuestions(questions));
  constexpr int64_t kCandidates = 20;
  if (answers.empty()) {
    STILLHOUSE_RETURN_IF_ERROR(
        teacher->Answer(max_answer_tokens, kCandidates, /*done=*/nullptr, generated, &conversations));
    std::erase_if(conversations, [](const Conversation& c) { return c.answer.empty(); });
    return conversations;
  }
  const int64_t room = runtime_->engine->context_limit() - teacher->next_position();
  for (size_t i = 0; i < conversations.size(); ++i) {
    Conversation& c = conversations[i];
    c.answer = runtime_->tokenizer->Encode(answers[i]);
    const int64_t most = std::min(max_answer_tokens, room - static_cast<int64_t>(c.prompt.size()));
    if (static_cast<int64_t>(c.answer.size()) < most) {
      c.answer.push_back(runtime_->chat->end_of_turn());
    } else {
      c.answer.resize(static_cast<size_t>(std::max<int64_t>(1, most)));
    }
  }
  std::erase_if(conversations, [](const Conversation& c) { return c.answer.empty(); });
  // The teacher's view of answers that are not its own.
  for (int64_t w = 0; w < teacher->window_count(); ++w) {
    std::vector<const Conversation*> of_window;
    for (const Conversation& c : conversations) {
      if (c.window == w) of_window.push_back(&c);
    }
    if (of_window.empty()) continue;
    STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> memory, teacher->Window(w));
    for (const auto& group : GroupByRows(of_window, runtime_->task_rows)) {
      STILLHOUSE_RETURN_IF_ERROR(runtime_->Run([&](const Context& ctx) {
        std::vector<Conversation*> learners;
        for (const Conversation* c : group) learners.push_back(const_cast<Conversation*>(c));
        TeachAnswers(ctx, runtime_->engine->weights(), learners, memory, kCandidates);
        return absl::OkStatus();
      }));
    }
  }
  return conversations;
}

absl::StatusOr<AnswerScore> Evaluator::Score(const std::vector<const Conversation*>& conversations,
                                             const std::shared_ptr<const Memory>& memory, bool with_kl) {
  AnswerScore total;
  for (const auto& group : GroupByRows(conversations, runtime_->task_rows)) {
    STILLHOUSE_RETURN_IF_ERROR(runtime_->Run([&](const Context& ctx) {
      total.Add(ScoreAnswers(ctx, runtime_->engine->weights(), group, memory, with_kl));
      return absl::OkStatus();
    }));
  }
  if (!std::isfinite(total.nll)) return absl::InternalError("a memory gave answers no finite likelihood");
  return total;
}

absl::StatusOr<std::shared_ptr<const Memory>> Evaluator::NoDocument() {
  std::vector<int32_t> ids = runtime_->chat->Opening();
  if (runtime_->chat->default_system_message()) {
    const std::vector<int32_t> system = runtime_->chat->EncodeSystem(*runtime_->chat->default_system_message());
    ids.insert(ids.end(), system.begin(), system.end());
  }
  if (ids.empty()) return std::shared_ptr<const Memory>();
  STILLHOUSE_ASSIGN_OR_RETURN(std::shared_ptr<Memory> memory, runtime_->PrefillMemory(ids, nullptr));
  return std::shared_ptr<const Memory>(std::move(memory));
}

absl::StatusOr<std::vector<Conversation>> Evaluator::UnrelatedConversations() {
  std::vector<Conversation> conversations;
  for (const Exchange& exchange : kUnrelated) {
    Conversation c;
    STILLHOUSE_ASSIGN_OR_RETURN(c.prompt, QuestionPrompt(*runtime_->chat, exchange.question));
    c.answer = runtime_->tokenizer->Encode(exchange.answer);
    c.answer.push_back(runtime_->chat->end_of_turn());
    conversations.push_back(std::move(c));
  }
  return conversations;
}

absl::Status Evaluator::Judge(const std::vector<Conversation>& conversations, bool answers_are_greedy,
                              const std::shared_ptr<const Memory>& cache, Teacher* teacher,
                              const std::function<absl::Status(double)>& tick, QualityReport* report) {
  report->rows.clear();
  report->questions = static_cast<int64_t>(conversations.size());
  std::vector<const Conversation*> all;
  for (const Conversation& c : conversations) {
    all.push_back(&c);
    report->answer_tokens += static_cast<int64_t>(c.answer.size());
  }
  if (all.empty()) return absl::OkStatus();

  STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> none, NoDocument());
  STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore none_score, Score(all, none, /*with_kl=*/true));
  STILLHOUSE_RETURN_IF_ERROR(tick(0.3));

  AnswerScore full_score;
  int64_t full_bytes = 0;
  for (int64_t w = 0; w < teacher->window_count(); ++w) {
    std::vector<const Conversation*> of_window;
    for (const Conversation* c : all) {
      if (c->window == w) of_window.push_back(c);
    }
    full_bytes = std::max(full_bytes, teacher->framed_tokens(w) * runtime_->config().kv_bytes_per_slot());
    if (of_window.empty()) continue;
    if (answers_are_greedy) {
      // Each answer token is its position's best candidate.
      for (const Conversation* c : of_window) {
        const size_t width = static_cast<size_t>(c->answer_teacher.width);
        for (size_t t = 0; t < c->answer.size(); ++t) {
          for (size_t i = 0; i < width; ++i) {
            if (c->answer_teacher.ids[t * width + i] != c->answer[t]) continue;
            full_score.nll -= c->answer_teacher.logprobs[t * width + i];
            ++full_score.tokens;
            break;
          }
        }
      }
    } else {
      STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> memory, teacher->Window(w));
      STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore score, Score(of_window, memory, /*with_kl=*/false));
      full_score.Add(score);
    }
  }
  STILLHOUSE_RETURN_IF_ERROR(tick(0.4));
  const double nll_none = none_score.mean_nll(), nll_full = full_score.mean_nll();
  const double gap = nll_none - nll_full;
  auto recovered = [&](double nll) -> std::optional<double> {
    // Questions that need no document say nothing about a memory of it.
    if (!(gap > 1e-6)) return std::nullopt;
    return (nll_none - nll) / gap;
  };
  report->rows.push_back({"none", nll_none, none_score.mean_kl(), CanonicalBytes(none), recovered(nll_none)});
  report->rows.push_back({"full", nll_full, 0.0, full_bytes, recovered(nll_full)});

  STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore cache_score, Score(all, cache, /*with_kl=*/true));
  report->recovered = recovered(cache_score.mean_nll());
  report->rows.push_back(
      {"cache", cache_score.mean_nll(), cache_score.mean_kl(), cache->canonical_bytes(), report->recovered});
  STILLHOUSE_RETURN_IF_ERROR(tick(0.65));

  STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> first, teacher->Window(0));
  std::shared_ptr<const Memory> truncated;
  STILLHOUSE_RETURN_IF_ERROR(runtime_->Run([&](const Context& ctx) {
    const int64_t slots = std::min(cache->slots, first->slots);
    truncated = SliceMemory(ctx, *first, 0, slots, slots);
    return absl::OkStatus();
  }));
  STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore truncated_score, Score(all, truncated, /*with_kl=*/true));
  report->rows.push_back({"truncated", truncated_score.mean_nll(), truncated_score.mean_kl(),
                          truncated->canonical_bytes(), recovered(truncated_score.mean_nll())});
  STILLHOUSE_RETURN_IF_ERROR(tick(0.9));

  STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<Conversation> unrelated, UnrelatedConversations());
  std::vector<const Conversation*> off;
  for (const Conversation& c : unrelated) off.push_back(&c);
  STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore without, Score(off, none, /*with_kl=*/false));
  STILLHOUSE_ASSIGN_OR_RETURN(const AnswerScore with, Score(off, cache, /*with_kl=*/false));
  report->off_context_damage = with.mean_nll() - without.mean_nll();
  return tick(1.0);
}

}  // namespace stillhouse
