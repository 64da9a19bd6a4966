// Scans in a single pass: a tile is read once, its prefix comes from what earlier tiles publish, and it is written
// once. And, for what the L2 cache holds, totals first.
#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/scan_item.cuh"
#include "kernels/cuda/device/scan_stretch.cuh"
#include "kernels/cuda/device/scan_word.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kVectors = 8;  // of 16 bytes, that a lane holds
constexpr int kWarps = 8;    // of a tile
constexpr int kThreads = kWarps * kWarp;
constexpr int kRowsPerBlock = 8;  // of short rows
constexpr int64_t kGroup = 32;    // tiles of a group, groups of a larger one

// Elements of a warp and a tile.
template <typename T>
constexpr int64_t kWarpItems = Stretch<T, false, kVectors>::kItems;
template <typename T>
constexpr int64_t kTileItems = kWarps* kWarpItems<T>;

// The words of one row: one for each tile, each group of tiles and each group of groups.
template <typename T, bool kSegmented>
struct Board {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;

  W* tiles;
  W* groups;
  W* larger;

  static __device__ __forceinline__ W Await(const W* from, uint32_t least) {
    W word = W::Load(from);
    while (StateOf(word) < least) word = W::Load(from);
    return word;
  }

  // By one thread, as soon as the total of tile t is known.
  __device__ __forceinline__ void Announce(int64_t t, const Item& total, TilePrefix how) const {
    if (how == TilePrefix::kDomino) return;
    Publish(tiles + t, total, how != TilePrefix::kTree && t == 0 ? kPrefix : kTotal);
  }

  // Tile t's exclusive prefix, to every lane of the warp that calls it.
  __device__ __forceinline__ Item Prefix(int64_t t, const Item& total, TilePrefix how) const {
    switch (how) {
      case TilePrefix::kDomino:
        return Domino(t, total);
      case TilePrefix::kLookBack:
        return LookBack(t, total);
      case TilePrefix::kLookBackWindow:
        return LookBackWindow(t, total);
      case TilePrefix::kTree:
        return Tree(t, total);
    }
    return Item();
  }

  // Each also publishes what it owes beside the total.

  __device__ __forceinline__ Item Domino(int64_t t, const Item& total) const {
    Item prefix;
    if (t > 0) prefix = ItemOf<Item>(Await(tiles + t - 1, kPrefix));
    if (threadIdx.x == 0) Publish(tiles + t, prefix.Then(total), kPrefix);
    return prefix;
  }

  __device__ __forceinline__ Item LookBack(int64_t t, const Item& total) const {
    Item prefix;
    if (t == 0) return prefix;
    for (int64_t p = t - 1;; --p) {
      // Lanes may see different states: the first lane's counts for all.
      W word = Await(tiles + p, kTotal);
      word.value = __shfl_sync(kFullWarp, word.value, 0);
      word.state = __shfl_sync(kFullWarp, word.state, 0);
      prefix = ItemOf<Item>(word).Then(prefix);
      if (StateOf(word) == kPrefix) break;
    }
    if (threadIdx.x == 0) Publish(tiles + t, prefix.Then(total), kPrefix);
    return prefix;
  }

  __device__ __forceinline__ Item LookBackWindow(int64_t t, const Item& total) const {
    const int lane = static_cast<int>(threadIdx.x);
    Item prefix;
    if (t == 0) return prefix;
    for (int64_t end = t;; end -= kWarp) {
      // Lanes in the order of tiles; those before the row have nothing, as a prefix.
      const int64_t p = end - kWarp + lane;
      Item item;
      uint32_t state = kPrefix;
      if (p >= 0) {
        const W word = Await(tiles + p, kTotal);
        item = ItemOf<Item>(word);
        state = StateOf(word);
      }
      __syncwarp();
      const unsigned prefixes = __ballot_sync(kFullWarp, state == kPrefix);
      if (prefixes && lane < 31 - __clz(static_cast<int>(prefixes))) item = Item();
      prefix = WarpChain(item).Then(prefix);
      if (prefixes) break;
    }
    if (lane == 0) Publish(tiles + t, prefix.Then(total), kPrefix);
    return prefix;
  }

  // prefix = (prefix of the larger groups before) + (totals of the groups before, in this larger one) + (totals of the
  // tiles before, in this group). The last tile of a group publishes the group's total, the last of a larger group its
  // prefix. What is added, and in which order, depends on t alone.
  __device__ __forceinline__ Item Tree(int64_t t, const Item& total) const {
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t g = t / kGroup, k = g / kGroup;
    const int in_group = static_cast<int>(t % kGroup), in_larger = static_cast<int>(g % kGroup);
    const bool wants_tile = lane < in_group, wants_group = lane < in_larger, wants_larger = lane == 0 && k > 0;
    Item tile, group, larger;
    bool has_tile = !wants_tile, has_group = !wants_group, has_larger = !wants_larger, published = false;
    Item within;
    while (true) {
      if (!has_tile) {
        const W word = W::Load(tiles + g * kGroup + lane);
        has_tile = StateOf(word) != kNothing;
        tile = ItemOf<Item>(word);
      }
      if (!has_group) {
        const W word = W::Load(groups + k * kGroup + lane);
        has_group = StateOf(word) != kNothing;
        group = ItemOf<Item>(word);
      }
      if (!has_larger) {
        const W word = W::Load(larger_before(k));
        has_larger = StateOf(word) != kNothing;
        larger = ItemOf<Item>(word);
      }
      if (!published && __all_sync(kFullWarp, has_tile)) {
        published = true;
        within = WarpChain(wants_tile ? tile : Item());
        if (in_group == kGroup - 1 && lane == 0) Publish(groups + g, within.Then(total), kTotal);
      }
      if (__all_sync(kFullWarp, has_tile && has_group && has_larger)) break;
    }
    const Item before = ShuffleFrom(larger, 0).Then(WarpChain(wants_group ? group : Item()));
    if (in_group == kGroup - 1 && in_larger == kGroup - 1 && lane == 0) {
      Publish(larger_of(k), before.Then(within.Then(total)), kPrefix);
    }
    return before.Then(within);
  }

  __device__ __forceinline__ W* larger_of(int64_t k) const { return larger + k; }
  __device__ __forceinline__ const W* larger_before(int64_t k) const { return larger + k - 1; }
};

// --- kernels --------------------------------------------------------------------------------------------------------

struct Words {
  void* words = nullptr;
  int64_t rows = 0, tiles = 0, groups = 0, larger = 0;  // the last three a row
};

// Blocks that run together (a cooperative launch) take every gridDim-th tile. Tiles lie in shared memory from the time
// they are asked for until they are written: while one waits for its prefix, the total of the next one is out already,
// and the one after that is on its way.
constexpr int kSlots = 3;

template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, 2) SinglePassKernel(ScanView<T> shape, Words places, TilePrefix how) {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;
  extern __shared__ uint4 slots[];  // [kSlots][kVectors][kThreads]; a thread reads what it wrote
  __shared__ Item totals[2][kWarps];
  __shared__ Item tile_prefix;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const uint32_t tiles = static_cast<uint32_t>(places.tiles), all = static_cast<uint32_t>(places.rows) * tiles;
  const auto begin_of = [&](uint32_t tile) { return int64_t{tile % tiles} * kTileItems<T> + warp * kWarpItems<T>; };
  const auto slot_of = [&](int turn) { return slots + turn % kSlots * kVectors * kThreads + threadIdx.x; };
  const auto board_of = [&](uint32_t row) {
    W* words = static_cast<W*>(places.words);
    return Board<T, kSegmented>{words + row * places.tiles, words + places.rows * places.tiles + row * places.groups,
                                words + places.rows * (places.tiles + places.groups) + row * places.larger};
  };
  const auto ask = [&](uint32_t tile, int turn) {
    if (tile < all) Stretch<T, kSegmented>::template Ask<kThreads>(shape, tile / tiles, begin_of(tile), slot_of(turn));
    CopyAsyncCommit();
  };
  // Puts the tile's total out; its last barrier is the caller's next one.
  const auto announce = [&](uint32_t tile, int turn) {
    if (tile >= all) return;
    Stretch<T, kSegmented> stretch;
    stretch.template Take<kThreads>(shape, tile / tiles, begin_of(tile), slot_of(turn));
    const Item total = stretch.Total();
    if (threadIdx.x % kWarp == 0) totals[turn % 2][warp] = total;
    __syncthreads();
    if (threadIdx.x == 0) board_of(tile / tiles).Announce(tile % tiles, FoldTotals(totals[turn % 2]), how);
  };

  const uint32_t step = gridDim.x;
  ask(blockIdx.x, 0);
  ask(blockIdx.x + step, 1);
  CopyAsyncWait<1>();
  announce(blockIdx.x, 0);
  int turn = 0;
  for (uint32_t tile = blockIdx.x; tile < all; tile += step, ++turn) {
    ask(tile + 2 * step, turn + 2);
    CopyAsyncWait<1>();
    announce(tile + step, turn + 1);
    const uint32_t row = tile / tiles, t = tile % tiles;
    if (warp == 0) {
      const Item prefix = board_of(row).Prefix(t, FoldTotals(totals[turn % 2]), how);
      if (threadIdx.x == 0) tile_prefix = prefix;
    }
    Stretch<T, kSegmented> stretch;
    stretch.template Take<kThreads>(shape, row, begin_of(tile), slot_of(turn));
    stretch.Scan();
    __syncthreads();
    stretch.Store(shape, row, begin_of(tile), BeforeStretch(tile_prefix, totals[turn % 2], warp));
    __syncthreads();  // all have read what the next turn overwrites
  }
}

// A tile a row: nothing to wait for.
template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, 3) TilePerRowKernel(ScanView<T> shape) {
  using Item = ScanItem<T, kSegmented>;
  __shared__ Item totals[kWarps];
  const int64_t begin = threadIdx.x / kWarp * kWarpItems<T>;
  Stretch<T, kSegmented> stretch;
  stretch.Load(shape, blockIdx.x, begin);
  stretch.Scan();
  if (threadIdx.x % kWarp == 0) totals[threadIdx.x / kWarp] = stretch.total;
  __syncthreads();
  stretch.Store(shape, blockIdx.x, begin, BeforeStretch(Item(), totals, static_cast<int>(threadIdx.x) / kWarp));
}

// Totals first, then the scan, for inputs that the L2 cache holds between the two. The second kernel starts while the
// first one runs: it reads its tile at once (whatever wrote the input had ended when the first kernel let it come), and
// waits only for the totals.
template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, 3) TotalsKernel(ScanView<T> shape, uint32_t tiles, void* words) {
  using Item = ScanItem<T, kSegmented>;
  __shared__ Item totals[kWarps];
  WaitForPreviousKernel();
  LetNextKernelStart();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  Stretch<T, kSegmented> stretch;
  stretch.Load(shape, blockIdx.x / tiles, blockIdx.x % tiles * kTileItems<T> + warp * kWarpItems<T>);
  const Item total = stretch.Total();
  if (threadIdx.x % kWarp == 0) totals[warp] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    Publish(static_cast<Word<sizeof(T)>*>(words) + blockIdx.x, FoldTotals(totals), kTotal);
  }
}

template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, 3) AfterTotalsKernel(ScanView<T> shape, uint32_t tiles, const void* words) {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;
  __shared__ Item totals[kWarps];
  __shared__ Item tile_prefix;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t row = blockIdx.x / tiles, t = blockIdx.x % tiles;
  const int64_t begin = t * kTileItems<T> + warp * kWarpItems<T>;
  Stretch<T, kSegmented> stretch;
  stretch.Load(shape, row, begin);
  stretch.Scan();
  if (lane == 0) totals[warp] = stretch.total;
  WaitForPreviousKernel();
  if (warp == 0) {
    // A lane adds up neighbouring tiles; the cut depends on t alone.
    const uint32_t each = (t + kWarp - 1) / kWarp, from = lane * each, to = min(t, from + each);
    Item prefix;
#pragma unroll 4
    for (uint32_t p = from; p < to; ++p) {
      prefix = prefix.Then(ItemOf<Item>(W::Load(static_cast<const W*>(words) + row * tiles + p)));
    }
    prefix = WarpChain(prefix);
    if (lane == 0) tile_prefix = prefix;
  }
  __syncthreads();
  stretch.Store(shape, row, begin, BeforeStretch(tile_prefix, totals, warp));
}

template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) WarpPerRowKernel(ScanView<T> shape, int64_t rows) {
  using Item = ScanItem<T, kSegmented>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= rows) return;
  Item prefix;
  for (int64_t begin = 0; begin < shape.n; begin += kWarpItems<T>) {
    Stretch<T, kSegmented> stretch;
    stretch.Load(shape, row, begin);
    stretch.Scan();
    stretch.Store(shape, row, begin, prefix);
    prefix = prefix.Then(stretch.total);
  }
}

int64_t TileItemsOf(ScanElement element) { return kThreads * kVectors * 16 / BytesOf(element); }

Words WordsFor(const ScanShape& s) {
  Words places;
  places.rows = s.rows;
  places.tiles = CeilDiv(s.n, TileItemsOf(s.element));
  places.groups = CeilDiv(places.tiles, kGroup);
  places.larger = CeilDiv(places.groups, kGroup);
  return places;
}

void LaunchTilePerRow(const ScanShape& s, cudaStream_t stream) {
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    TilePerRowKernel<T, decltype(segmented)::value><<<static_cast<unsigned>(s.rows), kThreads, 0, stream>>>(shape);
    STILLHOUSE_CUDA_LAUNCHED();
  });
}

}  // namespace

int64_t SinglePassScanScratch(const ScanShape& s) {
  const Words t = WordsFor(s);
  if (t.tiles <= 1) return 0;
  return t.rows * (t.tiles + t.groups + t.larger) * 2 * BytesOf(s.element);
}

void LaunchSinglePassScan(const ScanShape& s, TilePrefix prefix, void* scratch, cudaStream_t stream) {
  Words places = WordsFor(s);
  if (places.tiles == 1) return LaunchTilePerRow(s, stream);
  const int64_t all = s.rows * places.tiles;
  STILLHOUSE_CHECK(all < int64_t{1} << 30) << all << " tiles";
  STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(scratch, 0, static_cast<size_t>(SinglePassScanScratch(s)), stream));
  places.words = scratch;
  int device = 0, multiprocessors = 0;
  STILLHOUSE_CUDA_CHECK(cudaGetDevice(&device));
  STILLHOUSE_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(uint4) * kSlots * kVectors * kThreads;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    const auto kernel = SinglePassKernel<T, decltype(segmented)::value>;
    // Once for each device would do; it costs less than a launch.
    STILLHOUSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(config.dynamicSmemBytes)));
    int blocks = 0;
    STILLHOUSE_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, config.dynamicSmemBytes));
    const int64_t most = int64_t{blocks} * multiprocessors;
    config.gridDim = dim3(static_cast<unsigned>(all < most ? all : most));
    STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, shape, places, prefix));
  });
}

void LaunchTotalsFirstScan(const ScanShape& s, void* scratch, cudaStream_t stream) {
  const int64_t tiles = WordsFor(s).tiles;
  if (tiles == 1) return LaunchTilePerRow(s, stream);
  const uint32_t count = static_cast<uint32_t>(tiles);
  STILLHOUSE_CHECK(s.rows * tiles < int64_t{1} << 31) << s.rows * tiles << " tiles";
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    constexpr bool kSegmented = decltype(segmented)::value;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(s.rows * tiles));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&config, TotalsKernel<T, kSegmented>, shape, count, scratch));
    STILLHOUSE_CUDA_CHECK(
        cudaLaunchKernelEx(&config, AfterTotalsKernel<T, kSegmented>, shape, count, static_cast<const void*>(scratch)));
  });
}

bool FitsWarpPerRow(const ScanShape& s) { return s.n <= 2 * TileItemsOf(s.element) / kWarps && s.rows > 1; }

void LaunchWarpPerRowScan(const ScanShape& s, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(CeilDiv(s.rows, kRowsPerBlock));
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    WarpPerRowKernel<T, decltype(segmented)::value><<<grid, kRowsPerBlock * kWarp, 0, stream>>>(shape, s.rows);
    STILLHOUSE_CUDA_LAUNCHED();
  });
}

}  // namespace stillhouse::cuda
