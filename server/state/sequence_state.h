// What a running sequence remembers: memories that it shares, and pages of its own.
#ifndef STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_
#define STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "server/model/config.h"
#include "server/state/memory.h"

namespace stillhouse {

// Lends pages of private keys and values under a budget. A page holds `kPageSlots` slots of every layer:
// f32 [layers, 2, kv_heads, kPageSlots, head_dim]. Any thread.
class PagePool {
 public:
  static constexpr int64_t kPageSlots = 64;

  // `budget_bytes` bounds all pages lent at once.
  PagePool(const Context& ctx, const ModelConfig& config, int64_t budget_bytes);

  int64_t page_bytes() const { return page_bytes_; }
  int64_t total_pages() const { return total_pages_; }
  int64_t free_pages() const;

  // All `count` pages or none: RESOURCE_EXHAUSTED.
  absl::Status Take(int64_t count, std::vector<Tensor>* pages);
  void Return(std::vector<Tensor> pages);

 private:
  Context ctx_;
  Shape shape_;
  int64_t page_bytes_ = 0;
  int64_t total_pages_ = 0;
  mutable std::mutex mutex_;
  int64_t lent_ = 0;
};

// One sequence. Owned by whoever runs it (the engine, a trainer); used by one thread. Destroying it returns its pages
// and drops its memories.
class SequenceState {
 public:
  // Attends to `memories` in this order, then to its own rows. Without a pool it keeps no rows of its own: one pass
  // over rows that see each other and the memories (training, scoring).
  SequenceState(std::vector<std::shared_ptr<const Memory>> memories, PagePool* pool = nullptr);
  ~SequenceState();
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  // Position of the next token: the memories' next positions added up, then one per own row.
  int64_t next_position() const { return start_position_ + rows_; }
  int64_t start_position() const { return start_position_; }
  int64_t rows() const { return rows_; }  // own rows kept so far
  int64_t stored_slots() const;           // of the memories
  int64_t pages() const { return static_cast<int64_t>(pages_.size()); }
  bool keeps_rows() const { return pool_ != nullptr; }
  const std::vector<std::shared_ptr<const Memory>>& memories() const { return memories_; }

  // Makes room for `count` more rows. RESOURCE_EXHAUSTED leaves the state as it was.
  absl::Status Reserve(int64_t count);
  // Called by Forward: own rows of one layer, [kv_heads, filled slots, head_dim] per page …
  struct Run {
    Tensor k, v;
  };
  std::vector<Run> OwnRuns(int64_t layer) const;
  // … writes of rows [row_begin, row_begin + count) of k and v ([R, kv_heads, head_dim]) after the kept ones …
  void Append(const Context& ctx, int64_t layer, const Tensor& k, const Tensor& v, int64_t row_begin, int64_t count);
  // … and, after all layers, the count of new rows.
  void Advance(int64_t count) { rows_ += count; }
  // Forgets own rows from `rows` on (pages that are no longer needed go back).
  void Truncate(int64_t rows);

  // A Memory with its own contiguous copy of the kept rows (the memories are not copied): a FULL cache, a teacher's
  // prefix. Its next_position is this sequence's.
  std::shared_ptr<Memory> Freeze(const Context& ctx, const ModelConfig& config) const;

 private:
  std::vector<std::shared_ptr<const Memory>> memories_;
  PagePool* pool_;
  std::vector<Tensor> pages_;
  int64_t start_position_ = 0;
  int64_t rows_ = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_
