#include "server/corpus/teacher.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/compact/attention_matching.h"
#include "server/token/utf8.h"
#include "server/train/scorer.h"

namespace stillhouse {
absl::StatusOr<std::vector<int32_t>> QuestionPrompt(const ChatTemplate& chat, std::string_view question) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, chat.EncodeTurn("user", question));
  const std::vector<int32_t> header = chat.GenerationPrompt();
  ids.insert(ids.end(), header.begin(), header.end());
  return ids;
}

absl::StatusOr<std::unique_ptr<Teacher>> Teacher::Create(const BuildRuntime* runtime, const Document* document,
                                                         int64_t reserve) {
  std::unique_ptr<Teacher> teacher(new Teacher(runtime, document));
  const int64_t tokens = static_cast<int64_t>(document->tokens.size());
  STILLHOUSE_ASSIGN_OR_RETURN(teacher->windows_,
                              PlanWindows(tokens, document->frame(), runtime->engine->context_limit(), reserve));
  teacher->memories_.resize(teacher->windows_.size());
  int64_t held = 0;
  for (const TokenRange& window : teacher->windows_) {
    teacher->next_position_ = std::max(teacher->next_position_, window.size() + document->frame());
    held += (window.size() + document->frame()) * runtime->config().kv_bytes_per_slot();
  }
  if (held > runtime->teacher_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the document has ", tokens, " tokens; its keys and values take ",
                                                     held, " bytes while it is built, at most ", runtime->teacher_bytes,
                                                     " are allowed: split the document into several corpora"));
  }
  return teacher;
}

absl::StatusOr<std::shared_ptr<const Memory>> Teacher::Window(int64_t window) {
  std::shared_ptr<const Memory>& held = memories_[static_cast<size_t>(window)];
  if (held) return held;
  const std::vector<int32_t> ids = document_->Framed(windows_[static_cast<size_t>(window)]);
  STILLHOUSE_ASSIGN_OR_RETURN(std::shared_ptr<Memory> memory, runtime_->PrefillMemory(ids, &prefill_seconds_));
  memory->label = "FULL";
  const int64_t shift = next_position_ - memory->slots;
  if (shift > 0) {
    std::vector<int32_t> from(static_cast<size_t>(memory->slots)), to;
    std::iota(from.begin(), from.end(), 0);
    to = from;
    for (int32_t& position : to) position += static_cast<int32_t>(shift);
    STILLHOUSE_RETURN_IF_ERROR(runtime_->Run([&](const Context& ctx) {
      for (LayerKv& kv : memory->layers) kv.k = RotateKeys(ctx, runtime_->config().rope, kv.k, from, to);
      return absl::OkStatus();
    }));
    memory->next_position = next_position_;
  }
  held = std::move(memory);
  return held;
}

absl::StatusOr<std::vector<Conversation>> Teacher::PlaceQuestions(const std::vector<std::string>& questions) {
  std::vector<Conversation> conversations;
  const int64_t room = runtime_->engine->context_limit() - next_position_;
  for (const std::string& question : questions) {
    Conversation conversation;
    STILLHOUSE_ASSIGN_OR_RETURN(conversation.prompt, QuestionPrompt(*runtime_->chat, question));
    if (static_cast<int64_t>(conversation.prompt.size()) >= room) {
      return absl::InvalidArgumentError(
          absl::StrCat("a question of ", conversation.prompt.size(), " tokens does not fit behind the document: ", room,
                       " positions of the context are left; shorten the question that begins \"",
                       question.substr(0, ValidUtf8Prefix(std::string_view(question).substr(0, 40))), "\""));
    }
    conversations.push_back(std::move(conversation));
  }
  if (windows_.size() == 1 || conversations.empty()) return conversations;
  std::vector<const Conversation*> all;
  for (const Conversation& c : conversations) all.push_back(&c);
  std::vector<double> best(conversations.size());
  for (int64_t w = 0; w < window_count(); ++w) {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> memory, Window(w));
    size_t first = 0;
    for (const auto& group : GroupByRows(all, runtime_->task_rows)) {
      std::vector<double> scores;
      STILLHOUSE_RETURN_IF_ERROR(runtime_->Run([&](const Context& ctx) {
        scores = ScoreQuestions(ctx, runtime_->engine->weights(), group, memory);
        return absl::OkStatus();
      }));
      for (size_t i = 0; i < scores.size(); ++i) {
        if (w > 0 && scores[i] <= best[first + i]) continue;
        best[first + i] = scores[i];
        conversations[first + i].window = static_cast<int32_t>(w);
      }
      first += group.size();
    }
  }
  return conversations;
}

absl::Status Teacher::Answer(int64_t max_tokens, int64_t candidates, const std::function<void()>& done,
                             int64_t* generated, std::vector<Conversation>* conversations) {
  // Window by window: a batch reads as few memories as possible.
  std::vector<size_t> order;
  for (size_t i = 0; i < conversations->size(); ++i) {
    if ((*conversations)[i].answer.empty()) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return (*conversations)[a].window < (*conversations)[b].window; });
  return GenerateAll(
      *runtime_, static_cast<int64_t>(order.size()),
      [&](int64_t i) -> absl::StatusOr<GenerationJob> {
        const Conversation& c = (*conversations)[order[static_cast<size_t>(i)]];
        GenerationJob job;
        job.prompt = c.prompt;
        STILLHOUSE_ASSIGN_OR_RETURN(job.memory, Window(c.window));
        job.sampling.temperature = 0.0f;
        job.sampling.logprobs = static_cast<int32_t>(candidates);
        job.max_tokens = max_tokens;
        return job;
      },
      [&](int64_t i, GenerationOutput output) -> absl::Status {
        Conversation& c = (*conversations)[order[static_cast<size_t>(i)]];
        *generated += static_cast<int64_t>(output.tokens.size());
        const bool only_end = output.tokens.size() == 1 && output.reason == FinishReason::kStopId;
        if (!only_end) {
          c.answer_teacher.width = static_cast<int32_t>(candidates);
          for (const SampledToken& token : output.tokens) {
            c.answer.push_back(token.id);
            if (candidates == 0) continue;
            std::vector<std::pair<int32_t, float>> top = token.top;
            top.resize(static_cast<size_t>(candidates), {-1, 0.0f});
            // The drawn token is among the candidates whatever the sampler's masks did.
            const bool there = std::any_of(top.begin(), top.end(), [&](const auto& t) { return t.first == token.id; });
            if (!there) top.back() = {token.id, token.logprob};
            for (const auto& [id, logprob] : top) {
              c.answer_teacher.ids.push_back(id);
              c.answer_teacher.logprobs.push_back(logprob);
            }
          }
        }
        if (done) done();
        return absl::OkStatus();
      });
}

}  // namespace stillhouse
