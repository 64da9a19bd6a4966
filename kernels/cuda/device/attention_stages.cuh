// How keys and values come to the warpgroups that compute attention's tall tiles (attention_wgmma.cu): stages of shared
// memory, each a step of slots, and the warpgroup that fills them.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_STAGES_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_STAGES_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_maps.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/tensor_copy.cuh"
#include "kernels/cuda/device/wgmma.cuh"

namespace stillhouse::cuda::tall {

using Bf16 = __nv_bfloat16;

inline constexpr int kWidth = kAttentionTallWidth;
static_assert(kAttentionTall == 128);  // queries: 64 to a warpgroup
inline constexpr int kSlots = 128;     // of a step, whose halves are each of one run: pages are short
inline constexpr int kHalf = kSlots / 2;
static_assert(kHalf == kAttentionMapRows);
inline constexpr int kGroup = 128;  // threads of a warpgroup
inline constexpr int kThreads = 3 * kGroup;
inline constexpr int kStages = 3;
inline constexpr int kBlockBytes = 128 * 128;                 // 128 rows of 64 columns
inline constexpr int kTileBytes = kWidth / 64 * kBlockBytes;  // of 128 queries, keys or values

// What a step holds, beside keys and values.
struct Step {
  int slots[2], limit[2];  // row i of the tile of queries sees the first min(slots, limit + i) of a half
  int flags;
};
enum StepFlag {
  kMasked = 1,  // some row does not see all kSlots
  kLast = 2,    // of the block's share of the item
  kCopied = 4,  // threads copied some of it: tensor cores read it after a fence
  // Of the first half; twice that: of the second.
  kBiased = 8,   // slots have biases
  kMemory = 32,  // counted in stored_mass
};

struct Shared {
  alignas(1024) char q[kTileBytes];
  alignas(1024) char k[kStages][kTileBytes];
  alignas(1024) char v[kStages][kTileBytes];
  float beta[kStages][kSlots];
  Step step[kStages];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t landed;  // sums of the cluster's blocks
};
// Named barrier: the first tile's queries were asked for. Before that only the first keys are, for queries are needed
// at once and would come behind all slots that were.
inline constexpr int kQueriesAsked = 6;
inline constexpr int kBytes = static_cast<int>(sizeof(Shared)) + 1024;  // room to begin at a multiple of 1024

// Where the 16 bytes of columns [8·chunk, 8·chunk + 8) of a row lie in a tile.
__device__ __forceinline__ int TileByte(int row, int chunk) {
  return chunk / 8 * kBlockBytes + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

using Place = RingPlace<kStages>;

// Half a tile; zeros from row `slots` on.
__device__ __forceinline__ void LoadRows(char* tile, const Bf16* from, int64_t row, int slots) {
  constexpr int kChunks = kWidth / 8, kRowsAtOnce = kGroup / kChunks;
  const int c = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) % kGroup / kChunks;
  const Bf16* at = from + first * row + 8 * c;
  const int64_t step = kRowsAtOnce * row;
  char* const to = tile + TileByte(first, c);  // the rotation repeats every 8 rows
  static_assert(kRowsAtOnce == 8);
  if (slots == kHalf) {
#pragma unroll
    for (int r = 0; r < kHalf; r += kRowsAtOnce) {
      CopyAsync16(to + r * 128, at);
      at += step;
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kHalf; r += kRowsAtOnce) {
    CopyAsync16(to + r * 128, first + r < slots ? at : from, first + r < slots);
    at += step;
  }
}

// Up to kHalf slots of one run.
struct Piece {
  int run = 0, slot = 0, slots = 0;
  int limit = 0;  // as SlotTile::limit
  bool beta = false, memory = false;
  AttentionPlace k, v;  // of the slots, for the KV head
};

// Walks over an item's slots, or the block's share of them. As SlotCursor, but a run is read before the one ahead of it
// has ended, for pages are as short as such a read is long; and what only threads' copies need is left in the table of
// runs, for registers are few here.
class PieceCursor {
 public:
  __device__ PieceCursor(const AttentionItems& items, const AttentionItem& item, int kv)
      : items_(&items), run_(item.run - 1), left_(ShareSlots<kHalf>(item)), causal_limit_(item.causal_limit), kv_(kv) {
    if (left_ <= 0) return;
    Read(item.run);
    there_ = -(item.slot + ShareBegin<kHalf>(item, ClusterRank()));
  }

  __device__ int left() const { return left_; }
  __device__ int kv() const { return kv_; }

  __device__ Piece Next() {
    while (left_ > 0 && there_ <= 0) Begin(-there_);
    Piece piece = now_;
    piece.run = run_;
    piece.slots = min(min(there_, left_), kHalf);
    if (!causal_) piece.limit = piece.slots;
    Skip(piece.slots);
    left_ -= piece.slots;
    return piece;
  }

 private:
  __device__ void Read(int run) {
    const AttentionRun& from = items_->runs[run];
    ahead_.slots = from.slots;
    ahead_.causal = from.causal;
    ahead_.memory = from.memory;
    ahead_.beta = from.beta;
    if (items_->maps) ahead_.places = items_->places[run];
  }

  // Of the run that was read, from `slot` on.
  __device__ void Begin(int slot) {
    ++run_;
    there_ = ahead_.slots;
    causal_ = ahead_.causal;
    now_.slot = 0;
    now_.limit = causal_limit_;
    now_.beta = ahead_.beta;
    now_.memory = ahead_.memory;
    now_.k = Of(ahead_.places.k);
    now_.v = Of(ahead_.places.v);
    Skip(slot);
    if (there_ < left_) Read(run_ + 1);
  }

  __device__ AttentionPlace Of(const AttentionPlace& place) {
    return {place.map, place.row + kv_ * place.head_rows, 0, kv_ * place.head_columns};
  }

  __device__ void Skip(int slots) {
    now_.slot += slots;
    now_.limit -= slots;
    now_.k.row += slots;
    now_.v.row += slots;
    there_ -= slots;
  }

  const AttentionItems* items_;
  int run_, left_, causal_limit_, kv_;
  int there_ = 0;  // slots of the run from here on; where it lies ahead, those before its slot, negative
  bool causal_ = false;
  Piece now_;
  struct {
    int slots = 0;
    bool causal = false, memory = false;
    const float* beta = nullptr;
    AttentionPlaces places;
  } ahead_;
};

// The tiles of a block or of a cluster, (item, KV head) each, the longest first: dealt in turn, and back, so that all
// get about as much. All roles walk alike. kOnly: as many blocks, or clusters, as tiles.
template <bool kOnly>
class TileWalk {
 public:
  // At the first tile.
  __device__ TileWalk(const AttentionTensors& t, const AttentionItems& items)
      : items_(items), kv_heads_(t.kv_heads), total_(items.count * t.kv_heads) {
    Read(ClusterIndex());
    if constexpr (!kOnly) SkipIdle();
  }

  // False: there are no more tiles with something to do.
  __device__ bool there() const { return item_.row_count > 0; }
  __device__ const AttentionItem& item() const { return item_; }
  __device__ int kv() const { return kv_; }
  __device__ PieceCursor Slots() const { return PieceCursor(items_, item_, kv_); }

  __device__ void Next() {
    item_.row_count = 0;
    if constexpr (!kOnly) SkipIdle();
  }

 private:
  // All of it at once.
  __device__ void Read(int at) {
    item_ = items_.items[at / kv_heads_];
    kv_ = at % kv_heads_;
  }

  __device__ void SkipIdle() {
    const int units = static_cast<int>(gridDim.x) / ClusterBlocks(), unit = ClusterIndex();
    while (!there() && ++round_ * units < total_) {
      const int at = round_ * units + (round_ % 2 == 0 ? unit : units - 1 - unit);
      if (at < total_) Read(at);
    }
  }

  const AttentionItems& items_;
  const int kv_heads_, total_;
  int round_ = 0, kv_ = 0;
  AttentionItem item_;
};

// The warpgroup that copies, without a break between tiles. It alone walks over the slots.
class Producer {
 public:
  __device__ Producer(Shared& shared, const AttentionItems& items, const AttentionMaps& maps)
      : shared_(shared), items_(items), maps_(maps), thread_(static_cast<int>(threadIdx.x) % kGroup) {}

  template <bool kOnly>
  __device__ void Run(TileWalk<kOnly> walk) {
    if (!walk.there()) return;
    PieceCursor keys = walk.Slots();
    if (!items_.settled) WaitForPreviousKernel();
    bool first = true;
    for (Place place;; keys = walk.Slots()) {
      for (PieceCursor values = keys; keys.left() > 0; place.Next()) {
        WaitPhase(&shared_.k_empty[place.stage], place.parity ^ 1);
        LoadKeys(place.stage, keys);
        if (!kOnly && first) NamedBarrierWait<kThreads>(kQueriesAsked);
        first = false;
        WaitPhase(&shared_.v_empty[place.stage], place.parity ^ 1);
        LoadValues(place.stage, values);
      }
      walk.Next();
      if (kOnly || !walk.there()) break;
    }
  }
  // Before its threads end.
  __device__ void Drain() {
    CopyAsyncCommit();
    CopyAsyncWait<0>();
  }

 private:
  // A step's keys to their stage, and what it holds.
  __device__ void LoadKeys(int stage, PieceCursor& cursor) {
    Step& step = shared_.step[stage];
    uint64_t* const full = &shared_.k_full[stage];
    int flags = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const Piece piece = cursor.Next();
      const AttentionRun& run = items_.runs[piece.run];
      char* const to = shared_.k[stage] + half * kHalf * 128;
      if (!IsBox(piece, piece.k) || !IsBox(piece, piece.v)) flags |= kCopied;
      LoadHalf(to, piece, piece.k, cursor.kv(), run.k, run.k_head, run.k_row, full);
      if (piece.beta) {
        flags |= kBiased << half;
        if (thread_ < piece.slots) {
          CopyAsync4(&shared_.beta[stage][half * kHalf + thread_],
                     run.beta + cursor.kv() * run.beta_head + piece.slot + thread_);
        }
      }
      if (thread_ == 0) {
        step.slots[half] = piece.slots;
        step.limit[half] = piece.limit;
      }
      if (piece.slots < kHalf || piece.limit < piece.slots) flags |= kMasked;
      if (piece.memory) flags |= kMemory << half;
    }
    if (cursor.left() == 0) flags |= kLast;
    if (thread_ == 0) step.flags = flags;
    End(full);
  }

  __device__ void LoadValues(int stage, PieceCursor& cursor) {
    uint64_t* const full = &shared_.v_full[stage];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const Piece piece = cursor.Next();
      const AttentionRun& run = items_.runs[piece.run];
      char* const to = shared_.v[stage] + half * kHalf * 128;
      LoadHalf(to, piece, piece.v, cursor.kv(), run.v, run.v_head, run.v_row, full);
    }
    End(full);
  }

  static __device__ bool IsBox(const Piece& piece, const AttentionPlace& place) {
    return piece.slots == kHalf && place.map >= 0;
  }

  // Keys or values of a piece. `from`, `head` and `row` are read only where threads copy.
  __device__ void LoadHalf(char* to, const Piece& piece, const AttentionPlace& place, int kv, const void* const& from,
                           const int64_t& head, const int64_t& row, uint64_t* full) {
    if (!IsBox(piece, place)) {
      LoadRows(to, static_cast<const Bf16*>(from) + kv * head + piece.slot * row, row, piece.slots);
    } else if (thread_ == 0) {
      const CUtensorMap* const map = &maps_.map[place.map];
      Expect(full, kHalf * kWidth * 2);
#pragma unroll
      for (int c = 0; c < kWidth / 64; ++c) {
        CopyBox(to + c * kBlockBytes, map, place.row, place.head_columns + 64 * c, full);
      }
    }
  }

  // Arrivals at a stage: of all, when their copies are done, so that none falls behind; and of thread 0 for its stores.
  __device__ void End(uint64_t* full) {
    if (thread_ == 0) Arrive(full);
    ArriveAfterCopies(full);
  }

  Shared& shared_;
  const AttentionItems& items_;
  const AttentionMaps& maps_;
  const int thread_;
};

}  // namespace stillhouse::cuda::tall

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_STAGES_CUH_
