// A scan in a single pass whose steps run in warps of their own: while some tiles of a block are on their way into
// shared memory, another one is summed, another's prefix is looked up, and another is scanned and written.
//
// Every block finds prefixes by itself: it adds up all totals that came before, group by group, in an order that
// depends on the tile alone. So floats repeat their bits, and no tile waits for a neighbour's prefix.
#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/scan_stretch.cuh"
#include "kernels/cuda/device/scan_word.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kScanners = 8;  // warps; each has a stretch of the tile
constexpr int kSummers = 4;   // warps
constexpr int kLookers = 3;   // warps, that take tiles in turn: finding a prefix waits for memory
constexpr int kThreads = (1 + kLookers + kSummers + kScanners) * kWarp;
constexpr int kFirstSummer = 1 + kLookers, kFirstScanner = kFirstSummer + kSummers;
constexpr int kRounds = 4;  // words of a group that a lane reads
constexpr int kGroup = kRounds * kWarp;
constexpr int kSlotBytes = 6 * 32768;  // of all slots
constexpr uint32_t kNoTile = 0xffffffffu;
constexpr int kHead = 16;  // bytes before the words: the next tile's number
constexpr int kZeroThreads = 256;

template <typename T, bool kSegmented, int kVectors>
struct Room {
  using Item = ScanItem<T, kSegmented>;
  static constexpr int kTileBytes = kScanners * kWarp * kVectors * 16;
  static constexpr int kSlots = kSlotBytes / kTileBytes;

  uint64_t full[kSlots];    // the tile is here
  uint64_t summed[kSlots];  // so are the totals of its stretches
  uint64_t ready[kSlots];   // and its prefix
  uint64_t empty[kSlots];   // nobody reads any of it again
  uint32_t tile[kSlots];
  Item totals[kSlots][kScanners];
  Item prefix[kSlots];
};

// Finds prefixes of ascending tiles; a warp.
template <typename T, bool kSegmented>
struct LookBack {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;

  uint32_t row = kNoTile;
  uint32_t done = 0;  // tiles of the row in `carry`; whole groups
  Item carry;

  // One group's items, those of tiles that count, one after the other.
  static __device__ __forceinline__ Item Fold(const Item (&items)[kRounds]) {
    if constexpr (kSegmented) {
      Item sum = WarpChain(items[0]);
#pragma unroll
      for (int j = 1; j < kRounds; ++j) sum = sum.Then(WarpChain(items[j]));
      return sum;
    } else {
      T sum = items[0].v;
#pragma unroll
      for (int j = 1; j < kRounds; ++j) sum += items[j].v;
      return Item::Of(WarpSum(sum), 0);
    }
  }

  // words: of the row.
  __device__ __forceinline__ Item Before(const W* words, uint32_t in_row, uint32_t t) {
    const uint32_t lane = threadIdx.x % kWarp;
    if (in_row != row) {
      row = in_row;
      done = 0;
      carry = Item();
    }
    while (true) {
      const uint32_t left = t - done;
      Item items[2][kRounds];
      uint32_t missing = 0;
#pragma unroll
      for (int j = 0; j < 2 * kRounds; ++j) missing |= (j * kWarp + lane < left ? 1u : 0u) << j;
      while (missing) {
        W read[2 * kRounds];
#pragma unroll
        for (int j = 0; j < 2 * kRounds; ++j) {
          if (missing >> j & 1) read[j] = W::Load(words + done + j * kWarp + lane);
        }
#pragma unroll
        for (int j = 0; j < 2 * kRounds; ++j) {
          if ((missing >> j & 1) && StateOf(read[j]) != kNothing) {
            items[j / kRounds][j % kRounds] = ItemOf<Item>(read[j]);
            missing &= ~(1u << j);
          }
        }
      }
      __syncwarp();
      const Item first = Fold(items[0]);
      if (left < kGroup) return carry.Then(first);
      carry = carry.Then(first);
      const Item second = Fold(items[1]);
      done += kGroup;
      if (left < 2 * kGroup) return carry.Then(second);
      carry = carry.Then(second);
      done += kGroup;
    }
  }
};

// Tiles are taken by ticket, in their order, so that all tiles before one that is being worked on are, too.
template <typename T, bool kSegmented, int kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    PipelineKernel(ScanView<T> view, uint32_t rows, uint32_t tiles, bool once, uint32_t* ticket, void* words) {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;
  using Piece = Stretch<T, kSegmented, kVectors>;
  using Shared = Room<T, kSegmented, kVectors>;
  constexpr int kSlots = Shared::kSlots, kSlotVectors = Shared::kTileBytes / 16;
  constexpr int64_t kTileItems = kScanners * Piece::kItems;
  extern __shared__ __align__(128) uint4 slots[];
  __shared__ __align__(16) unsigned char room[sizeof(Shared)];  // as raw bytes: items have constructors
  Shared& shared = *reinterpret_cast<Shared*>(room);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t all = rows * tiles;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      InitBarrier(&shared.full[i], 1);
      InitBarrier(&shared.summed[i], 1);
      InitBarrier(&shared.ready[i], 1);
      InitBarrier(&shared.empty[i], kScanners);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  WaitForPreviousKernel();
  LetNextKernelStart();

  const auto comes_in_bulk = [&](int64_t begin) { return view.aligned && begin + kTileItems <= view.n; };
  const auto slot_of = [](int turn) { return turn % kSlots; };
  const auto parity_of = [](int turn) { return turn / kSlots % 2; };
  // The tile of this turn; kNoTile: there are no more.
  const auto tile_of = [&](int turn) {
    WaitPhase(&shared.full[slot_of(turn)], parity_of(turn));
    return shared.tile[slot_of(turn)];
  };
  const auto take = [&](Piece& piece, uint32_t tile, int turn, int stretch) {
    const int64_t tile_begin = int64_t{tile % tiles} * kTileItems, begin = tile_begin + stretch * Piece::kItems;
    if (comes_in_bulk(tile_begin)) {
      piece.template Take<kWarp>(view, tile / tiles, begin,
                                 slots + slot_of(turn) * kSlotVectors + stretch * kVectors * kWarp + lane);
    } else {
      piece.Load(view, tile / tiles, begin);
    }
  };

  if (warp == 0) {
    if (lane != 0) return;
    const uint64_t policy = CachePolicy(once);
    // While slots are free anyway the next ticket is on its way early.
    uint32_t next = atomicAdd(ticket, 1u);
    int ends = 0;
    for (int turn = 0;; ++turn) {
      const int slot = slot_of(turn);
      uint32_t tile = next;
      if (turn >= kSlots) {
        WaitPhase(&shared.empty[slot], 1 - parity_of(turn));
        tile = atomicAdd(ticket, 1u);
      } else if (turn + 1 < kSlots) {
        next = atomicAdd(ticket, 1u);
      }
      const bool end = tile >= all;
      shared.tile[slot] = end ? kNoTile : tile;
      const int64_t begin = int64_t{tile % tiles} * kTileItems;
      if (!end && comes_in_bulk(begin)) {
        ArriveAndExpect(&shared.full[slot], Shared::kTileBytes);
        BulkCopy(slots + slot * kSlotVectors, view.in + tile / tiles * view.in_stride + begin, Shared::kTileBytes,
                 &shared.full[slot], policy);
      } else {
        Arrive(&shared.full[slot]);
      }
      // Everyone who takes turns must meet an end.
      ends += end ? 1 : 0;
      if (ends == kLookers) return;
    }
  }
  if (warp <= kLookers) {
    LookBack<T, kSegmented> back;
    for (int turn = warp - 1;; turn += kLookers) {
      const uint32_t tile = tile_of(turn);
      if (tile == kNoTile) return;
      const uint32_t row = tile / tiles;
      const Item prefix =
          back.Before(static_cast<const W*>(words) + static_cast<int64_t>(row) * tiles, row, tile % tiles);
      WaitPhase(&shared.summed[slot_of(turn)], parity_of(turn));
      if (lane == 0) {
        shared.prefix[slot_of(turn)] = prefix;
        Arrive(&shared.ready[slot_of(turn)]);
      }
      __syncwarp();
    }
  }
  if (warp < kFirstScanner) {
    for (int turn = 0;; ++turn) {
      const uint32_t tile = tile_of(turn);
      if (tile == kNoTile) return;
      Item(&totals)[kScanners] = shared.totals[slot_of(turn)];
#pragma unroll
      for (int s = 0; s < kScanners / kSummers; ++s) {
        const int stretch = (warp - kFirstSummer) * (kScanners / kSummers) + s;
        Piece piece;
        take(piece, tile, turn, stretch);
        const Item total = piece.Total();
        if (lane == 0) totals[stretch] = total;
      }
      WarpgroupBarrier(1);
      if (warp == kFirstSummer && lane == 0) {
        Publish(static_cast<W*>(words) + tile, FoldTotals(totals), kTotal);
        Arrive(&shared.summed[slot_of(turn)]);
      }
      __syncwarp();
    }
  }
  const int stretch = warp - kFirstScanner;
  for (int turn = 0;; ++turn) {
    const uint32_t tile = tile_of(turn);
    if (tile == kNoTile) return;
    const int slot = slot_of(turn);
    Piece piece;
    take(piece, tile, turn, stretch);
    piece.Scan();
    WaitPhase(&shared.ready[slot], parity_of(turn));
    const Item before = BeforeStretch(shared.prefix[slot], shared.totals[slot], stretch);
    __syncwarp();
    if (lane == 0) Arrive(&shared.empty[slot]);
    piece.Store(view, tile / tiles, int64_t{tile % tiles} * kTileItems + stretch * Piece::kItems, before, once);
  }
}
static_assert(kSummers * kWarp == 128, "WarpgroupBarrier");
static_assert(Room<float, false, 8>::kSlots > kLookers, "a slot before an end was a tile's");

__global__ void __launch_bounds__(kZeroThreads) ZeroKernel(uint4* to, int64_t count) {
  WaitForPreviousKernel();
  LetNextKernelStart();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kZeroThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kZeroThreads) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
}

int Multiprocessors() {
  int device = 0, count = 0;
  STILLHOUSE_CUDA_CHECK(cudaGetDevice(&device));
  STILLHOUSE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// How a scan is cut.
struct Cut {
  int vectors;    // of 16 bytes, of a lane
  int64_t tiles;  // of a row
};

Cut CutOf(const ScanShape& s) {
  // Small tiles where there are few.
  const int vectors = s.rows * s.n * BytesOf(s.element) <= int64_t{1} << 25 ? 4 : 8;
  return {vectors, CeilDiv(s.n, kScanners * kWarp * vectors * 16 / BytesOf(s.element))};
}

int64_t ScratchOf(const ScanShape& s, const Cut& cut) {
  // Whole vectors of 16 bytes.
  return kHead + CeilDiv(s.rows * cut.tiles * 2 * BytesOf(s.element), 16) * 16;
}

}  // namespace

void LaunchEmptyScanWords(void* words, int64_t bytes, cudaStream_t stream) {
  static const int multiprocessors = Multiprocessors();
  LaunchKernelEarly(ZeroKernel, GridFor(bytes / 16, kZeroThreads, multiprocessors), kZeroThreads, 0, stream,
                    static_cast<uint4*>(words), bytes / 16);
}

int64_t PipelineScanScratch(const ScanShape& s) { return ScratchOf(s, CutOf(s)); }

void LaunchPipelineScan(const ScanShape& s, void* scratch, cudaStream_t stream) {
  const int multiprocessors = Multiprocessors();
  const Cut cut = CutOf(s);
  const int64_t all = s.rows * cut.tiles;
  STILLHOUSE_CHECK(all < int64_t{1} << 30) << all << " tiles";
  LaunchEmptyScanWords(scratch, ScratchOf(s, cut), stream);
  // What the L2 cache cannot hold goes past it.
  const bool once = s.rows * s.n * BytesOf(s.element) >= int64_t{1} << 25;
  const unsigned blocks = static_cast<unsigned>(all < multiprocessors ? all : multiprocessors);
  const uint32_t rows = static_cast<uint32_t>(s.rows), tiles = static_cast<uint32_t>(cut.tiles);
  uint32_t* ticket = static_cast<uint32_t*>(scratch);
  void* words = static_cast<char*>(scratch) + kHead;
  WithTypes(s, [&](auto view, auto segmented) {
    using T = std::remove_pointer_t<decltype(view.out)>;
    constexpr bool kSegmented = decltype(segmented)::value;
    const auto launch = [&](auto kernel) {
      LaunchKernelEarly(kernel, blocks, kThreads, kSlotBytes, stream, view, rows, tiles, once, ticket, words);
    };
    cut.vectors == 4 ? launch(PipelineKernel<T, kSegmented, 4>) : launch(PipelineKernel<T, kSegmented, 8>);
  });
}

}  // namespace stillhouse::cuda
