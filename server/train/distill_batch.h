// Conversations as one packed batch: rows of several conversations behind the same or different memories, and what the
// teacher says of the rows that count.
#ifndef STILLHOUSE_SERVER_TRAIN_DISTILL_BATCH_H_
#define STILLHOUSE_SERVER_TRAIN_DISTILL_BATCH_H_

#include <memory>
#include <vector>

#include "kernels/ops/context.h"
#include "server/model/forward.h"
#include "server/train/conversation.h"

namespace stillhouse {

// One conversation after another, each with a state of its own over the memory (which the forward pass reads once for
// all of them). Output rows are those that predict a supervised token, in order.
struct DistillBatch {
  Batch batch;
  std::vector<std::unique_ptr<SequenceState>> states;
  std::vector<int32_t> targets;      // the token that each output row predicts
  std::vector<int32_t> ids;          // [outputs, width], unused −1
  std::vector<float> logprobs;       // [outputs, width]
  std::vector<int32_t> sequence_of;  // the conversation (its place in this batch) of each output row
  int32_t width = 0;

  int64_t outputs() const { return static_cast<int64_t>(targets.size()); }
};

enum class Supervise : uint8_t {
  kAnswer,
  kAnswerAndQuestion,  // and the question's tokens from its second on
};

// `memory` may be null: the conversation begins the context. Conversations without kept candidates have ids −1.
DistillBatch MakeDistillBatch(const std::vector<const Conversation*>& conversations,
                              const std::shared_ptr<const Memory>& memory, Supervise supervise = Supervise::kAnswer);

// Splits conversations, in their order, into groups of at most `rows` rows (a longer one stands alone).
std::vector<std::vector<const Conversation*>> GroupByRows(const std::vector<const Conversation*>& conversations,
                                                          int64_t rows);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TRAIN_DISTILL_BATCH_H_
