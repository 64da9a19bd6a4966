// The memory that training starts from, or that attention matching ends with.
#ifndef STILLHOUSE_SERVER_CORPUS_START_MEMORY_H_
#define STILLHOUSE_SERVER_CORPUS_START_MEMORY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/corpus/build_spec.h"
#include "server/corpus/teacher.h"

namespace stillhouse {

struct StartMemory {
  std::shared_ptr<Memory> memory;
  // Of the keys, per layer [kv_heads, slots]; empty: slot i at position i.
  std::vector<std::vector<int32_t>> positions;
};

// Slots chosen and fitted to the attention of the conversations' own queries (compact/attention_matching.h), over all
// windows at once. Queries continue where they do behind a window of the document. Windows that no conversation is
// about are asked general questions. `tick(fraction)` after each task.
absl::StatusOr<StartMemory> MatchAttention(const BuildRuntime& runtime, const AttentionMatchingSpec& spec,
                                           int64_t slots, uint64_t seed,
                                           const std::vector<const Conversation*>& conversations, Teacher* teacher,
                                           const std::function<absl::Status(double)>& tick);

// The first tokens of the document (of every window, in proportion), moved to follow each other; queries continue
// behind them.
absl::StatusOr<StartMemory> TakePrefix(const BuildRuntime& runtime, int64_t slots, Teacher* teacher);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_START_MEMORY_H_
