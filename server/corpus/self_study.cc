#include "server/corpus/self_study.h"

#include <algorithm>
#include <set>

#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/corpus/seeds.h"
#include "server/token/utf8.h"
#include "server/train/scorer.h"

namespace stillhouse {
namespace {

constexpr size_t kShortestQuestion = 9, kLongestQuestion = 199;  // bytes
// Rounds of drafts: each asks for what is still missing, so that a document with little to ask about ends.
constexpr int kMostRounds = 4;
constexpr int64_t kDraftsPerChunk = 8;  // of one round, before another cut of the document is made

// Words before a question that hold it to the text; they are not part of it.
constexpr std::string_view kAnchor = "Using the text above, answer this question about it:";

struct Draft {
  TokenRange chunk;
  Seed seed;
  uint64_t sampling_seed = 0;
};

// The jobs of one round. Every job has a place in the document, evenly spread; chunks are cut anew for each pass, so
// that facts next to a cut in one are inside a chunk in another.
std::vector<Draft> PlanRound(const BuildRuntime& runtime, const SelfStudySpec& spec, const Document& document,
                             uint64_t seed, int round, int64_t jobs) {
  std::vector<Draft> drafts;
  const int64_t room = runtime.engine->context_limit() - document.frame() - spec.max_question_tokens - 64;
  const int64_t max = std::clamp<int64_t>(spec.max_chunk_tokens, 1, std::max<int64_t>(1, room / 2));
  const int64_t min = std::min(spec.min_chunk_tokens, max);
  const int64_t total = static_cast<int64_t>(document.tokens.size());
  const int64_t chunks = std::max<int64_t>(1, 2 * total / (min + max));
  const int64_t passes = std::clamp<int64_t>(jobs / (chunks * kDraftsPerChunk), 1, 4);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const uint64_t pass_seed = MixDraw(seed, 1000 * static_cast<uint64_t>(round) + static_cast<uint64_t>(pass));
    const std::vector<TokenRange> cut = CutChunks(*runtime.tokenizer, document.tokens, min, max, pass_seed);
    const int64_t from = jobs * pass / passes, to = jobs * (pass + 1) / passes;
    size_t chunk = 0;
    for (int64_t i = from; i < to; ++i) {
      const int64_t place = (2 * (i - from) + 1) * total / (2 * (to - from));
      while (cut[chunk].end <= place) ++chunk;
      const uint64_t draw = MixDraw(pass_seed ^ 0x64726166u, static_cast<uint64_t>(i));
      drafts.push_back({cut[chunk], DrawSeed(spec.seed_kinds, draw), MixDraw(draw, 4)});
    }
  }
  return drafts;
}

absl::Status RunDrafts(const BuildRuntime& runtime, const SelfStudySpec& spec, const Document& document,
                       const std::vector<Draft>& drafts, size_t offset, const std::function<absl::Status()>& tick,
                       SelfStudyState* state) {
  std::vector<size_t> missing;
  for (size_t i = 0; i < drafts.size(); ++i) {
    if (!state->drafts[offset + i]) missing.push_back(i);
  }
  TokenRange held{-1, -1};
  std::shared_ptr<const Memory> memory;
  return GenerateAll(
      runtime, static_cast<int64_t>(missing.size()),
      [&](int64_t i) -> absl::StatusOr<GenerationJob> {
        const Draft& draft = drafts[missing[static_cast<size_t>(i)]];
        if (draft.chunk.begin != held.begin || draft.chunk.end != held.end) {
          // The chunk, and the beginning of the user's turn, which is the same for all its questions.
          std::vector<int32_t> ids = document.Framed(draft.chunk);
          STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<int32_t> turn, runtime.chat->EncodeTurn("user", kAnchor));
          ids.insert(ids.end(), turn.begin(), turn.end() - static_cast<int64_t>(document.footer.size()));
          STILLHOUSE_ASSIGN_OR_RETURN(memory, runtime.PrefillMemory(ids, nullptr));
          held = draft.chunk;
        }
        GenerationJob job;
        job.memory = memory;
        // The turn is not ended: the model goes on with it.
        job.prompt = runtime.tokenizer->Encode(StrCat(" ", draft.seed.lead));
        job.sampling.temperature = static_cast<float>(spec.temperature);
        job.sampling.seed = draft.sampling_seed;
        job.max_tokens = spec.max_question_tokens;
        job.keep_going = [tokenizer = runtime.tokenizer, question = draft.seed.question](const SampledToken& token) {
          const std::string_view bytes = tokenizer->TokenBytes(token.id);
          return bytes.find('?') == std::string_view::npos && bytes.find('\n') == std::string_view::npos &&
                 (question || bytes.find('.') == std::string_view::npos);
        };
        return job;
      },
      [&](int64_t i, GenerationOutput output) -> absl::Status {
        const size_t job = missing[static_cast<size_t>(i)];
        std::vector<int32_t> ids;
        for (const SampledToken& token : output.tokens) ids.push_back(token.id);
        state->generated_tokens += static_cast<int64_t>(ids.size());
        state->drafts[offset + job] =
            std::string(drafts[job].seed.lead) + runtime.tokenizer->Decode(ids, /*skip_control=*/true);
        return tick();
      });
}

}  // namespace

std::optional<std::string> CleanQuestion(std::string_view draft) {
  std::string text = ToValidUtf8(draft);
  if (const size_t mark = text.find('?'); mark != std::string::npos) text.resize(mark + 1);
  if (const size_t line = text.find('\n'); line != std::string::npos) text.resize(line);
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
  if (text.size() < kShortestQuestion || text.size() > kLongestQuestion) return std::nullopt;
  return text;
}

std::string QuestionKey(std::string_view question) {
  std::string key;
  for (char c : question) {
    if (c >= 'A' && c <= 'Z') {
      key += static_cast<char>(c - 'A' + 'a');
    } else if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || static_cast<unsigned char>(c) >= 0x80) {
      key += c;
    }
  }
  return key;
}

void SelfStudyState::AppendTo(ByteWriter* out) const {
  out->Int(static_cast<int64_t>(drafts.size()));
  for (const std::optional<std::string>& draft : drafts) {
    out->Int(draft ? 1 : 0);
    out->Text(draft ? *draft : std::string());
  }
  out->Int(questions_done ? 1 : 0);
  out->Int(answers_done ? 1 : 0);
  out->Int(generated_tokens);
  // Conversations without an answer yet are kept by their prompt.
  for (const std::vector<Conversation>* set : {&generated, &given}) {
    out->Int(static_cast<int64_t>(set->size()));
    for (const Conversation& c : *set) {
      out->Int(c.answer.empty() ? 0 : 1);
      if (c.answer.empty()) {
        out->Int(c.window);
        out->Array(c.prompt);
      } else {
        AppendConversation(c, out);
      }
    }
  }
}

absl::Status SelfStudyState::ReadFrom(ByteReader* in) {
  int64_t count = 0, flag = 0, done = 0;
  STILLHOUSE_RETURN_IF_ERROR(in->Length(16, &count));
  drafts.assign(static_cast<size_t>(count), std::nullopt);
  for (std::optional<std::string>& draft : drafts) {
    std::string text;
    STILLHOUSE_RETURN_IF_ERROR(in->Int(&flag));
    STILLHOUSE_RETURN_IF_ERROR(in->Text(&text));
    if (flag != 0) draft = std::move(text);
  }
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&flag));
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&done));
  questions_done = flag != 0;
  answers_done = done != 0;
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&generated_tokens));
  for (std::vector<Conversation>* set : {&generated, &given}) {
    STILLHOUSE_RETURN_IF_ERROR(in->Length(24, &count));
    set->assign(static_cast<size_t>(count), Conversation());
    for (Conversation& c : *set) {
      STILLHOUSE_RETURN_IF_ERROR(in->Int(&flag));
      if (flag == 0) {
        int64_t window = 0;
        STILLHOUSE_RETURN_IF_ERROR(in->Int(&window));
        c.window = static_cast<int32_t>(window);
        STILLHOUSE_RETURN_IF_ERROR(in->Array(&c.prompt));
      } else {
        STILLHOUSE_RETURN_IF_ERROR(ReadConversation(in, &c));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status RunSelfStudy(const BuildRuntime& runtime, const SelfStudySpec& spec, bool teach_questions, uint64_t seed,
                          Teacher* teacher, const std::function<absl::Status(double)>& tick, SelfStudyState* state) {
  if (state->answers_done) return absl::OkStatus();
  const Document& document = teacher->document();
  const int64_t wanted = spec.conversations;
  // Answers are longer than questions: about a third and two thirds of the work.
  constexpr double kDraftShare = 0.35;
  if (!state->questions_done) {
    std::set<std::string> seen;
    std::vector<std::pair<std::string, TokenRange>> questions;
    size_t offset = 0;
    for (int round = 0; round < kMostRounds && static_cast<int64_t>(questions.size()) < wanted; ++round) {
      const int64_t missing = wanted - static_cast<int64_t>(questions.size());
      const int64_t jobs = missing + missing / 8 + 4;
      const std::vector<Draft> drafts = PlanRound(runtime, spec, document, seed, round, jobs);
      if (state->drafts.size() < offset + drafts.size()) state->drafts.resize(offset + drafts.size());
      auto count_tick = [&]() -> absl::Status {
        const auto done = std::count_if(state->drafts.begin(), state->drafts.end(), [](const auto& d) { return !!d; });
        return tick(kDraftShare * std::min(1.0, static_cast<double>(done) / static_cast<double>(wanted)));
      };
      STILLHOUSE_RETURN_IF_ERROR(RunDrafts(runtime, spec, document, drafts, offset, count_tick, state));
      std::vector<std::pair<std::string, TokenRange>> fresh;
      for (size_t i = 0; i < drafts.size(); ++i) {
        std::optional<std::string> question = CleanQuestion(*state->drafts[offset + i]);
        if (question && seen.insert(QuestionKey(*question)).second) {
          fresh.emplace_back(*std::move(question), drafts[i].chunk);
        }
      }
      // Too many: every place of the document loses its share.
      const int64_t take = std::min<int64_t>(missing, static_cast<int64_t>(fresh.size()));
      for (int64_t i = 0; i < take; ++i) {
        questions.push_back(std::move(fresh[static_cast<size_t>(i * static_cast<int64_t>(fresh.size()) / take)]));
      }
      offset += drafts.size();
    }
    state->generated.clear();
    for (const auto& [question, chunk] : questions) {
      Conversation conversation;
      conversation.window = WindowOf(teacher->windows(), chunk);
      STILLHOUSE_ASSIGN_OR_RETURN(conversation.prompt, QuestionPrompt(*runtime.chat, question));
      state->generated.push_back(std::move(conversation));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(state->given, teacher->PlaceQuestions(spec.questions));
    state->drafts.clear();
    state->questions_done = true;
    STILLHOUSE_RETURN_IF_ERROR(tick(kDraftShare));
  }

  const double total = static_cast<double>(state->generated.size() + state->given.size());
  for (std::vector<Conversation>* set : {&state->generated, &state->given}) {
    absl::Status ticked;
    STILLHOUSE_RETURN_IF_ERROR(teacher->Answer(
        spec.max_answer_tokens, spec.top_logprobs,
        [&] {
          int64_t answered = 0;
          for (const std::vector<Conversation>* s : {&state->generated, &state->given}) {
            answered += std::count_if(s->begin(), s->end(), [](const Conversation& c) { return !c.answer.empty(); });
          }
          if (ticked.ok()) ticked = tick(kDraftShare + (1.0 - kDraftShare) * static_cast<double>(answered) / total);
        },
        &state->generated_tokens, set));
    STILLHOUSE_RETURN_IF_ERROR(ticked);
    std::erase_if(*set, [](const Conversation& c) { return c.answer.empty(); });
  }
  if (teach_questions) {
    for (std::vector<Conversation>* set : {&state->generated, &state->given}) {
      for (int64_t window = 0; window < teacher->window_count(); ++window) {
        std::vector<const Conversation*> of_window;
        for (Conversation& c : *set) {
          if (c.window == window && c.prompt_teacher.width == 0) of_window.push_back(&c);
        }
        if (of_window.empty()) continue;
        STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> memory, teacher->Window(window));
        for (const auto& group : GroupByRows(of_window, runtime.task_rows)) {
          STILLHOUSE_RETURN_IF_ERROR(runtime.Run([&](const Context& ctx) {
            std::vector<Conversation*> mutable_group;
            for (const Conversation* c : group) mutable_group.push_back(const_cast<Conversation*>(c));
            TeachQuestions(ctx, runtime.engine->weights(), mutable_group, memory, spec.top_logprobs);
            return absl::OkStatus();
          }));
        }
      }
    }
  }
  state->answers_done = true;
  return tick(1.0);
}

}  // namespace stillhouse
