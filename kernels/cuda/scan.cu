// Scans in a single pass: a tile is read once, its prefix comes from what earlier tiles publish, and it is written
// once.
#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/scan_item.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kVectors = 8;  // of 16 bytes, that a lane holds
constexpr int kWarps = 8;    // of a tile
constexpr int kThreads = kWarps * kWarp;
constexpr int kRowsPerBlock = 8;  // of short rows
constexpr int64_t kGroup = 32;    // tiles of a group, groups of a larger one

// Elements of a lane, a warp and a tile.
template <typename T>
constexpr int kPer = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int64_t kWarpItems = int64_t{kWarp} * kVectors* kPer<T>;
template <typename T>
constexpr int64_t kTileItems = kWarps* kWarpItems<T>;

template <typename T>
struct Shape {
  const T* in;
  const uint8_t* heads;
  T* out;
  int64_t in_stride, n;
  bool exclusive, aligned;
};

// --- a warp's stretch
// ---------------------------------------------------------------------------------------------------
//
// kWarpItems consecutive elements as kVectors rounds of 32 vectors: lane l has vector l of every round.

template <typename T, bool kSegmented>
struct Stretch {
  using Item = ScanItem<T, kSegmented>;

  T x[kVectors][kPer<T>];  // sums within a vector, from the last head in it on
  uint32_t heads = 0;      // a bit an element
  Item before[kVectors];   // the sum of the stretch before each vector
  Item total;              // of the whole stretch

  __device__ __forceinline__ uint32_t HeadsOf(int j) const { return heads >> (j * kPer<T>); }

  // Elements at `begin` and on of a row; those past its end are 0.
  __device__ __forceinline__ void Load(const Shape<T>& shape, int64_t row, int64_t begin) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const T* in = shape.in + row * shape.in_stride;
    const uint8_t* marks = kSegmented ? shape.heads + row * shape.n : nullptr;
    if (shape.aligned && begin + kWarpItems<T> <= shape.n) {
      Vec16<T> v[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[j] = LoadVec16(in + begin + (j * kWarp + lane) * kPer<T>);
      if constexpr (kSegmented) {
        using Marks = std::conditional_t<kPer<T> == 4, uint32_t, uint16_t>;
        Marks m[kVectors];
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          m[j] = *reinterpret_cast<const Marks*>(marks + begin + (j * kWarp + lane) * kPer<T>);
        }
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
          for (int e = 0; e < kPer<T>; ++e) heads |= (m[j] >> (8 * e) & 0xff ? 1u : 0u) << (j * kPer<T> + e);
        }
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kPer<T>; ++e) x[j][e] = v[j].at[e];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kPer<T>; ++e) {
          const int64_t i = begin + (j * kWarp + lane) * kPer<T> + e;
          x[j][e] = i < shape.n ? in[i] : T{};
          if (kSegmented && i < shape.n) heads |= (marks[i] ? 1u : 0u) << (j * kPer<T> + e);
        }
      }
    }
  }

  __device__ __forceinline__ void Scan() {
    Item end[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 1; e < kPer<T>; ++e) {
        if (!kSegmented || !(HeadsOf(j) >> e & 1)) x[j][e] = x[j][e - 1] + x[j][e];
      }
      end[j] = Item::Of(x[j][kPer<T> - 1], HeadsOf(j) & ((1u << kPer<T>)-1));
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) end[j] = WarpScan(end[j]);
    total = Item();
    const bool first = threadIdx.x % kWarp == 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const Item below = ShuffleUp(end[j], 1);
      before[j] = first ? total : total.Then(below);
      total = total.Then(ShuffleFrom(end[j], kWarp - 1));
    }
  }

  // The scan of the row, given the sum of all of it before this stretch.
  __device__ __forceinline__ void Store(const Shape<T>& shape, int64_t row, int64_t begin, const Item& prefix) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    T* out = shape.out + row * shape.n;
    const bool whole = shape.aligned && begin + kWarpItems<T> <= shape.n;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const T base = prefix.Then(before[j]).v;
      Vec16<T> v;
      uint32_t seen = 0;  // a head among the elements so far
      T last = base;      // the inclusive sum of the element before
#pragma unroll
      for (int e = 0; e < kPer<T>; ++e) {
        const uint32_t head = kSegmented ? HeadsOf(j) >> e & 1 : 0;
        seen |= head;
        const T sum = seen ? x[j][e] : base + x[j][e];
        v.at[e] = !shape.exclusive ? sum : head ? T{} : last;
        last = sum;
      }
      const int64_t i = begin + (j * kWarp + lane) * kPer<T>;
      if (whole) {
        StoreVec16(out + i, v);
      } else {
#pragma unroll
        for (int e = 0; e < kPer<T>; ++e) {
          if (i + e < shape.n) out[i + e] = v.at[e];
        }
      }
    }
  }
};

// --- what tiles publish
// ---------------------------------------------------------------------------------------------------
//
// A value and its state in one word that is written and read at once: nothing else hangs on it, so relaxed accesses at
// the scope of the device are all the order that is needed.

enum : uint32_t { kNothing = 0, kTotal = 1, kPrefix = 2, kState = 3, kFlag = 4 };

template <int kBytes>
struct Word;

template <>
struct alignas(8) Word<4> {
  uint32_t value, state;
  static __device__ __forceinline__ Word Load(const Word* from) {
    uint64_t bits;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
    return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  }
  __device__ __forceinline__ void Store(Word* to) const {
    const uint64_t bits = static_cast<uint64_t>(state) << 32 | value;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
  }
};

template <>
struct alignas(16) Word<8> {
  uint64_t value, state;
  static __device__ __forceinline__ Word Load(const Word* from) {
    Word w;
    asm volatile("{\n\t.reg .b128 q;\n\tld.relaxed.gpu.global.b128 q, [%2];\n\tmov.b128 {%0, %1}, q;\n\t}"
                 : "=l"(w.value), "=l"(w.state)
                 : "l"(from)
                 : "memory");
    return w;
  }
  __device__ __forceinline__ void Store(Word* to) const {
    asm volatile("{\n\t.reg .b128 q;\n\tmov.b128 q, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], q;\n\t}" ::"l"(to),
                 "l"(value), "l"(state)
                 : "memory");
  }
};

template <typename T>
__device__ __forceinline__ T FromBits(uint64_t bits) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<T>(bits);
  } else if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(static_cast<uint32_t>(bits));
  } else {
    return static_cast<T>(bits);
  }
}
template <typename T>
__device__ __forceinline__ auto ToBits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(value);
  } else {
    return value;
  }
}

// The words of one row: one for each tile, each group of tiles and each group of groups.
template <typename T, bool kSegmented>
struct Board {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;

  W* tiles;
  W* groups;
  W* larger;

  static __device__ __forceinline__ void Publish(W* to, const Item& item, uint32_t state) {
    W{ToBits(item.v), state | (item.flag() ? kFlag : 0u)}.Store(to);
  }
  static __device__ __forceinline__ Item ItemOf(const W& word) {
    return Item::Of(FromBits<T>(word.value), word.state & kFlag ? 1 : 0);
  }
  static __device__ __forceinline__ uint32_t StateOf(const W& word) { return word.state & kState; }

  static __device__ __forceinline__ W Await(const W* from, uint32_t least) {
    W word = W::Load(from);
    while (StateOf(word) < least) word = W::Load(from);
    return word;
  }

  // Each gives tile t's exclusive prefix (to every lane of the warp that calls it) and publishes what it owes.

  __device__ __forceinline__ Item Domino(int64_t t, const Item& total) const {
    Item prefix;
    if (t > 0) prefix = ItemOf(Await(tiles + t - 1, kPrefix));
    if (threadIdx.x == 0) Publish(tiles + t, prefix.Then(total), kPrefix);
    return prefix;
  }

  __device__ __forceinline__ Item LookBack(int64_t t, const Item& total) const {
    if (threadIdx.x == 0) Publish(tiles + t, total, t > 0 ? kTotal : kPrefix);
    Item prefix;
    if (t == 0) return prefix;
    for (int64_t p = t - 1;; --p) {
      // Lanes may see different states: the first lane's counts for all.
      W word = Await(tiles + p, kTotal);
      word.value = __shfl_sync(kFullWarp, word.value, 0);
      word.state = __shfl_sync(kFullWarp, word.state, 0);
      prefix = ItemOf(word).Then(prefix);
      if (StateOf(word) == kPrefix) break;
    }
    if (threadIdx.x == 0) Publish(tiles + t, prefix.Then(total), kPrefix);
    return prefix;
  }

  __device__ __forceinline__ Item LookBackWindow(int64_t t, const Item& total) const {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane == 0) Publish(tiles + t, total, t > 0 ? kTotal : kPrefix);
    Item prefix;
    if (t == 0) return prefix;
    for (int64_t end = t;; end -= kWarp) {
      // Lanes in the order of tiles; those before the row have nothing, as a prefix.
      const int64_t p = end - kWarp + lane;
      Item item;
      uint32_t state = kPrefix;
      if (p >= 0) {
        const W word = Await(tiles + p, kTotal);
        item = ItemOf(word);
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
    if (lane == 0) Publish(tiles + t, total, kTotal);
    const bool wants_tile = lane < in_group, wants_group = lane < in_larger, wants_larger = lane == 0 && k > 0;
    Item tile, group, larger;
    bool has_tile = !wants_tile, has_group = !wants_group, has_larger = !wants_larger, published = false;
    Item within;
    while (true) {
      if (!has_tile) {
        const W word = W::Load(tiles + g * kGroup + lane);
        has_tile = StateOf(word) != kNothing;
        tile = ItemOf(word);
      }
      if (!has_group) {
        const W word = W::Load(groups + k * kGroup + lane);
        has_group = StateOf(word) != kNothing;
        group = ItemOf(word);
      }
      if (!has_larger) {
        const W word = W::Load(larger_before(k));
        has_larger = StateOf(word) != kNothing;
        larger = ItemOf(word);
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

struct Tickets {
  unsigned long long* next = nullptr;  // null: a tile a row, and nothing to publish
  void* words = nullptr;
  int64_t rows = 0, tiles = 0, groups = 0, larger = 0;  // the last three a row
};

template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kThreads, 3) SinglePassKernel(Shape<T> shape, Tickets tickets, TilePrefix how) {
  using Item = ScanItem<T, kSegmented>;
  using W = Word<sizeof(T)>;
  __shared__ Item totals[kWarps];
  __shared__ Item tile_prefix;
  __shared__ int64_t ticket;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t row = blockIdx.x, t = 0;
  if (tickets.next) {
    if (threadIdx.x == 0) ticket = static_cast<int64_t>(atomicAdd(tickets.next, 1ull));
    __syncthreads();
    row = ticket / tickets.tiles;
    t = ticket % tickets.tiles;
  }
  const int64_t begin = t * kTileItems<T> + warp * kWarpItems<T>;
  Stretch<T, kSegmented> stretch;
  stretch.Load(shape, row, begin);
  stretch.Scan();
  if (threadIdx.x % kWarp == 0) totals[warp] = stretch.total;
  __syncthreads();
  if (tickets.next && warp == 0) {
    Item total = totals[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total = total.Then(totals[w]);
    W* words = static_cast<W*>(tickets.words);
    const Board<T, kSegmented> board{words + row * tickets.tiles,
                                     words + tickets.rows * tickets.tiles + row * tickets.groups,
                                     words + tickets.rows * (tickets.tiles + tickets.groups) + row * tickets.larger};
    Item prefix;
    switch (how) {
      case TilePrefix::kDomino:
        prefix = board.Domino(t, total);
        break;
      case TilePrefix::kLookBack:
        prefix = board.LookBack(t, total);
        break;
      case TilePrefix::kLookBackWindow:
        prefix = board.LookBackWindow(t, total);
        break;
      case TilePrefix::kTree:
        prefix = board.Tree(t, total);
        break;
    }
    if (threadIdx.x == 0) tile_prefix = prefix;
  }
  Item prefix;
  if (tickets.next) {
    __syncthreads();
    prefix = tile_prefix;
  }
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) {
    if (w < warp) prefix = prefix.Then(totals[w]);
  }
  stretch.Store(shape, row, begin, prefix);
}

template <typename T, bool kSegmented>
__global__ void __launch_bounds__(kRowsPerBlock* kWarp) WarpPerRowKernel(Shape<T> shape, int64_t rows) {
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

// Calls body(typed shape, whether it is segmented as a constant).
template <typename T, typename Body>
void WithType(const ScanShape& s, const Body& body) {
  Shape<T> shape{static_cast<const T*>(s.in), s.heads, static_cast<T*>(s.out), s.in_stride, s.n, s.exclusive, false};
  const int64_t in_step = s.rows > 1 ? s.in_stride * static_cast<int64_t>(sizeof(T)) : 0;
  const int64_t out_step = s.rows > 1 ? s.n * static_cast<int64_t>(sizeof(T)) : 0;
  shape.aligned =
      Aligned16(s.in, in_step) && Aligned16(s.out, out_step) && reinterpret_cast<uintptr_t>(s.heads) % kPer<T> == 0;
  if (s.heads) {
    body(shape, std::true_type());
  } else {
    body(shape, std::false_type());
  }
  STILLHOUSE_CUDA_LAUNCHED();
}
template <typename Body>
void WithTypes(const ScanShape& s, const Body& body) {
  switch (s.element) {
    case ScanElement::kFloat:
      return WithType<float>(s, body);
    case ScanElement::kInt32:
      return WithType<uint32_t>(s, body);
    case ScanElement::kInt64:
      return WithType<unsigned long long>(s, body);
  }
}

int64_t BytesOf(ScanElement element) { return element == ScanElement::kInt64 ? 8 : 4; }
int64_t TileItemsOf(ScanElement element) { return kThreads * kVectors * 16 / BytesOf(element); }

Tickets TicketsFor(const ScanShape& s) {
  Tickets tickets;
  tickets.rows = s.rows;
  tickets.tiles = CeilDiv(s.n, TileItemsOf(s.element));
  tickets.groups = CeilDiv(tickets.tiles, kGroup);
  tickets.larger = CeilDiv(tickets.groups, kGroup);
  return tickets;
}

}  // namespace

int64_t SinglePassScanScratch(const ScanShape& s) {
  const Tickets t = TicketsFor(s);
  if (t.tiles <= 1) return 0;
  // The ticket, then the words.
  return 16 + t.rows * (t.tiles + t.groups + t.larger) * 2 * BytesOf(s.element);
}

void LaunchSinglePassScan(const ScanShape& s, TilePrefix prefix, void* scratch, cudaStream_t stream) {
  Tickets tickets = TicketsFor(s);
  if (tickets.tiles > 1) {
    STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(scratch, 0, static_cast<size_t>(SinglePassScanScratch(s)), stream));
    tickets.next = static_cast<unsigned long long*>(scratch);
    tickets.words = static_cast<char*>(scratch) + 16;
  }
  const unsigned grid = static_cast<unsigned>(s.rows * tickets.tiles);
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    SinglePassKernel<T, decltype(segmented)::value><<<grid, kThreads, 0, stream>>>(shape, tickets, prefix);
  });
}

bool FitsWarpPerRow(const ScanShape& s) { return s.n <= 2 * TileItemsOf(s.element) / kWarps && s.rows > 1; }

void LaunchWarpPerRowScan(const ScanShape& s, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(CeilDiv(s.rows, kRowsPerBlock));
  WithTypes(s, [&](auto shape, auto segmented) {
    using T = std::remove_pointer_t<decltype(shape.out)>;
    WarpPerRowKernel<T, decltype(segmented)::value><<<grid, kRowsPerBlock * kWarp, 0, stream>>>(shape, s.rows);
  });
}

}  // namespace stillhouse::cuda
