// Products over a long K in slices. bf16 operands go to the tensor cores straight from memory: a lane loads 16 bytes
// along K, and as a product does not mind the order of K, those bytes are its fragments of two steps of mma.m16n8k16.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/decompose_k_finish.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/select.cuh"

namespace stillhouse::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256;   // of a reducer's block
constexpr int64_t kChunk = 32;  // of K, that a warp takes at a time
constexpr int kMaxRow = 1024;   // columns under an epilogue over rows

// A kernel may start while the one before it in the stream ends (programmatic dependent launch): it waits here before
// it touches memory, and lets the next one come (earlier, blocks of three kernels would crowd multiprocessors; a
// reducer, which is small, may).
__device__ __forceinline__ void WaitForEarlierKernels() {
  WaitForPreviousKernel();
  LetNextKernelStart();
}

// --- tensor cores
// -------------------------------------------------------------------------------------------------------

// How operands lie: K contiguous in both, in 16-byte steps; K contiguous in A and N in B; anything.
enum class Layout : uint8_t { kAlongK, kAcrossN, kAny };

// Where a lane begins to read: its element 0 of chunk 0, and how many rows (or columns) there are from there.
struct From {
  const __nv_bfloat16* at;
  int64_t left;
};

// The chunk from k for `kGroups` groups of 8 rows (of A) or columns (of B): lane (g, t) gets elements 8t … 8t + 7 of
// the chunk for row 8·i + g, as four pairs. Past the last row or K: zeros.
__device__ __forceinline__ From AlongK(const Operand& x, int64_t begin, int64_t limit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t row = begin + lane / 4;
  return {static_cast<const __nv_bfloat16*>(x.data) + row * x.stride_outer + lane % 4 * 8 * x.stride_k, limit - row};
}

template <int kGroups, bool kVector>
__device__ __forceinline__ void LoadAlongK(const Operand& x, const From& from, int64_t k, int64_t width,
                                           uint4 (&to)[kGroups]) {
  const int64_t left = width - k - static_cast<int>(threadIdx.x) % 4 * 8;  // of K
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const __nv_bfloat16* const at = from.at + 8 * i * x.stride_outer + k * x.stride_k;
    to[i] = make_uint4(0, 0, 0, 0);
    if (8 * i >= from.left) continue;
    if constexpr (kVector) {
      if (left > 0) to[i] = *reinterpret_cast<const uint4*>(at);
    } else {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pair = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (2 * w + e < left) {
            pair |= static_cast<uint32_t>(__bfloat16_as_ushort(at[(2 * w + e) * x.stride_k])) << (16 * e);
          }
        }
        words[w] = pair;
      }
      to[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The same of B where N is contiguous. Rows of 8×8 matrices are read as they lie, to be turned between lanes: matrix w
// of a group has rows 8·(g / 2) + 2·w + g % 2 of the chunk, so that the pairs come out as above.
template <int kGroups>
struct AcrossN {
  static constexpr int kColumns = kGroups < 4 ? 2 * kGroups : 8;  // a lane reads at once: a pair of as many groups
  static constexpr int kPairs = kColumns / 2, kReads = kGroups / kPairs;
  // Which column of the tile group i's column c is.
  static __device__ __forceinline__ int Column(int i, int c) {
    return i / kPairs * 4 * kColumns + c / 2 * kColumns + i % kPairs * 2 + c % 2;
  }
  static __device__ __forceinline__ int Row() {
    const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
    return g / 2 * 8 + g % 2;
  }
  static __device__ __forceinline__ From Begin(const Operand& b, int64_t begin, int64_t limit) {
    const int64_t column = begin + static_cast<int>(threadIdx.x) % 4 * kColumns;
    return {static_cast<const __nv_bfloat16*>(b.data) + Row() * b.stride_k + column, limit - column};
  }
  static __device__ __forceinline__ void Load(const Operand& b, const From& from, int64_t k, int64_t width,
                                              uint4 (&to)[kGroups]) {
    const int64_t left = width - k - Row();
    uint32_t words[4][kGroups];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int h = 0; h < kReads; ++h) {
        // The limit of columns is a multiple of what is read at once.
        const bool valid = 2 * w < left && h * 4 * kColumns < from.left;
        const __nv_bfloat16* const at = from.at + (k + 2 * w) * b.stride_k + h * 4 * kColumns;
        if constexpr (kPairs == 2) {
          const uint2 v = valid ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
          words[w][2 * h] = v.x;
          words[w][2 * h + 1] = v.y;
        } else {
          const uint4 v = valid ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
          words[w][4 * h] = v.x;
          words[w][4 * h + 1] = v.y;
          words[w][4 * h + 2] = v.z;
          words[w][4 * h + 3] = v.w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) to[i] = make_uint4(words[0][i], words[1][i], words[2][i], words[3][i]);
  }
  static __device__ __forceinline__ void Turn(uint4 (&to)[kGroups]) {
#pragma unroll
    for (uint4& v : to) {
      v = make_uint4(TransposeMatrix(v.x), TransposeMatrix(v.y), TransposeMatrix(v.z), TransposeMatrix(v.w));
    }
  }
};

// One block: a tile of the output over one slice of K, of `chunks`, and one more in the first `more` slices. Warps take
// the slice's chunks in turn; their sums meet in shared memory. In a cluster (along y) each block then owns a part of
// the tile and adds up what the others send it; otherwise the tile is written to `partials`. As measured; square small
// tiles leave registers for twice the warps.
template <int kTileM, int kTileN>
constexpr int kTensorWarps = kTileM* kTileN <= 1024 ? 16 : 8;

template <int kTileM, int kTileN, Layout kLayout>
__global__ void __launch_bounds__(kTensorWarps<kTileM, kTileN>* kWarp, 1)
    TensorKernel(DecomposeKShape s, int tiles_n, int chunks, int more, float* partials) {
  constexpr int kWarps = kTensorWarps<kTileM, kTileN>, kThreads = kWarps * kWarp;
  constexpr int kGroupsM = kTileM / 8, kGroupsN = kTileN / 8, kTile = kTileM * kTileN;
  // Chunks in flight: as many as registers hold beside the sums.
  constexpr int kAhead = kTile <= 512 || kTile == 2048 ? 2 : 1;
  extern __shared__ float shared[];
  float* sums = shared;                     // [kWarps][kTile]
  float* received = sums + kWarps * kTile;  // [blocks of the cluster][kTile / blocks]
  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / tiles_n) * kTileM;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % tiles_n) * kTileN;
  const int slice = static_cast<int>(blockIdx.y);
  const int begin = slice * chunks + min(slice, more), end = begin + chunks + (slice < more ? 1 : 0);
  From from_a = AlongK(s.a, row0, s.m), from_b;
  if constexpr (kLayout == Layout::kAcrossN) {
    from_b = AcrossN<kGroupsN>::Begin(s.b, column0, s.n);
  } else {
    from_b = AlongK(s.b, column0, s.n);
  }
  Hold(from_a.at, from_a.left, from_b.at, from_b.left);
  WaitForEarlierKernels();

  float sum[kGroupsM / 2][kGroupsN][4] = {};
  for (int c = begin + warp; c < end; c += kAhead * kWarps) {
    uint4 a[kAhead][kGroupsM], b[kAhead][kGroupsN];
#pragma unroll
    for (int h = 0; h < kAhead; ++h) {
      // Chunks past the slice's end are read as past the end of K.
      const int64_t chunk = c + h * kWarps, k = chunk < end ? chunk * kChunk : s.k;
      LoadAlongK<kGroupsM, kLayout != Layout::kAny>(s.a, from_a, k, s.k, a[h]);
      if constexpr (kLayout == Layout::kAcrossN) {
        AcrossN<kGroupsN>::Load(s.b, from_b, k, s.k, b[h]);
      } else {
        LoadAlongK<kGroupsN, kLayout != Layout::kAny>(s.b, from_b, k, s.k, b[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kAhead; ++h) {
      if constexpr (kLayout == Layout::kAcrossN) AcrossN<kGroupsN>::Turn(b[h]);
#pragma unroll
      for (int i = 0; i < kGroupsM / 2; ++i) {
        const uint4 low = a[h][2 * i], high = a[h][2 * i + 1];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < kGroupsN; ++j) {
          MultiplyAdd(sum[i][j], first, b[h][j].x, b[h][j].y);
          MultiplyAdd(sum[i][j], second, b[h][j].z, b[h][j].w);
        }
      }
    }
  }

  // In the order of fragments: place = ((i · groups + j) · 4 + e) · 32 + lane.
#pragma unroll
  for (int i = 0; i < kGroupsM / 2; ++i) {
#pragma unroll
    for (int j = 0; j < kGroupsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[warp * kTile + ((i * kGroupsN + j) * 4 + e) * kWarp + lane] = sum[i][j][e];
      }
    }
  }
  const auto row_of = [&](int place) {
    return row0 + place / (128 * kGroupsN) * 16 + place % kWarp / 4 + (place / 64 % 2) * 8;
  };
  const auto column_of = [&](int place) {
    const int j = place / 128 % kGroupsN, column = place % 4 * 2 + place / kWarp % 2;
    return column0 + (kLayout == Layout::kAcrossN ? AcrossN<kGroupsN>::Column(j, column) : 8 * j + column);
  };
  if (blocks > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every block has begun
  __syncthreads();
  const int part = kTile / blocks, part_log2 = __ffs(part) - 1;  // clusters have powers of two
  for (int place = static_cast<int>(threadIdx.x); place < kTile; place += kThreads) {
    float total = sums[place];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w * kTile + place];
    if (blocks > 1) {
      *cluster.map_shared_rank(received + rank * part + (place & (part - 1)), place >> part_log2) = total;
      continue;
    }
    const int64_t row = row_of(place), column = column_of(place);
    if (row >= s.m || column >= s.n) continue;
    if (partials) {
      partials[(static_cast<int64_t>(blockIdx.y) * s.m + row) * s.n + column] = total;
    } else {
      Store(s, row, column, total, Before(s, row, column));
    }
  }
  if (blocks == 1) return;
  cluster.sync();
  for (int i = static_cast<int>(threadIdx.x); i < part; i += kThreads) {
    float total = received[i];
#pragma unroll 8
    for (int from = 1; from < blocks; ++from) total += received[from * part + i];
    const int place = rank * part + i;
    const int64_t row = row_of(place), column = column_of(place);
    if (row < s.m && column < s.n) Store(s, row, column, total, Before(s, row, column));
  }
}

// --- any operands
// -------------------------------------------------------------------------------------------------------

constexpr int kSide = 16;  // of an output's tile; a thread an element

template <typename A, typename B>
__global__ void __launch_bounds__(kSide* kSide) PlainKernel(DecomposeKShape s, int tiles_n, float* partials) {
  __shared__ float a_tile[kSide][kChunk + 1], b_tile[kSide][kChunk + 1];
  WaitForEarlierKernels();
  const auto* a = static_cast<const A*>(s.a.data);
  const auto* b = static_cast<const B*>(s.b.data);
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / tiles_n) * kSide;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % tiles_n) * kSide;
  const int64_t chunks = CeilDiv(s.k, kChunk);
  const int64_t begin = chunks * blockIdx.y / gridDim.y * kChunk;
  const int64_t end = min(s.k, chunks * (blockIdx.y + 1) / gridDim.y * kChunk);
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  // Neighbouring threads read neighbouring elements, whichever way an operand lies.
  const auto load = [&](const auto* data, const Operand& operand, int64_t first, int64_t limit, int64_t k0,
                        float(&tile)[kSide][kChunk + 1]) {
    for (int i = static_cast<int>(threadIdx.x); i < kSide * kChunk; i += kSide * kSide) {
      const bool along_k = operand.stride_k == 1;
      const int outer = along_k ? i / static_cast<int>(kChunk) : i % kSide;
      const int inner = along_k ? i % static_cast<int>(kChunk) : i / kSide;
      const int64_t row = first + outer, k = k0 + inner;
      tile[outer][inner] =
          row < limit && k < end ? ToFloat(data[row * operand.stride_outer + k * operand.stride_k]) : 0.0f;
    }
  };
  float sum = 0.0f;
  for (int64_t k0 = begin; k0 < end; k0 += kChunk) {
    load(a, s.a, row0, s.m, k0, a_tile);
    load(b, s.b, column0, s.n, k0, b_tile);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChunk; ++k) sum += a_tile[y][k] * b_tile[x][k];
    __syncthreads();
  }
  const int64_t row = row0 + y, column = column0 + x;
  if (row >= s.m || column >= s.n) return;
  if (partials) {
    partials[(static_cast<int64_t>(blockIdx.y) * s.m + row) * s.n + column] = sum;
  } else {
    Store(s, row, column, sum, Before(s, row, column));
  }
}

// --- reducers
// -----------------------------------------------------------------------------------------------------------

__device__ void SinkhornInPlace(const DecomposeKRows& rows, float* m) {
  const int n = rows.sinkhorn_n, size = n * n;
  float best = -INFINITY;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) best = fmaxf(best, m[i]);
  // The largest element cancels in the first step.
  best = BlockMax<kThreads>(best, -INFINITY);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) m[i] = std::exp(m[i] - best);
  __syncthreads();
  for (int half = 0; half < 2 * rows.sinkhorn_rounds; ++half) {
    const int along = half % 2 == 0 ? n : 1, across = half % 2 == 0 ? 1 : n;
    if (static_cast<int>(threadIdx.x) < n) {
      float* line = m + static_cast<int>(threadIdx.x) * across;
      float sum = rows.sinkhorn_eps;
      for (int j = 0; j < n; ++j) sum += line[j * along];
      for (int j = 0; j < n; ++j) line[j * along] /= sum;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    ReduceRowsKernel(DecomposeKShape s, DecomposeKRows rows, int splits, const float* partials) {
  __shared__ float c[kMaxRow], parts[kThreads];
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t row = blockIdx.x;
  const int n = static_cast<int>(s.n);
  // Where a row is short, groups of threads share the slices.
  const int groups = n < kThreads ? kThreads / n : 1;
  for (int i = static_cast<int>(threadIdx.x); i < groups * n; i += kThreads) {
    const int group = i / n, column = i - group * n;
    float sum = 0.0f;
#pragma unroll 8
    for (int p = group; p < splits; p += groups) sum += partials[(p * s.m + row) * s.n + column];
    (groups > 1 ? parts : c)[i] = sum;
  }
  __syncthreads();
  if (groups > 1) {
    if (static_cast<int>(threadIdx.x) < n) {
      float sum = parts[threadIdx.x];
      for (int group = 1; group < groups; ++group) sum += parts[group * n + static_cast<int>(threadIdx.x)];
      c[threadIdx.x] = sum;
    }
    __syncthreads();
  }
  if (rows.op == RowOp::kTopK) {
    for (int k = 0; k < rows.top_k; ++k) {
      uint64_t best = 0;
      for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
        // Taken ones are NaN.
        const uint64_t entry = MakeEntry(LogitKey(c[i]), i);
        best = c[i] == c[i] && entry > best ? entry : best;
      }
      best = BlockFold<kThreads>(best, uint64_t{0}, MaxOf());
      if (threadIdx.x == 0) {
        const int id = best ? EntryId(best) : -1;
        rows.top_ids[row * rows.top_k + k] = id;
        rows.top_values[row * rows.top_k + k] = id >= 0 ? c[id] : -INFINITY;
        if (id >= 0) c[id] = NAN;
      }
      __syncthreads();
    }
    return;
  }
  if (rows.op == RowOp::kSoftmax) {
    float best = -INFINITY, sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) best = fmaxf(best, c[i]);
    best = BlockMax<kThreads>(best, -INFINITY);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) sum += c[i] = SoftmaxWeight(c[i], best);
    sum = BlockSum<kThreads>(sum);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) c[i] /= sum;
    __syncthreads();
  } else {
    SinkhornInPlace(rows, c + n - rows.sinkhorn_n * rows.sinkhorn_n);
  }
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) *PlaceOf(s, row, i) = c[i];
}

// --- launches
// -----------------------------------------------------------------------------------------------------------

bool VectorsAlongK(const Operand& x) { return x.stride_k == 1 && Aligned16(x.data, 2 * x.stride_outer); }

Layout LayoutOf(const DecomposeKShape& s, int tile_n) {
  if (!VectorsAlongK(s.a) || s.k % 8 != 0) return Layout::kAny;
  if (VectorsAlongK(s.b)) return Layout::kAlongK;
  const int step = tile_n < 32 ? tile_n / 4 : 8;  // columns read at once
  const bool across = s.b.stride_outer == 1 && s.n % step == 0 && s.b.stride_k % step == 0 &&
                      reinterpret_cast<uintptr_t>(s.b.data) % (2 * static_cast<uintptr_t>(step)) == 0;
  return across ? Layout::kAcrossN : Layout::kAny;
}

template <int kTileM, int kTileN, Layout kLayout>
void LaunchTensor(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  constexpr int kWarps = kTensorWarps<kTileM, kTileN>;
  constexpr int kShared = 4 * (kWarps + 1) * kTileM * kTileN;
  const int tiles_n = static_cast<int>(CeilDiv(s.n, kTileN));
  const dim3 grid(static_cast<unsigned>(tiles_n * CeilDiv(s.m, kTileM)), static_cast<unsigned>(plan.splits));
  const int chunks = static_cast<int>(CeilDiv(s.k, kChunk));
  const unsigned cluster = plan.way == DecomposeKWay::kCluster ? grid.y : 1;
  LaunchClustersEarly(TensorKernel<kTileM, kTileN, kLayout>, grid, dim3(1, cluster), kWarps * kWarp, kShared, stream, s,
                      tiles_n, chunks / plan.splits, chunks % plan.splits, partials);
}

template <int kTileM, int kTileN>
void LaunchTile(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  switch (LayoutOf(s, kTileN)) {
    case Layout::kAlongK:
      return LaunchTensor<kTileM, kTileN, Layout::kAlongK>(s, plan, partials, stream);
    case Layout::kAcrossN:
      return LaunchTensor<kTileM, kTileN, Layout::kAcrossN>(s, plan, partials, stream);
    case Layout::kAny:
      return LaunchTensor<kTileM, kTileN, Layout::kAny>(s, plan, partials, stream);
  }
}

void LaunchProduct(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  if (TakesTensorCores(s)) {
    if (plan.tile_m == 16 && plan.tile_n == 16) return LaunchTile<16, 16>(s, plan, partials, stream);
    if (plan.tile_m == 16) return LaunchTile<16, 32>(s, plan, partials, stream);
    if (plan.tile_m == 32) return LaunchTile<32, 32>(s, plan, partials, stream);
    if (plan.tile_n == 32) return LaunchTile<64, 32>(s, plan, partials, stream);
    return LaunchTile<64, 64>(s, plan, partials, stream);
  }
  const int tiles_n = static_cast<int>(CeilDiv(s.n, kSide));
  const dim3 grid(static_cast<unsigned>(tiles_n * CeilDiv(s.m, kSide)), static_cast<unsigned>(plan.splits));
  const auto run = [&](auto* kernel) {
    LaunchKernelEarly(kernel, grid, kSide * kSide, 0, stream, s, tiles_n, partials);
  };
  if (s.a.bf16) {
    s.b.bf16 ? run(PlainKernel<__nv_bfloat16, __nv_bfloat16>) : run(PlainKernel<__nv_bfloat16, float>);
  } else {
    s.b.bf16 ? run(PlainKernel<float, __nv_bfloat16>) : run(PlainKernel<float, float>);
  }
}

}  // namespace

bool CanFragments(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  const auto is = [&](int tile_m, int tile_n) { return plan.tile_m == tile_m && plan.tile_n == tile_n; };
  if (plan.splits > ChunksOf(s) || plan.splits >= 65536) return false;
  if (!TakesTensorCores(s)) return is(kSide, kSide);
  return is(16, 16) || is(16, 32) || is(32, 32) || is(64, 32) || is(64, 64);
}

int64_t ChunksOf(const DecomposeKShape& s) { return s.k > 0 ? CeilDiv(s.k, kChunk) : 1; }

void LaunchDecomposeK(const DecomposeKShape& s, const DecomposeKPlan& plan, const DecomposeKRows* rows, float* partials,
                      cudaStream_t stream) {
  if (plan.way == DecomposeKWay::kCluster) {
    return FromMemory(s, plan) ? LaunchProduct(s, plan, nullptr, stream) : LaunchSlices(s, plan, nullptr, stream);
  }
  if (plan.way == DecomposeKWay::kExchange) return LaunchSlices(s, plan, partials, stream);
  if (const auto launch = SlicesLaunch(plan.way)) {
    const bool finish = plan.splits == 1 && !rows;
    launch(s, plan, finish ? nullptr : partials, stream);
    if (finish) return;
  } else if (plan.way == DecomposeKWay::kFragments) {
    LaunchProduct(s, plan, partials, stream);
  }
  if (rows) {
    LaunchKernelEarly(ReduceRowsKernel, dim3(static_cast<unsigned>(s.m)), kThreads, 0, stream, s, *rows, plan.splits,
                      partials);
    return;
  }
  LaunchReduceSlices(s, plan, partials, stream);
}

}  // namespace stillhouse::cuda
