#include "server/train/distill_batch.h"

#include <algorithm>

namespace stillhouse {
namespace {

void AddRow(int32_t target, const Candidates& teacher, size_t token, DistillBatch* out) {
  out->targets.push_back(target);
  const size_t begin = out->ids.size();
  out->ids.resize(begin + static_cast<size_t>(out->width), -1);
  out->logprobs.resize(out->ids.size(), 0.0f);
  const size_t width = static_cast<size_t>(teacher.width);
  for (size_t i = 0; i < width; ++i) {
    out->ids[begin + i] = teacher.ids[token * width + i];
    out->logprobs[begin + i] = teacher.logprobs[token * width + i];
  }
}

}  // namespace

DistillBatch MakeDistillBatch(const std::vector<const Conversation*>& conversations,
                              const std::shared_ptr<const Memory>& memory, Supervise supervise) {
  DistillBatch out;
  for (const Conversation* c : conversations) {
    out.width = std::max({out.width, c->answer_teacher.width, c->prompt_teacher.width});
  }
  std::vector<std::shared_ptr<const Memory>> memories;
  if (memory) memories.push_back(memory);
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < conversations.size(); ++i) {
    const Conversation& c = *conversations[i];
    STILLHOUSE_CHECK(!c.prompt.empty() && !c.answer.empty());
    out.states.push_back(std::make_unique<SequenceState>(memories));
    tokens = c.prompt;
    tokens.insert(tokens.end(), c.answer.begin(), c.answer.end() - 1);
    const int32_t begin = static_cast<int32_t>(out.batch.rows());
    out.batch.Add(out.states.back().get(), tokens, Batch::Outputs::kNone);
    if (supervise == Supervise::kAnswerAndQuestion) {
      for (size_t t = 1; t < c.prompt.size(); ++t) {
        out.batch.output_rows.push_back(begin + static_cast<int32_t>(t) - 1);
        AddRow(c.prompt[t], c.prompt_teacher, t - 1, &out);
      }
    }
    for (size_t t = 0; t < c.answer.size(); ++t) {
      out.batch.output_rows.push_back(begin + static_cast<int32_t>(c.prompt.size() + t) - 1);
      AddRow(c.answer[t], c.answer_teacher, t, &out);
    }
    out.sequence_of.resize(out.targets.size(), static_cast<int32_t>(i));
  }
  return out;
}

std::vector<std::vector<const Conversation*>> GroupByRows(const std::vector<const Conversation*>& conversations,
                                                          int64_t rows) {
  std::vector<std::vector<const Conversation*>> groups;
  int64_t filled = 0;
  for (const Conversation* c : conversations) {
    if (groups.empty() || filled + c->rows() > rows) {
      groups.emplace_back();
      filled = 0;
    }
    groups.back().push_back(c);
    filled += c->rows();
  }
  return groups;
}

}  // namespace stillhouse
