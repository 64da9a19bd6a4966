// What a running sequence remembers: memories that it shares, and pages of its own.
#ifndef STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_
#define STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "kernels/ops/fused.h"
#include "server/model/config.h"
#include "server/state/memory.h"

namespace stillhouse {

// Lends pages of private keys and values under a budget. A page holds `kPageSlots` slots of every layer:
// [layers, 2, kv_heads, kPageSlots, head_dim], f32 or (on CUDA) bf16. Any thread.
class PagePool {
 public:
  static constexpr int64_t kPageSlots = 64;

  // What the pages of so many slots take of the context's device, its grains included.
  static int64_t BytesFor(const Context& ctx, const ModelConfig& config, DType dtype, int64_t slots);

  // `budget_bytes` bounds all pages lent at once.
  PagePool(const Context& ctx, const ModelConfig& config, int64_t budget_bytes, DType dtype = DType::kF32);

  DType dtype() const { return dtype_; }
  int64_t page_bytes() const { return page_bytes_; }
  int64_t total_pages() const { return total_pages_; }
  int64_t free_pages() const;

  // All `count` pages or none: RESOURCE_EXHAUSTED.
  absl::Status Take(int64_t count, std::vector<Tensor>* pages);
  void Return(std::vector<Tensor> pages);

  // The memory as sequences with these pages attend to it: itself, or a copy in the pages' type and the layout of
  // decode steps, the same one as long as somebody holds it. Null if the device has no memory left for the copy.
  std::shared_ptr<const Memory> Fitting(std::shared_ptr<const Memory> memory);

 private:
  Context ctx_;
  Shape shape_;
  DType dtype_;
  int64_t page_bytes_ = 0;
  int64_t total_pages_ = 0;
  mutable std::mutex mutex_;
  int64_t lent_ = 0;
  struct Copy {
    std::weak_ptr<const Memory> of, copy;
  };
  std::map<const Memory*, Copy> copies_;
};

// One sequence. Owned by whoever runs it (the engine, a trainer); used by one thread. Destroying it returns its pages
// and drops its memories.
class SequenceState {
 public:
  // Attends to `memories` (as they fit the pool's pages) in this order, then to its own rows. Without a pool it keeps
  // no rows of its own: one pass over rows that see each other and the memories (training, scoring).
  SequenceState(std::vector<std::shared_ptr<const Memory>> memories, PagePool* pool = nullptr);
  ~SequenceState();
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  // Another one for every state, and after every Truncate: with one id and as many rows it is the same keys and values.
  uint64_t id() const { return id_; }
  // Position of the next token: the memories' next positions added up, then one per own row.
  int64_t next_position() const { return start_position_ + rows_; }
  int64_t start_position() const { return start_position_; }
  int64_t rows() const { return rows_; }  // own rows kept so far
  int64_t stored_slots() const;           // of the memories
  int64_t pages() const { return static_cast<int64_t>(pages_.size()); }
  bool keeps_rows() const { return pool_ != nullptr; }
  DType dtype() const { return pool_ ? pool_->dtype() : DType::kF32; }  // of the rows that it keeps
  const std::vector<std::shared_ptr<const Memory>>& memories() const { return memories_; }

  // Makes room for `count` more rows. RESOURCE_EXHAUSTED leaves the state as it was.
  absl::Status Reserve(int64_t count);
  // Called by Forward: own rows of one layer, [kv_heads, filled slots, head_dim] per page …
  struct Run {
    Tensor k, v;
  };
  std::vector<Run> OwnRuns(int64_t layer) const;
  // … or of all layers at once,
  void AddOwnLayers(std::vector<KvLayers>* runs) const;
  // (what its memories are as such: nothing if their layers do not lie at equal distances in the pages' type)
  const std::vector<KvLayers>* MemoryLayers() const { return layered_ ? &memory_layers_ : nullptr; }
  // … writes of rows [row_begin, row_begin + count) of k and v ([R, kv_heads, head_dim]) after the kept ones …
  void Append(const Context& ctx, int64_t layer, const Tensor& k, const Tensor& v, int64_t row_begin, int64_t count);
  // (or the places that a kernel writes them to, two for each row, as KvRows has them: Reserve made the room)
  void AddPlaces(int64_t count, std::vector<int64_t>* places) const;
  // … and, after all layers, the count of new rows.
  void Advance(int64_t count) { rows_ += count; }
  // Forgets own rows from `rows` on (pages that are no longer needed go back).
  void Truncate(int64_t rows);

  // A Memory with its own contiguous f32 copy of the kept rows (the memories are not copied): a FULL cache, a teacher's
  // prefix. Its next_position is this sequence's.
  std::shared_ptr<Memory> Freeze(const Context& ctx, const ModelConfig& config) const;

 private:
  static uint64_t NextId();

  std::vector<std::shared_ptr<const Memory>> memories_;
  PagePool* pool_;
  std::vector<Tensor> pages_;
  std::vector<KvLayers> memory_layers_;
  bool layered_ = true;
  bool fits_ = true;  // there was memory for copies of the memories
  uint64_t id_ = NextId();
  int64_t start_position_ = 0;
  int64_t rows_ = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_STATE_SEQUENCE_STATE_H_
