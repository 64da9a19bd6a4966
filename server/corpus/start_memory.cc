#include "server/corpus/start_memory.h"

#include <algorithm>
#include <numeric>

#include "kernels/base/status.h"
#include "server/compact/attention_matching.h"
#include "server/corpus/seeds.h"
#include "server/train/distill_batch.h"

namespace stillhouse {
namespace {

// Rows of conversations that are run for one reference query: queries of more conversations say more than all of few.
constexpr int64_t kRowsPerQuery = 2;

constexpr const char* kGeneralQuestions[] = {
    "What is the text above about?",
    "Summarize the text above.",
    "List the most important facts of the text above.",
    "Who and what is mentioned in the text above, and when?",
};

template <typename T>
void Shuffle(std::vector<T>* items, uint64_t seed) {
  for (size_t i = items->size(); i > 1; --i) std::swap((*items)[i - 1], (*items)[MixDraw(seed, i) % i]);
}

// Slots that each window may give: all of the first, in the others only tokens after the header, which is the same in
// all of them.
struct Allotment {
  std::vector<int64_t> slots;
  std::vector<int64_t> first_candidate;
};

Allotment Allot(const Teacher& teacher, int64_t slots) {
  Allotment out;
  std::vector<int64_t> lengths, capacities;
  for (int64_t w = 0; w < teacher.window_count(); ++w) {
    const int64_t first = w == 0 ? 0 : static_cast<int64_t>(teacher.document().header.size());
    out.first_candidate.push_back(first);
    lengths.push_back(teacher.framed_tokens(w));
    capacities.push_back(teacher.framed_tokens(w) - first);
  }
  out.slots = AllotSlots(slots, lengths, capacities);
  return out;
}

absl::StatusOr<std::vector<Conversation>> GeneralConversations(const BuildRuntime& runtime) {
  std::vector<Conversation> conversations;
  for (const char* question : kGeneralQuestions) {
    Conversation c;
    STILLHOUSE_ASSIGN_OR_RETURN(c.prompt, QuestionPrompt(*runtime.chat, question));
    c.answer = {runtime.chat->end_of_turn()};  // predicts nothing here: only the prompt's rows are run
    conversations.push_back(std::move(c));
  }
  return conversations;
}

// Runs conversations behind a window until enough of their rows were seen, and keeps `wanted` rows' queries.
absl::Status CollectQueries(const BuildRuntime& runtime, std::vector<const Conversation*> conversations,
                            const std::shared_ptr<const Memory>& memory, int64_t wanted, uint64_t seed,
                            QueryCollector* collector) {
  Shuffle(&conversations, seed);
  int64_t rows = 0;
  size_t used = 0;
  while (used < conversations.size() && rows < wanted * kRowsPerQuery) rows += conversations[used++]->rows();
  conversations.resize(used);
  // Rows are drawn over the whole of it.
  std::vector<int64_t> drawn(static_cast<size_t>(rows));
  std::iota(drawn.begin(), drawn.end(), int64_t{0});
  Shuffle(&drawn, MixDraw(seed, 0x726f7773));
  drawn.resize(static_cast<size_t>(std::min(rows, wanted)));
  std::sort(drawn.begin(), drawn.end());
  int64_t offset = 0;
  auto next = drawn.begin();
  for (const auto& group : GroupByRows(conversations, runtime.task_rows)) {
    int64_t group_rows = 0;
    for (const Conversation* c : group) group_rows += c->rows();
    std::vector<int32_t> kept;
    while (next != drawn.end() && *next < offset + group_rows) kept.push_back(static_cast<int32_t>(*next++ - offset));
    offset += group_rows;
    if (kept.empty()) continue;
    STILLHOUSE_RETURN_IF_ERROR(runtime.Run([&](const Context& ctx) {
      DistillBatch batch = MakeDistillBatch(group, memory);
      batch.batch.output_rows.clear();
      ForwardOptions options;
      options.observe_queries = collector->Observer(ctx, std::move(kept));
      Forward(ctx, runtime.engine->weights(), batch.batch, options);
      return absl::OkStatus();
    }));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StartMemory> MatchAttention(const BuildRuntime& runtime, const AttentionMatchingSpec& spec,
                                           int64_t slots, uint64_t seed,
                                           const std::vector<const Conversation*>& conversations, Teacher* teacher,
                                           const std::function<absl::Status(double)>& tick) {
  const ModelConfig& config = runtime.config();
  const Allotment allotment = Allot(*teacher, slots);
  const int64_t windows = teacher->window_count();
  const int64_t granted = std::accumulate(allotment.slots.begin(), allotment.slots.end(), int64_t{0});
  STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<Conversation> general, GeneralConversations(runtime));

  std::vector<std::shared_ptr<const Memory>> memories;
  std::vector<QueryCollector> collectors;
  for (int64_t w = 0; w < windows; ++w) {
    collectors.emplace_back(config.layers);
    std::vector<const Conversation*> about;
    for (const Conversation* c : conversations) {
      if (c->window == w) about.push_back(c);
    }
    if (about.empty()) {
      for (const Conversation& c : general) about.push_back(&c);
    }
    STILLHOUSE_ASSIGN_OR_RETURN(std::shared_ptr<const Memory> memory, teacher->Window(w));
    const int64_t wanted =
        std::max<int64_t>(16, spec.queries * allotment.slots[static_cast<size_t>(w)] / std::max<int64_t>(1, granted));
    STILLHOUSE_RETURN_IF_ERROR(CollectQueries(runtime, std::move(about), memory, wanted,
                                              MixDraw(seed, 0x71756572 + static_cast<uint64_t>(w)),
                                              &collectors.back()));
    memories.push_back(std::move(memory));
    STILLHOUSE_RETURN_IF_ERROR(tick(0.4 * static_cast<double>(w + 1) / static_cast<double>(windows)));
  }

  AttentionMatchingOptions options;
  options.ridge = spec.ridge;
  options.fit_beta = spec.fit_beta;
  options.fit_values = spec.fit_values;
  StartMemory out;
  out.memory = std::make_shared<Memory>();
  out.memory->slots = granted;
  out.memory->next_position = teacher->next_position();
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    LayerMatch match;
    STILLHOUSE_RETURN_IF_ERROR(runtime.Run([&](const Context& ctx) -> absl::Status {
      std::vector<MatchPart> parts;
      for (int64_t w = 0; w < windows; ++w) {
        const LayerKv& kv = memories[static_cast<size_t>(w)]->layers[static_cast<size_t>(layer)];
        MatchPart part;
        part.k = kv.k;
        part.v = kv.v;
        part.queries = collectors[static_cast<size_t>(w)].Layer(ctx, layer);
        part.slots = allotment.slots[static_cast<size_t>(w)];
        part.first_candidate = allotment.first_candidate[static_cast<size_t>(w)];
        part.keep_first = w == 0;
        parts.push_back(std::move(part));
      }
      STILLHOUSE_ASSIGN_OR_RETURN(match, MatchLayer(ctx, parts, config.attention_scale(), options));
      return absl::OkStatus();
    }));
    // Token numbers become positions.
    std::vector<int32_t> positions = std::move(match.tokens);
    int64_t slot = 0;
    for (int64_t w = 0; w < windows; ++w) {
      const int32_t shift = static_cast<int32_t>(teacher->next_position() - teacher->framed_tokens(w));
      for (int64_t i = 0; i < allotment.slots[static_cast<size_t>(w)]; ++i, ++slot) {
        for (int64_t h = 0; h < config.kv_heads; ++h) positions[static_cast<size_t>(h * granted + slot)] += shift;
      }
    }
    out.positions.push_back(std::move(positions));
    out.memory->layers.push_back(std::move(match.kv));
    STILLHOUSE_RETURN_IF_ERROR(tick(0.4 + 0.6 * static_cast<double>(layer + 1) / static_cast<double>(config.layers)));
  }
  return out;
}

absl::StatusOr<StartMemory> TakePrefix(const BuildRuntime& runtime, int64_t slots, Teacher* teacher) {
  const Allotment allotment = Allot(*teacher, slots);
  const ModelConfig& config = runtime.config();
  StartMemory out;
  int32_t position = 0;
  std::vector<std::shared_ptr<Memory>> pieces;
  for (int64_t w = 0; w < teacher->window_count(); ++w) {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> window, teacher->Window(w));
    const int64_t first = allotment.first_candidate[static_cast<size_t>(w)];
    const int64_t count = allotment.slots[static_cast<size_t>(w)];
    const int32_t shift = static_cast<int32_t>(teacher->next_position() - teacher->framed_tokens(w));
    std::vector<int32_t> from(static_cast<size_t>(count)), to(static_cast<size_t>(count));
    std::iota(from.begin(), from.end(), shift + static_cast<int32_t>(first));
    std::iota(to.begin(), to.end(), position);
    position += static_cast<int32_t>(count);
    STILLHOUSE_RETURN_IF_ERROR(runtime.Run([&](const Context& ctx) {
      pieces.push_back(SliceMemory(ctx, *window, first, first + count));
      if (from != to) {
        for (LayerKv& kv : pieces.back()->layers) kv.k = RotateKeys(ctx, config.rope, kv.k, from, to);
      }
      return absl::OkStatus();
    }));
  }
  if (pieces.size() == 1) {
    out.memory = std::move(pieces[0]);
  } else {
    out.memory = std::make_shared<Memory>();
    out.memory->slots = position;
    STILLHOUSE_RETURN_IF_ERROR(runtime.Run([&](const Context& ctx) {
      for (int64_t layer = 0; layer < config.layers; ++layer) {
        LayerKv kv{ctx.EmptyF32({config.kv_heads, position, config.head_dim}),
                   ctx.EmptyF32({config.kv_heads, position, config.head_dim}), Tensor()};
        int64_t slot = 0;
        for (const std::shared_ptr<Memory>& piece : pieces) {
          const LayerKv& from = piece->layers[static_cast<size_t>(layer)];
          ctx.backend->Copy(from.k, kv.k.Slice(1, slot, slot + piece->slots));
          ctx.backend->Copy(from.v, kv.v.Slice(1, slot, slot + piece->slots));
          slot += piece->slots;
        }
        out.memory->layers.push_back(std::move(kv));
      }
      return absl::OkStatus();
    }));
  }
  out.memory->next_position = position;
  return out;
}

}  // namespace stillhouse
