// What the attention kernels share: queries of a tile, and the walk over the slots that they see.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_

#include <cstdint>
#include <cstring>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/cluster.cuh"

namespace stillhouse::cuda {

// Row `i` of a tile, as a row of the step. `rows` is AttentionItem::rows.
__device__ __forceinline__ int64_t RowOf(const int32_t* table, int32_t rows, int i) {
  return rows < 0 ? static_cast<int64_t>(~rows) + i : table[rows + i];
}

// Where in an item the share of a block of its cluster begins: steps are dealt evenly.
template <int kStep>
__device__ __forceinline__ int ShareBegin(const AttentionItem& item, int rank) {
  const int steps = (item.slots + kStep - 1) / kStep, blocks = ClusterBlocks();
  return blocks == 1 ? rank * item.slots : min(steps * rank / blocks * kStep, item.slots);
}

// The slots of this block's.
template <int kStep>
__device__ __forceinline__ int ShareSlots(const AttentionItem& item) {
  return ShareBegin<kStep>(item, ClusterRank() + 1) - ShareBegin<kStep>(item, ClusterRank());
}

// At most kStep consecutive slots of one run and one KV head.
template <typename T>
struct SlotTile {
  const T* k = nullptr;
  const T* v = nullptr;
  const float* beta = nullptr;
  int64_t k_row = 0, v_row = 0;
  int slots = 0;  // 0: there are no more
  int limit = 0;  // row i of the tile of queries sees the first limit + i slots
  bool memory = false, vector = false;
};

// Walks over a range of slots, run by run. The current run is kept in registers.
template <typename T, int kStep>
class SlotCursor {
 public:
  __device__ SlotCursor(const AttentionRun* runs, int run, int slot, int slots, int causal_limit, int kv)
      : next_(runs + run), left_(slots), causal_limit_(causal_limit), kv_(kv) {
    if (left_ <= 0) return;
    for (; slot >= next_->slots; ++next_) slot -= next_->slots;
    Begin(slot);
  }

  // An item's slots, or the share of them of this block of its cluster.
  __device__ SlotCursor(const AttentionItems& items, const AttentionItem& item, int kv)
      : SlotCursor(items.runs, item.run, item.slot + ShareBegin<kStep>(item, ClusterRank()), ShareSlots<kStep>(item),
                   item.causal_limit, kv) {}

  __device__ int left() const { return left_; }

  __device__ SlotTile<T> Next() {
    SlotTile<T> tile;
    if (left_ <= 0) return tile;
    while (there_ <= 0) Begin(0);
    const int slots = min(min(there_, left_), kStep);
    tile.k = k_;
    tile.v = v_;
    tile.beta = beta_;
    tile.k_row = k_row_;
    tile.v_row = v_row_;
    tile.slots = slots;
    tile.limit = causal_ ? limit_ : slots;
    tile.memory = memory_;
    tile.vector = vector_;
    k_ += slots * k_row_;
    v_ += slots * v_row_;
    if (beta_) beta_ += slots;
    limit_ -= slots;
    there_ -= slots;
    left_ -= slots;
    return tile;
  }

 private:
  __device__ void Begin(int slot) {
    const AttentionRun& run = *next_++;
    k_row_ = run.k_row;
    v_row_ = run.v_row;
    k_ = static_cast<const T*>(run.k) + kv_ * run.k_head + slot * k_row_;
    v_ = static_cast<const T*>(run.v) + kv_ * run.v_head + slot * v_row_;
    beta_ = run.beta ? run.beta + kv_ * run.beta_head + slot : nullptr;
    there_ = run.slots - slot;
    limit_ = causal_limit_ - slot;
    memory_ = run.memory;
    causal_ = run.causal;
    vector_ = run.vector;
  }

  const AttentionRun* next_;
  int left_, causal_limit_, kv_;
  const T* k_ = nullptr;
  const T* v_ = nullptr;
  const float* beta_ = nullptr;
  int64_t k_row_ = 0, v_row_ = 0;
  int there_ = 0, limit_ = 0;
  bool memory_ = false, causal_ = false, vector_ = false;
};

// Tables that travel with a launch; kBytes = 0: there are none.
template <int kBytes>
struct InlineTables {
  alignas(16) char bytes[kBytes > 0 ? kBytes : 16];
};

template <int kBytes>
__device__ __forceinline__ AttentionItems Resolve(const AttentionItems& items, const InlineTables<kBytes>& tables) {
  if constexpr (kBytes == 0) return items;
  AttentionItems resolved = items;
  resolved.runs = reinterpret_cast<const AttentionRun*>(tables.bytes + reinterpret_cast<uintptr_t>(items.runs));
  resolved.items = reinterpret_cast<const AttentionItem*>(tables.bytes + reinterpret_cast<uintptr_t>(items.items));
  resolved.rows = reinterpret_cast<const int32_t*>(tables.bytes + reinterpret_cast<uintptr_t>(items.rows));
  resolved.places = reinterpret_cast<const AttentionPlaces*>(tables.bytes + reinterpret_cast<uintptr_t>(items.places));
  return resolved;
}

// For the launch: the tables as a kernel parameter.
template <int kBytes>
InlineTables<kBytes> TablesOf(const char* host) {
  InlineTables<kBytes> tables = {};
  if constexpr (kBytes > 0) std::memcpy(tables.bytes, host, kBytes);
  return tables;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_
