// Scans of what fits the multiprocessors' registers: every tile has a block, all blocks run at once, and each adds up
// the totals of all tiles before its own. The input is read once, and waited for once. Totals go through memory, or
// where a row's tiles are few, through the shared memory of a cluster.
#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/scan_stretch.cuh"
#include "kernels/cuda/device/scan_word.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kVectors = 4;  // of 16 bytes, that a lane holds of a stretch
constexpr int kPieces = 2;   // stretches of a warp: while one is written, the other needs no sums
constexpr int kWarps = 8;    // of a tile
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileBytes = kThreads * kPieces * kVectors * 16;
constexpr int kTotals = 2;                          // neighbouring ones that a thread adds up
constexpr int64_t kMostTiles = kTotals * kThreads;  // of a row
constexpr int kMostOfCluster = 8;

// A warp's part of a tile.
template <typename T, bool kSegmented>
struct Part {
  using Item = ScanItem<T, kSegmented>;
  using Piece = Stretch<T, kSegmented, kVectors>;
  static constexpr int64_t kItems = kPieces * Piece::kItems;

  Piece pieces[kPieces];

  // Returns its total.
  __device__ __forceinline__ Item Load(const ScanView<T>& shape, int64_t row, int64_t begin) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) pieces[p].Load(shape, row, begin + p * Piece::kItems);
    Item total = pieces[0].Total();
#pragma unroll
    for (int p = 1; p < kPieces; ++p) total = total.Then(pieces[p].Total());
    return total;
  }

  __device__ __forceinline__ void Store(const ScanView<T>& shape, int64_t row, int64_t begin, Item prefix) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      if constexpr (!kSegmented) pieces[p].Scan();  // else Total did
      pieces[p].Store(shape, row, begin + p * Piece::kItems, prefix);
      prefix = prefix.Then(pieces[p].total);
    }
  }
};

// The kernel that empties the words lets this one start when whatever wrote the input has ended; so the input is read
// at once, and only the words are waited for. A block waits for earlier blocks alone, which began before it, so that
// other work on the GPU may delay a scan but not stop it.
template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, kSegmented ? 3 : 4)
    ResidentKernel(ScanView<T> shape, uint32_t tiles, void* all_words) {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;
  __shared__ Item totals[kWarps], before[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t row = blockIdx.x / tiles, t = blockIdx.x % tiles;
  const int64_t begin = (static_cast<int64_t>(t) * kWarps + warp) * Part<T, kSegmented>::kItems;
  W* const words = static_cast<W*>(all_words) + static_cast<int64_t>(row) * tiles;
  Part<T, kSegmented> part;
  const Item total = part.Load(shape, row, begin);
  if (lane == 0) totals[warp] = total;
  WaitForPreviousKernel();
  LetNextKernelStart();
  __syncthreads();
  if (threadIdx.x == 0) Publish(words + t, FoldTotals(totals), kTotal);

  // Thread i takes tiles 2i and 2i + 1: what is added, and in which order, depends on t alone.
  Item mine[kTotals];
  uint32_t missing = 0;
#pragma unroll
  for (int j = 0; j < kTotals; ++j) missing |= (threadIdx.x * kTotals + j < t ? 1u : 0u) << j;
  while (missing) {
#pragma unroll
    for (int j = 0; j < kTotals; ++j) {
      if (!(missing >> j & 1)) continue;
      const W word = W::Load(words + threadIdx.x * kTotals + j);
      if (StateOf(word) == kNothing) continue;
      mine[j] = ItemOf<Item>(word);
      missing &= ~(1u << j);
    }
  }
  __syncwarp();
  const Item of_warp = WarpChain(FoldTotals(mine));
  if (lane == 0) before[warp] = of_warp;
  __syncthreads();
  part.Store(shape, row, begin, BeforeStretch(FoldTotals(before), totals, warp));
}

// A row's tiles are a cluster.
template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads) ClusterKernel(ScanView<T> shape) {
  using Item = ScanItem<T, kSegmented>;
  __shared__ Item totals[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int blocks = ClusterBlocks(), t = ClusterRank();
  const int64_t row = blockIdx.x / blocks, begin = (int64_t{t} * kWarps + warp) * Part<T, kSegmented>::kItems;
  WaitForPreviousKernel();
  LetNextKernelStart();
  Part<T, kSegmented> part;
  const Item total = part.Load(shape, row, begin);
  if (lane == 0) totals[warp] = total;
  ClusterArrive();
  ClusterWait();
  // Every warp for itself: lane l has two warps of tile l / 4.
  Item mine;
  if (lane / 4 < t) {
    const Item* const theirs = OfBlock(totals, lane / 4) + lane % 4 * 2;
    mine = theirs[0].Then(theirs[1]);
  }
  static_assert(kMostOfCluster * kWarps == 2 * kWarp);
  const Item before = WarpChain(mine);
  ClusterArrive();
  part.Store(shape, row, begin, BeforeStretch(before, totals, warp));
  ClusterWait();  // others have read this block's totals
}

int64_t TilesOf(const ScanShape& s) { return CeilDiv(s.n * BytesOf(s.element), kTileBytes); }

bool FitsCluster(int64_t tiles) { return tiles <= kMostOfCluster; }

}  // namespace

bool FitsResident(const ScanShape& s) {
  const int64_t tiles = TilesOf(s);
  if (FitsCluster(tiles)) return true;
  bool fits = false;
  WithTypes(s, [&](auto view, auto segmented) {
    using T = std::remove_pointer_t<decltype(view.out)>;
    static const int at_once = BlocksAtOnce(ResidentKernel<T, decltype(segmented)::value>, kThreads, 0, 1);
    fits = tiles <= kMostTiles && s.rows <= at_once / tiles;
  });
  return fits;
}

int64_t ResidentScanScratch(const ScanShape& s) {
  const int64_t tiles = TilesOf(s);
  if (FitsCluster(tiles)) return 0;
  return CeilDiv(s.rows * tiles * 2 * BytesOf(s.element), 16) * 16;  // whole vectors of 16 bytes
}

void LaunchResidentScan(const ScanShape& s, void* scratch, cudaStream_t stream) {
  const uint32_t tiles = static_cast<uint32_t>(TilesOf(s));
  const int64_t blocks = s.rows * tiles;
  STILLHOUSE_CHECK(blocks < int64_t{1} << 31) << blocks << " tiles";
  if (!FitsCluster(tiles)) LaunchEmptyScanWords(scratch, ResidentScanScratch(s), stream);
  WithTypes(s, [&](auto view, auto segmented) {
    using T = std::remove_pointer_t<decltype(view.out)>;
    constexpr bool kSegmented = decltype(segmented)::value;
    if (FitsCluster(tiles)) {
      LaunchClustersEarly(ClusterKernel<T, kSegmented>, dim3(static_cast<unsigned>(blocks)), dim3(tiles), kThreads, 0,
                          stream, view);
    } else {
      LaunchKernelEarly(ResidentKernel<T, kSegmented>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, view,
                        tiles, scratch);
    }
  });
}

}  // namespace stillhouse::cuda
