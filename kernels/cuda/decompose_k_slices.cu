// Products over slices of K by blocks of 256 threads: operands come through shared memory in stages of 64 of K
// (cp.async, 16 bytes at a time, rotated so that ldmatrix meets no bank twice) and go to the tensor cores from there. A
// slice that fits is asked for at once; a longer one comes through a ring. Warps share the tile first and the steps of
// K then; their sums meet in shared memory. The slices' sums meet in memory, where a second kernel adds them up, or in
// the same launch: in the shared memory of a cluster, or through memory where all blocks run at once. Then each block
// of a tile finishes a part of it.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/decompose_k_finish.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/exchange.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"

namespace stillhouse::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kDepth = 64;  // of K, in a stage
constexpr int kChunks = kDepth / 8;

// How a block's tile is shared, and where things lie.
template <int kTileM, int kTileN>
struct Plan {
  static constexpr int kWarpM = kTileM < 32 ? kTileM : 32, kWarpN = kTileN < 32 ? kTileN : 32;  // a warp's part
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN, kWarpsK = kWarps / (kWarpsM * kWarpsN);
  static constexpr int kBytesA = kTileM * kDepth * 2, kBytesB = kTileN * kDepth * 2, kStageBytes = kBytesA + kBytesB;
  static constexpr int kStages = kStageBytes <= 6144 ? 12 : 8;  // at most; even
  static constexpr int kSumStride = kTileN + 8;  // floats: the eight rows of a fragment meet no bank twice
  static constexpr int kSumBytes = kWarpsK * kTileM * kSumStride * 4;
  // Of slices of `count` stages. What a block of a cluster receives lies behind all that it may still be reading.
  static constexpr __host__ __device__ int Received(int count) {
    const int stages = (count < kStages ? count : kStages) * kStageBytes;
    return stages > kSumBytes ? stages : kSumBytes;
  }
  static constexpr int SharedBytes(int count, bool cluster) {
    return Received(count) + (cluster ? kTileM * kTileN * 4 : 0);
  }
};

struct SliceParams {
  const char* a;
  const char* b;
  int64_t a_stride, b_stride;  // bytes: of rows of A; of columns of B, or (kAcross) of rows of B
  int m, n, k, slice;          // slice: of K, a multiple of kDepth
  int part_log2;               // of the vectors of a tile that a block finishes (kExchange)
};

// Where chunk c (8 columns) of row r of K lies, in a matrix kColumns wide whose rows share lines of 128 bytes.
template <int kColumns>
__device__ __forceinline__ int AcrossOffset(int r, int c) {
  constexpr int kPerRow = kColumns / 8, kRowsOfLine = 8 / kPerRow;
  const int line = r / kRowsOfLine;
  return line * 128 + (((r % kRowsOfLine) * kPerRow + (c ^ (line & (kPerRow - 1)))) << 4);
}
// The same of chunk c of K of a row that has a line of its own.
__device__ __forceinline__ int AlongOffset(int r, int c) { return r * 128 + ((c ^ (r & 7)) << 4); }

// Every block of a tile leaves each owner its sums of the owner's part; owners add up what is left for them, in an
// order that depends on the sizes alone. The sums of a block's warps are in `sums`. Sums go in vectors of four; an
// owner has 2^part_log2 of a tile's.
template <int kTileM, int kTileN>
__device__ __forceinline__ void ExchangeSums(const DecomposeKShape& s, int part_log2, int row0, int column0,
                                             float* sums, float4* exchange) {
  using P = Plan<kTileM, kTileN>;
  constexpr int kVectors = kTileM * kTileN / 4, kAtOnce = 4;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int splits = static_cast<int>(gridDim.z), slice = static_cast<int>(blockIdx.z);
  const int m = static_cast<int>(s.m), n = static_cast<int>(s.n);
  const int part = 1 << part_log2;
  const auto row_of = [](int vector) { return vector * 4 / kTileN; };
  const auto column_of = [](int vector) { return vector * 4 % kTileN; };
  const auto exists = [&](int vector) { return row0 + row_of(vector) < m && column0 + column_of(vector) < n; };
  exchange += static_cast<int64_t>(blockIdx.y * gridDim.x + blockIdx.x) * splits * kVectors;
  for (int i = thread; i < kVectors; i += kThreads) {
    if (!exists(i)) continue;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < P::kWarpsK; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(sums + (w * kTileM + row_of(i)) * P::kSumStride + column_of(i));
      total.x += x.x;
      total.y += x.y;
      total.z += x.z;
      total.w += x.w;
    }
    GiveSums(exchange + ((i >> part_log2) * splits + slice) * part + (i & (part - 1)), total);
  }
  const int first = slice * part;
  if (first >= kVectors) return;

  // A group of threads has one of `part` vectors each, and every so many-th slice.
  const int vector = thread & (part - 1), group = thread >> part_log2, groups = kThreads >> part_log2;
  float4* const from = exchange + first * splits + vector;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int i = group; exists(first + vector) && i < splits; i += kAtOnce * groups) {
    float4 value[kAtOnce];
    bool come = false;
    while (!come) {
      come = true;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (i + j * groups >= splits) break;
        value[j] = LookForSums(from + (i + j * groups) * part);
        come = come && !Absent(value[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * groups >= splits) break;
      EmptyPlace(from + (i + j * groups) * part);
      sum.x += value[j].x;
      sum.y += value[j].y;
      sum.z += value[j].z;
      sum.w += value[j].w;
    }
  }
  __syncwarp();
  // Groups of one warp meet there, the others in shared memory.
  for (int other = kWarp / 2; other >= part; other /= 2) {
    sum.x += __shfl_xor_sync(kFullWarp, sum.x, other);
    sum.y += __shfl_xor_sync(kFullWarp, sum.y, other);
    sum.z += __shfl_xor_sync(kFullWarp, sum.z, other);
    sum.w += __shfl_xor_sync(kFullWarp, sum.w, other);
  }
  const int lines = part < kWarp ? kWarps : groups;
  __syncthreads();  // the warps' sums are read
  if (part >= kWarp || lane < part) {
    *reinterpret_cast<float4*>(sums + ((part < kWarp ? warp : group) * part + vector) * 4) = sum;
  }
  __syncthreads();
  for (int i = thread; i < 4 * part; i += kThreads) {
    const int row = row0 + row_of(first + i / 4), column = column0 + column_of(first + i / 4) + i % 4;
    if (row >= m || column >= n) continue;
    const float before = Before(s, row, column);
    float total = sums[i];
    for (int line = 1; line < lines; ++line) total += sums[line * 4 * part + i];
    Store(s, row, column, total, before);
  }
}

// `partials`: where the slices' sums go, [slices, m, n], or with `exchange` the buffer that they pass through; null: a
// cluster's, or the only slice's.
template <int kTileM, int kTileN, bool kAcross>
__global__ void __launch_bounds__(kThreads)
    SliceKernel(const SliceParams p, const DecomposeKShape s, float* partials, bool exchange) {
  using P = Plan<kTileM, kTileN>;
  constexpr int kStages = P::kStages;
  extern __shared__ __align__(128) unsigned char stages[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int column0 = static_cast<int>(blockIdx.x) * kTileN, row0 = static_cast<int>(blockIdx.y) * kTileM;
  const int begin = static_cast<int>(blockIdx.z) * p.slice, end = min(p.k, begin + p.slice);
  const int count = (end - begin + kDepth - 1) / kDepth;

  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks());
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  // What a thread copies of a stage: 16 bytes of every so many-th row. A block runs through its instructions once, so
  // that they cost as much as they do: where things are and go is known before the kernel ahead has ended.
  constexpr int kChunksB = kAcross ? kTileN / 8 : kChunks, kRowsB = kAcross ? kDepth : kTileN;
  constexpr int kStepA = kThreads / kChunks, kStepB = kThreads / kChunksB;
  const int row_a = thread / kChunks, chunk_a = thread % kChunks;
  const int row_b = thread / kChunksB, chunk_b = thread % kChunksB;
  const uint32_t shared = SharedAddress(stages);
  const char* from_a = p.a + static_cast<int64_t>(row0 + row_a) * p.a_stride + (begin + chunk_a * 8) * 2;
  uint32_t to_a = shared + AlongOffset(row_a, chunk_a);
  int depth_a = end - begin - chunk_a * 8, rows_a = p.m - row0 - row_a;  // that there are from there
  const char* from_b = kAcross ? p.b + static_cast<int64_t>(begin + row_b) * p.b_stride + (column0 + chunk_b * 8) * 2
                               : p.b + static_cast<int64_t>(column0 + row_b) * p.b_stride + (begin + chunk_b * 8) * 2;
  uint32_t to_b = shared + P::kBytesA + (kAcross ? AcrossOffset<kTileN>(row_b, chunk_b) : AlongOffset(row_b, chunk_b));
  int depth_b = kAcross ? (column0 + chunk_b * 8 < p.n ? end - begin - row_b : 0) : end - begin - chunk_b * 8;
  int rows_b = p.n - column0 - row_b;
  const int64_t stage_b = kAcross ? kDepth * p.b_stride : kDepth * 2;
  // What a warp multiplies of the first sixteen of K of a stage.
  const int warp_k = warp / (P::kWarpsM * P::kWarpsN), warp_n = warp % P::kWarpsN,
            warp_m = warp / P::kWarpsN % P::kWarpsM;
  const int part_m = warp_m * P::kWarpM, part_n = warp_n * P::kWarpN;
  uint32_t rows_at = shared + AlongOffset(part_m + lane % 16, lane / 16);
  uint32_t columns_at = shared + P::kBytesA +
                        (kAcross ? AcrossOffset<kTileN>(lane % 16, part_n / 8 + lane / 16)
                                 : AlongOffset(part_n + lane % 8 + lane / 16 * 8, lane / 8 % 2));
  // Where it leaves its sums, and what a thread writes of the tile's: every kStepOut-th row's element.
  constexpr int kStepOut = kThreads / kTileN;
  const int row_out = thread / kTileN, column_out = thread % kTileN;
  int sums_to = (warp_k * kTileM + part_m + lane / 4) * P::kSumStride + part_n + lane % 4 * 2;
  int sums_from = row_out * P::kSumStride + column_out;
  float* partial = partials + (static_cast<int64_t>(blockIdx.z) * p.m + row0 + row_out) * p.n + column0 + column_out;
  Hold(from_a, to_a, depth_a, rows_a, from_b, to_b, depth_b, rows_b);
  Hold(rows_at, columns_at, sums_to, sums_from, partial);
  const auto ask_a = [&](int stage, int slot) {
    if (stage >= count) return;
#pragma unroll
    for (int j = 0; j < (kTileM + kStepA - 1) / kStepA; ++j) {
      if (kTileM % kStepA != 0 && row_a + j * kStepA >= kTileM) break;
      CopyAsync16(to_a + slot * P::kStageBytes + j * kStepA * 128,
                  from_a + stage * (kDepth * 2) + j * kStepA * p.a_stride,
                  stage * kDepth < depth_a && j * kStepA < rows_a);
    }
  };
  const auto ask_b = [&](int stage, int slot) {
    if (stage >= count) return;
#pragma unroll
    for (int j = 0; j < (kRowsB + kStepB - 1) / kStepB; ++j) {
      if (kRowsB % kStepB != 0 && row_b + j * kStepB >= kRowsB) break;
      CopyAsync16(to_b + slot * P::kStageBytes + j * kStepB * (kAcross ? kTileN * 2 : 128),
                  from_b + stage * stage_b + j * kStepB * p.b_stride,
                  kAcross ? stage * kDepth + j * kStepB < depth_b : stage * kDepth < depth_b && j * kStepB < rows_b);
    }
  };

  float sum[P::kWarpM / 16][P::kWarpN / 8][4] = {};
  // Sixteen of K are two chunks of a row: those of step q lie where those of step 0 do, but for two bits.
  const auto multiply = [&](int slot, int q) {
    const uint32_t a = (rows_at + slot * P::kStageBytes) ^ (q << 5);
    uint32_t b = columns_at + slot * P::kStageBytes;
    b = kAcross ? b + q * 16 * kTileN * 2 : b ^ (q << 5);
    uint32_t rows[P::kWarpM / 16][4], columns[P::kWarpN / 16][4];
#pragma unroll
    for (int i = 0; i < P::kWarpM / 16; ++i) LoadMatrices(rows[i], a + i * 16 * 128);
#pragma unroll
    for (int j = 0; j < P::kWarpN / 16; ++j) {
      if constexpr (kAcross) {
        LoadMatricesTransposed(columns[j], b ^ (j << 5));
      } else {
        LoadMatrices(columns[j], b + j * 16 * 128);
      }
    }
#pragma unroll
    for (int i = 0; i < P::kWarpM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < P::kWarpN / 16; ++j) {
        MultiplyAdd(sum[i][2 * j], rows[i], columns[j][0], columns[j][1]);
        MultiplyAdd(sum[i][2 * j + 1], rows[i], columns[j][2], columns[j][3]);
      }
    }
  };
  constexpr int kSteps = kDepth / 16;  // of a stage

  const bool whole = count <= kStages;
  const int first = whole ? count : kStages - 2;  // stages asked for before anything is multiplied
  if (s.constant_b) {
#pragma unroll 1
    for (int stage = 0; stage < first; ++stage) ask_b(stage, stage);
  }
  WaitForPreviousKernel();
  LetNextKernelStart();
  if (whole) {
#pragma unroll 1
    for (int stage = 0; stage < count; ++stage) {
      ask_a(stage, stage);
      if (!s.constant_b) ask_b(stage, stage);
    }
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();
#pragma unroll 2
    for (int step = warp_k; step < count * kSteps; step += P::kWarpsK) multiply(step / kSteps, step % kSteps);
  } else {
    // Two stages to a barrier.
#pragma unroll 1
    for (int stage = 0; stage < first; ++stage) {
      ask_a(stage, stage);
      if (!s.constant_b) ask_b(stage, stage);
      if (stage % 2 == 1) CopyAsyncCommit();
    }
    int slot = 0, free_slot = first;
#pragma unroll 1
    for (int stage = 0; stage < count; stage += 2) {
      CopyAsyncWait<kStages / 2 - 2>();
      __syncthreads();  // these two are here, and the two before them are read
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ask_a(stage + first + i, free_slot + i);
        ask_b(stage + first + i, free_slot + i);
      }
      CopyAsyncCommit();
      free_slot = free_slot + 2 == kStages ? 0 : free_slot + 2;
      const int steps = stage + 1 < count ? 2 * kSteps : kSteps;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; i += P::kWarpsK) {
        const int step = i + warp_k;
        if (step < steps) multiply(slot + step / kSteps, step % kSteps);
      }
      slot = slot + 2 == kStages ? 0 : slot + 2;
    }
    CopyAsyncWait<0>();
  }

  __syncthreads();
  float* sums = reinterpret_cast<float*>(stages);  // [kWarpsK][kTileM][kSumStride]
#pragma unroll
  for (int i = 0; i < P::kWarpM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < P::kWarpN / 8; ++j) {
      float* to = sums + sums_to + i * 16 * P::kSumStride + j * 8;
      *reinterpret_cast<float2*>(to) = make_float2(sum[i][j][0], sum[i][j][1]);
      *reinterpret_cast<float2*>(to + 8 * P::kSumStride) = make_float2(sum[i][j][2], sum[i][j][3]);
    }
  }
  if (blocks > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // every block has begun
  __syncthreads();
  if (exchange) {
    ExchangeSums<kTileM, kTileN>(s, p.part_log2, row0, column0, sums, reinterpret_cast<float4*>(partials));
    return;
  }
  float* received =
      reinterpret_cast<float*>(stages + P::Received(p.slice / kDepth));  // [blocks][kTileM · kTileN / blocks]
  const int part = kTileM * kTileN / blocks;
#pragma unroll
  for (int j = 0; j < kTileM * kTileN / kThreads; ++j) {
    const int i = thread + j * kThreads, r = row_out + j * kStepOut, c = column_out;
    if (row0 + r >= p.m) break;
    if (column0 + c >= p.n) continue;
    const float* const from = sums + sums_from + j * kStepOut * P::kSumStride;
    float total = *from;
#pragma unroll
    for (int w = 1; w < P::kWarpsK; ++w) total += from[w * kTileM * P::kSumStride];
    if (blocks > 1) {
      const int owner = i / part;
      *cluster.map_shared_rank(received + static_cast<int>(cluster.block_rank()) * part + i - owner * part, owner) =
          total;
    } else if (partials) {
      partial[static_cast<int64_t>(j * kStepOut) * p.n] = total;
    } else {
      Store(s, row0 + r, column0 + c, total, Before(s, row0 + r, column0 + c));
    }
  }
  if (blocks == 1) return;
  cluster.sync();
  for (int i = thread; i < part; i += kThreads) {
    const int place = static_cast<int>(cluster.block_rank()) * part + i, r = place / kTileN, c = place % kTileN;
    if (row0 + r >= p.m || column0 + c >= p.n) continue;
    const float before = Before(s, row0 + r, column0 + c);
    float total = received[i];
#pragma unroll 8
    for (int from = 1; from < blocks; ++from) total += received[from * part + i];
    Store(s, row0 + r, column0 + c, total, before);
  }
}

// A block finishes kWidth vectors of kVector elements: groups of kWidth threads take the partials in turn, so many at
// once that few wait for memory twice. Few instructions: a block runs through them once, and that costs as much as they
// do.
template <int kVector, int kWidth>
__global__ void __launch_bounds__(kThreads)
    ReduceSlicesKernel(const DecomposeKShape s, int elements, int splits, const float* partials) {
  constexpr int kElements = kWidth * kVector, kGroups = kThreads / kWidth, kAtOnce = 4;
  constexpr int kLines = kWidth < kWarp ? kWarps : kGroups;
  using Vector = std::conditional_t<kVector == 4, float4, float>;
  __shared__ Vector lines[kLines][kWidth];
  const int thread = static_cast<int>(threadIdx.x), group = thread / kWidth, vector = thread % kWidth;
  const int first = static_cast<int>(blockIdx.x) * kElements;
  const bool there = first + vector * kVector < elements;
  const int64_t step = static_cast<int64_t>(kGroups) * elements;
  const float* from = partials + static_cast<int64_t>(group) * elements + first + vector * kVector;
  const int at = first + thread;
  const bool finishes = thread < kElements && at < elements;
  const int n = static_cast<int>(s.n), row = at / n, column = at - row * n;
  float* place = PlaceOf(s, row, column);
  Hold(from, place);
  LetNextKernelStart();
  WaitForPreviousKernel();
  const float before = finishes && s.add ? *place : 0.0f;
  float sum[kVector] = {};
#pragma unroll 1
  for (int slice = group; there && slice < splits; slice += kAtOnce * kGroups, from += kAtOnce * step) {
    Vector value[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      value[j] = slice + j * kGroups < splits ? *reinterpret_cast<const Vector*>(from + j * step) : Vector{};
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum[e] += reinterpret_cast<const float*>(&value[j])[e];
    }
  }
  // Groups of one warp meet there.
#pragma unroll
  for (int other = kWarp / 2; other >= kWidth; other /= 2) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] += __shfl_xor_sync(kFullWarp, sum[e], other);
  }
  if (kWidth >= kWarp || thread % kWarp < kWidth) {
    float* const to = reinterpret_cast<float*>(&lines[kWidth < kWarp ? thread / kWarp : group][vector]);
#pragma unroll
    for (int e = 0; e < kVector; ++e) to[e] = sum[e];
  }
  __syncthreads();
  if (!finishes) return;
  const float* const sums = reinterpret_cast<const float*>(lines) + thread;
  float total = sums[0];
#pragma unroll
  for (int line = 1; line < kLines; ++line) total += sums[line * kElements];
  *place = Finish(s, column, total) + before;
}

template <int kTileM, int kTileN, bool kAcross>
void LaunchTile(const DecomposeKShape& s, const SliceParams& p, dim3 grid, DecomposeKWay way, float* partials,
                cudaStream_t stream) {
  const bool cluster = way == DecomposeKWay::kCluster;
  const auto kernel = SliceKernel<kTileM, kTileN, kAcross>;
  const int shared_bytes = Plan<kTileM, kTileN>::SharedBytes(p.slice / kDepth, cluster);
  AllowShared(kernel, shared_bytes);
  PreferShared(kernel);
  if (cluster && grid.z > 8) {
    STILLHOUSE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = grid.z;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster ? 2 : 1;
  STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, s, partials, way == DecomposeKWay::kExchange));
}

bool Chunked(const void* data, int64_t stride_bytes) { return Aligned16(data, stride_bytes); }

// Blocks that finish a part of a tile are as many as its slices, or fewer: a power of two.
int PartLog2(const DecomposeKPlan& plan) {
  int part = plan.tile_m * plan.tile_n / 4, log2 = 0;
  for (int owners = 1; 2 * owners <= plan.splits && part > 1; owners *= 2) part /= 2;
  while (part >> (log2 + 1) > 0) ++log2;
  return log2;
}

}  // namespace

bool AcrossN(const DecomposeKShape& s) {
  return s.b.stride_outer == 1 && s.b.stride_k != 1 && s.n % 8 == 0 && Chunked(s.b.data, 2 * s.b.stride_k);
}

bool CanSlice(const DecomposeKShape& s) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return TakesTensorCores(s) && s.m > 0 && s.n > 0 && s.k > 0 && s.k % 8 == 0 && s.m <= kMost >> 11 && s.n < kMost &&
         s.k < kMost && s.m * s.n < kMost && s.a.stride_k == 1 && Chunked(s.a.data, 2 * s.a.stride_outer) &&
         (AcrossN(s) || (s.b.stride_k == 1 && Chunked(s.b.data, 2 * s.b.stride_outer)));
}

int SlicesOf(int64_t k, int splits) {
  const int64_t stages = CeilDiv(k, kDepth), each = CeilDiv(stages, splits < 1 ? 1 : splits);
  return static_cast<int>(CeilDiv(stages, each));
}

bool HasSliceTile(int tile_m, int tile_n) {
  return (tile_m == 16 && (tile_n == 16 || tile_n == 32 || tile_n == 64)) ||
         (tile_m == 32 && (tile_n == 32 || tile_n == 64)) || ((tile_m == 64 || tile_m == 128) && tile_n == 64);
}

void LaunchSlices(const DecomposeKShape& s, const DecomposeKPlan& plan, float* partials, cudaStream_t stream) {
  SliceParams p;
  p.a = static_cast<const char*>(s.a.data);
  p.b = static_cast<const char*>(s.b.data);
  p.a_stride = 2 * s.a.stride_outer;
  const bool across = AcrossN(s);
  p.b_stride = 2 * (across ? s.b.stride_k : s.b.stride_outer);
  p.m = static_cast<int>(s.m);
  p.n = static_cast<int>(s.n);
  p.k = static_cast<int>(s.k);
  const int splits = SlicesOf(s.k, plan.splits);
  STILLHOUSE_CHECK(splits == plan.splits) << plan.splits << " slices of " << s.k;
  p.slice = static_cast<int>(CeilDiv(CeilDiv(s.k, kDepth), splits) * kDepth);
  const dim3 grid(static_cast<unsigned>(CeilDiv(s.n, plan.tile_n)), static_cast<unsigned>(CeilDiv(s.m, plan.tile_m)),
                  static_cast<unsigned>(splits));
  p.part_log2 = PartLog2(plan);
  const DecomposeKWay way = splits > 1 ? plan.way : DecomposeKWay::kSlices;
  const auto run = [&](auto tile_m, auto tile_n) {
    if (across) {
      LaunchTile<decltype(tile_m)::value, decltype(tile_n)::value, true>(s, p, grid, way, partials, stream);
    } else {
      LaunchTile<decltype(tile_m)::value, decltype(tile_n)::value, false>(s, p, grid, way, partials, stream);
    }
  };
  using std::integral_constant;
  switch (plan.tile_m * 1000 + plan.tile_n) {
    case 16016:
      return run(integral_constant<int, 16>(), integral_constant<int, 16>());
    case 16032:
      return run(integral_constant<int, 16>(), integral_constant<int, 32>());
    case 16064:
      return run(integral_constant<int, 16>(), integral_constant<int, 64>());
    case 32032:
      return run(integral_constant<int, 32>(), integral_constant<int, 32>());
    case 32064:
      return run(integral_constant<int, 32>(), integral_constant<int, 64>());
    case 64064:
      return run(integral_constant<int, 64>(), integral_constant<int, 64>());
    case 128064:
      return run(integral_constant<int, 128>(), integral_constant<int, 64>());
    default:
      STILLHOUSE_CHECK(false) << "no tile of " << plan.tile_m << " x " << plan.tile_n;
  }
}

bool CanExchange(const DecomposeKShape& s, const DecomposeKPlan& plan, int multiprocessors) {
  const int64_t tiles = CeilDiv(s.m, plan.tile_m) * CeilDiv(s.n, plan.tile_n);
  const int vectors = plan.tile_m * plan.tile_n / 4;
  return CanSlice(s) && HasSliceTile(plan.tile_m, plan.tile_n) && SlicesOf(s.k, plan.splits) == plan.splits &&
         plan.splits > 1 && tiles * plan.splits <= multiprocessors &&
         tiles * plan.splits * vectors * 16 <= kExchangeBytes && 1 << PartLog2(plan) <= kThreads;
}

void LaunchReduceSlices(const DecomposeKShape& s, const DecomposeKPlan& plan, const float* partials,
                        cudaStream_t stream) {
  STILLHOUSE_CHECK(s.m * s.n < int64_t{1} << 30) << s.m << " x " << s.n;
  const int elements = static_cast<int>(s.m * s.n), splits = plan.splits;
  const auto run = [&](auto vector, auto width) {
    constexpr int kVector = decltype(vector)::value, kWidth = decltype(width)::value;
    const dim3 blocks(static_cast<unsigned>(CeilDiv(elements, kVector * kWidth)));
    EarlyLaunch launch(blocks, dim3(1), kThreads, 0, stream);
    // As those that leave it the slices; beside warpgroups it is slower so, as measured.
    if (plan.way == DecomposeKWay::kSlices) launch.PreferShared();
    const auto kernel = ReduceSlicesKernel<kVector, kWidth>;
    STILLHOUSE_CUDA_CHECK(cudaLaunchKernelEx(&launch.config(), kernel, s, elements, splits, partials));
  };
  using std::integral_constant;
  // About a block a multiprocessor, or small ones.
  if (elements % 4 != 0) {
    run(integral_constant<int, 1>(), integral_constant<int, 32>());
  } else if (elements < 1024 && splits > 64) {
    run(integral_constant<int, 4>(), integral_constant<int, 4>());
  } else if (elements < 16384) {
    run(integral_constant<int, 4>(), integral_constant<int, 8>());
  } else if (elements < 65536) {
    run(integral_constant<int, 4>(), integral_constant<int, 32>());
  } else {
    run(integral_constant<int, 4>(), integral_constant<int, 64>());
  }
}

}  // namespace stillhouse::cuda
