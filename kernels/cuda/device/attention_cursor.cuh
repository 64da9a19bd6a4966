// What the attention kernels share: queries of a tile, and the walk over the slots that they see.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"

namespace stillhouse::cuda {

// Row `i` of a tile, as a row of the step. `rows` is AttentionItem::rows.
__device__ __forceinline__ int64_t RowOf(const int32_t* table, int32_t rows, int i) {
  return rows < 0 ? static_cast<int64_t>(~rows) + i : table[rows + i];
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

// Walks over a range of slots, run by run.
template <typename T, int kStep>
class SlotCursor {
 public:
  __device__ SlotCursor(const AttentionRun* runs, int run, int slot, int slots, int causal_limit, int kv)
      : runs_(runs), run_(run), slot_(slot), left_(slots), causal_limit_(causal_limit), kv_(kv) {}

  __device__ SlotTile<T> Next() {
    SlotTile<T> tile;
    while (left_ > 0) {
      const AttentionRun& run = runs_[run_];
      const int there = run.slots - slot_;
      if (there <= 0) {
        ++run_;
        slot_ = 0;
        continue;
      }
      const int slots = min(min(there, left_), kStep);
      tile.k = static_cast<const T*>(run.k) + kv_ * run.k_head + slot_ * run.k_row;
      tile.v = static_cast<const T*>(run.v) + kv_ * run.v_head + slot_ * run.v_row;
      tile.beta = run.beta ? run.beta + kv_ * run.beta_head + slot_ : nullptr;
      tile.k_row = run.k_row;
      tile.v_row = run.v_row;
      tile.slots = slots;
      tile.limit = run.causal ? causal_limit_ - slot_ : slots;
      tile.memory = run.memory;
      tile.vector = run.vector;
      slot_ += slots;
      left_ -= slots;
      return tile;
    }
    return tile;
  }

 private:
  const AttentionRun* runs_;
  int run_, slot_, left_, causal_limit_, kv_;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_CURSOR_CUH_
