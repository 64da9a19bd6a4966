// Scans in levels: tiles by a network within the block, then the tiles' totals in the same way, then both are added.
#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/scan_item.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCoarse = 8;

// --- networks: the inclusive scan of one item a thread
// ----------------------------------------------------------------

// Two barriers a step: all have read before any writes.
template <typename Item>
__device__ Item KoggeStone(Item x, Item* items) {
  const int i = static_cast<int>(threadIdx.x);
  items[i] = x;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const Item below = i >= step ? items[i - step] : Item();
    __syncthreads();
    if (i >= step) items[i] = below.Then(items[i]);
    __syncthreads();
  }
  return items[i];
}

// One barrier a step: it reads one buffer and writes the other.
template <typename Item>
__device__ Item KoggeStoneDoubleBuffered(Item x, Item* items) {
  const int i = static_cast<int>(threadIdx.x);
  items[i] = x;
  __syncthreads();
  Item *from = items, *to = items + kThreads;
  for (int step = 1; step < kThreads; step *= 2) {
    to[i] = i >= step ? from[i - step].Then(from[i]) : from[i];
    __syncthreads();
    Item* swap = from;
    from = to;
    to = swap;
  }
  return from[i];
}

// A tree up and a tree down: 2·n additions where Kogge & Stone take n·log n.
template <typename Item>
__device__ Item BrentKung(Item x, Item* items) {
  const int i = static_cast<int>(threadIdx.x);
  items[i] = x;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int at = (i + 1) * 2 * step - 1;
    if (at < kThreads) items[at] = items[at - step].Then(items[at]);
    __syncthreads();
  }
  for (int step = kThreads / 4; step > 0; step /= 2) {
    const int at = (i + 1) * 2 * step - 1;
    if (at + step < kThreads) items[at + step] = items[at].Then(items[at + step]);
    __syncthreads();
  }
  return items[i];
}

// Warps by shuffles, then the warps' totals.
template <typename Item>
__device__ Item WarpTiled(Item x, Item* items) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  constexpr int kWarps = kThreads / kWarp;
  x = WarpScan(x);
  if (lane == kWarp - 1) items[warp] = x;
  __syncthreads();
  if (warp == 0) {
    const Item scanned = WarpScan(lane < kWarps ? items[lane] : Item());
    __syncwarp();
    if (lane < kWarps) items[lane] = scanned;
  }
  __syncthreads();
  if (warp > 0) x = items[warp - 1].Then(x);
  return x;
}

template <typename Item>
__device__ Item BlockScan(BlockNetwork network, Item x, Item* items) {
  switch (network) {
    case BlockNetwork::kKoggeStone:
      return KoggeStone(x, items);
    case BlockNetwork::kKoggeStoneDoubleBuffered:
      return KoggeStoneDoubleBuffered(x, items);
    case BlockNetwork::kBrentKung:
      return BrentKung(x, items);
    default:
      return WarpTiled(x, items);
  }
}

// --- levels
// -----------------------------------------------------------------------------------------------------------

template <typename T>
struct Level {
  const T* in;
  const uint8_t* heads;  // [rows, n] or null
  T* out;
  int64_t in_stride, n, tiles;  // a row
  bool exclusive;
  // Of every tile of every row; null on the last level.
  T* totals;
  uint8_t* total_heads;
  int32_t* first_head;  // elements before it take what comes before the tile
};

// A place in shared memory that keeps threads with neighbouring stretches off each other's banks.
__device__ __forceinline__ int Padded(int i) { return i + i / kWarp; }

template <typename T, bool kSegmented, int kItems>
__global__ void __launch_bounds__(kThreads) TileKernel(Level<T> level, BlockNetwork network) {
  using Item = ScanItem<T, kSegmented>;
  constexpr int kTile = kThreads * kItems;
  __shared__ T values[kTile + kTile / kWarp];
  __shared__ uint8_t marks[kSegmented ? kTile : 1];
  __shared__ Item items[2 * kThreads];
  __shared__ int first;
  const int64_t row = blockIdx.x / level.tiles, tile = blockIdx.x % level.tiles, begin = tile * kTile;
  if (threadIdx.x == 0) first = kTile;
  for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kThreads) {
    const bool in = begin + i < level.n;
    values[Padded(i)] = in ? level.in[row * level.in_stride + begin + i] : T{};
    if constexpr (kSegmented) marks[i] = in && level.heads[row * level.n + begin + i];
  }
  __syncthreads();
  const int base = static_cast<int>(threadIdx.x) * kItems;
  const auto item = [&](int e) { return Item::Of(values[Padded(base + e)], kSegmented ? marks[base + e] : 0); };
  Item own = item(0);
#pragma unroll
  for (int e = 1; e < kItems; ++e) own = own.Then(item(e));
  if constexpr (kSegmented) {
    for (int e = 0; e < kItems; ++e) {
      if (!marks[base + e]) continue;
      atomicMin(&first, base + e);
      break;
    }
  }
  const Item last = BlockScan(network, own, items);
  __syncthreads();
  items[threadIdx.x] = last;
  __syncthreads();
  Item sum = threadIdx.x > 0 ? items[threadIdx.x - 1] : Item();
#pragma unroll
  for (int e = 0; e < kItems; ++e) {
    const Item next = sum.Then(item(e));
    values[Padded(base + e)] = !level.exclusive ? next.v : kSegmented && marks[base + e] ? T{} : sum.v;
    sum = next;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTile && begin + i < level.n; i += kThreads) {
    level.out[row * level.n + begin + i] = values[Padded(i)];
  }
  if (level.totals && threadIdx.x == kThreads - 1) {
    level.totals[blockIdx.x] = last.v;
    if constexpr (kSegmented) {
      level.total_heads[blockIdx.x] = last.flag() != 0;
      level.first_head[blockIdx.x] = first;
    }
  }
}

// out += what comes before the tile, up to the tile's first head.
template <typename T, bool kSegmented, int kItems>
__global__ void __launch_bounds__(kThreads) AddBeforeKernel(Level<T> level, const T* before) {
  constexpr int kTile = kThreads * kItems;
  const int64_t row = blockIdx.x / level.tiles, tile = blockIdx.x % level.tiles, begin = tile * kTile;
  if (tile == 0) return;
  const T value = before[blockIdx.x - 1];  // of all tiles of the row up to the last one
  const int limit = kSegmented ? level.first_head[blockIdx.x] : kTile;
  for (int i = static_cast<int>(threadIdx.x); i < limit && begin + i < level.n; i += kThreads) {
    T& out = level.out[row * level.n + begin + i];
    out = value + out;
  }
}

int64_t TileOf(bool coarsened) { return coarsened ? kThreads * kCoarse : kThreads; }
int64_t Align16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

template <typename T, bool kSegmented, int kItems>
void RunLevel(Level<T> level, int64_t rows, BlockNetwork network, char* scratch, cudaStream_t stream) {
  level.tiles = CeilDiv(level.n, int64_t{kThreads} * kItems);
  const int64_t blocks = rows * level.tiles;
  T* before = nullptr;  // inclusive sums of the totals
  if (level.tiles > 1) {
    level.totals = reinterpret_cast<T*>(scratch);
    scratch += Align16(blocks * static_cast<int64_t>(sizeof(T)));
    before = reinterpret_cast<T*>(scratch);
    scratch += Align16(blocks * static_cast<int64_t>(sizeof(T)));
    level.total_heads = reinterpret_cast<uint8_t*>(scratch);
    scratch += Align16(blocks);
    level.first_head = reinterpret_cast<int32_t*>(scratch);
    scratch += Align16(blocks * 4);
  }
  const unsigned grid = static_cast<unsigned>(blocks);
  TileKernel<T, kSegmented, kItems><<<grid, kThreads, 0, stream>>>(level, network);
  STILLHOUSE_CUDA_LAUNCHED();
  if (level.tiles == 1) return;
  Level<T> next{};
  next.in = level.totals;
  next.heads = level.total_heads;
  next.out = before;
  next.in_stride = next.n = level.tiles;
  next.exclusive = false;
  RunLevel<T, kSegmented, kItems>(next, rows, network, scratch, stream);
  AddBeforeKernel<T, kSegmented, kItems><<<grid, kThreads, 0, stream>>>(level, before);
  STILLHOUSE_CUDA_LAUNCHED();
}

template <typename T>
void Run(const ScanShape& s, BlockNetwork network, bool coarsened, void* scratch, cudaStream_t stream) {
  Level<T> level{};
  level.in = static_cast<const T*>(s.in);
  level.heads = s.heads;
  level.out = static_cast<T*>(s.out);
  level.in_stride = s.in_stride;
  level.n = s.n;
  level.exclusive = s.exclusive;
  char* room = static_cast<char*>(scratch);
  if (s.heads) {
    coarsened ? RunLevel<T, true, kCoarse>(level, s.rows, network, room, stream)
              : RunLevel<T, true, 1>(level, s.rows, network, room, stream);
  } else {
    coarsened ? RunLevel<T, false, kCoarse>(level, s.rows, network, room, stream)
              : RunLevel<T, false, 1>(level, s.rows, network, room, stream);
  }
}

}  // namespace

int64_t HierarchicalScanScratch(const ScanShape& s, bool coarsened) {
  const int64_t bytes = s.element == ScanElement::kInt64 ? 8 : 4;
  int64_t total = 0;
  for (int64_t n = CeilDiv(s.n, TileOf(coarsened)); n > 1; n = CeilDiv(n, TileOf(coarsened))) {
    const int64_t blocks = s.rows * n;
    total += 2 * Align16(blocks * bytes) + Align16(blocks) + Align16(blocks * 4);
  }
  return total;
}

void LaunchHierarchicalScan(const ScanShape& s, BlockNetwork network, bool coarsened, void* scratch,
                            cudaStream_t stream) {
  switch (s.element) {
    case ScanElement::kFloat:
      return Run<float>(s, network, coarsened, scratch, stream);
    case ScanElement::kInt32:
      return Run<uint32_t>(s, network, coarsened, scratch, stream);
    case ScanElement::kInt64:
      return Run<unsigned long long>(s, network, coarsened, scratch, stream);
  }
}

}  // namespace stillhouse::cuda
