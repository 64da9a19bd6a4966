// What becomes of the sums of a product of few rows (skinny_launch.h), once a block has a tile's: shared by the
// kernels.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_SKINNY_FINISH_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_SKINNY_FINISH_CUH_

#include <cuda_bf16.h>

#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/skinny_launch.h"

namespace stillhouse::cuda {

// Tile t's first half are the rows of `half`-row groups' first halves, its second half their partners, half rows on:
// gates and what they multiply, or two elements that turn together (`pairs`); or (half = a tile's rows / 2) plain rows,
// of which neighbours may turn together.
struct SkinnyFinish {
  int64_t n;
  int m, half, tiles;
  float* out;
  int64_t out_stride;
  bool add;
  const float* next_norm;
  __nv_bfloat16* scaled;
  float* squares_out;
  __nv_bfloat16* glu;
  bool turn, pairs;
  QkvRopeParams rope;
};

inline SkinnyFinish FinishOf(const SkinnyParams& p, int tile_rows) {
  SkinnyFinish f;
  f.n = p.n;
  f.m = p.m;
  f.turn = p.rope != nullptr;
  f.pairs = p.glu != nullptr || (f.turn && !p.rope->interleaved);
  f.half = p.glu ? static_cast<int>(p.n / 2) : f.pairs ? p.rope->width / 2 : tile_rows / 2;
  f.tiles = static_cast<int>((p.n + tile_rows - 1) / tile_rows);
  f.out = p.rope ? p.rope->qkv : p.out;
  f.out_stride = p.out_stride;
  f.add = p.add;
  f.next_norm = p.next_norm;
  f.scaled = static_cast<__nv_bfloat16*>(p.scaled);
  f.squares_out = p.squares_out;
  f.glu = static_cast<__nv_bfloat16*>(p.glu);
  f.rope = p.rope ? *p.rope : QkvRopeParams();
  return f;
}

namespace skinny {

using Bf16 = __nv_bfloat16;

__device__ __forceinline__ int64_t RowOf(int pair, int half) {
  const int group = pair / half;
  return static_cast<int64_t>(group) * 2 * half + (pair - group * half);
}

// A barrier of the threads that have sums: the block's first.
template <int kWorkers>
__device__ __forceinline__ void WorkersBarrier() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(kWorkers) : "memory");
}

// What of a tile's sums a thread holds: sum[j][e] is the product of row RowIn(j, e) of x and row e / 2 · 8 from the
// thread's first one in the weight.
struct Place {
  int tile, pair, t;  // pair: of the rows that go together
  bool second;        // the second of its pair
  __device__ int RowIn(int j, int e) const { return 8 * j + 2 * t + e % 2; }
  // The thread's first row in the weight.
  __device__ int64_t FirstRow(int half) const { return RowOf(pair, half) + (second ? half : 0); }
};

// What a sum is added to, and the norm that it goes into: asked for before the sums are ready.
template <int kBatch>
struct Before {
  float at[kBatch / 8][4], norm[2];
};

template <int kBatch>
__device__ __forceinline__ void LoadBefore(const SkinnyFinish& p, const Place& at, Before<kBatch>& before) {
  const int64_t row = at.FirstRow(p.half);
#pragma unroll
  for (int h = 0; h < 2; ++h) before.norm[h] = p.next_norm && row + 8 * h < p.n ? p.next_norm[row + 8 * h] : 0.0f;
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e);
      const int64_t n = row + e / 2 * 8;
      before.at[j][e] = p.add && r < p.m && n < p.n ? p.out[r * p.out_stride + n] : 0.0f;
    }
  }
}

template <int kBatch, int kWorkers>
__device__ __forceinline__ void StoreSums(const SkinnyFinish& p, const Place& at, float (&sum)[kBatch / 8][4],
                                          const Before<kBatch>& before, float (*squares)[kBatch]) {
  const int64_t row = at.FirstRow(p.half);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e);
      const int64_t n = row + e / 2 * 8;
      const bool valid = r < p.m && n < p.n;
      sum[j][e] = valid ? sum[j][e] + before.at[j][e] : 0.0f;
      if (!valid) continue;
      p.out[r * p.out_stride + n] = sum[j][e];
      if (p.next_norm) p.scaled[r * p.n + n] = FromFloat<Bf16>(sum[j][e] * before.norm[e / 2]);
    }
  }
  if (!p.next_norm) return;
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float square = sum[j][i] * sum[j][i] + sum[j][i + 2] * sum[j][i + 2];
#pragma unroll
      for (int other = 4; other < kWarp; other *= 2) square += __shfl_xor_sync(~0u, square, other);
      if (lane < 4) squares[warp][8 * j + 2 * lane + i] = square;
    }
  }
  WorkersBarrier<kWorkers>();
  const int r = static_cast<int>(threadIdx.x);
  if (r < p.m) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWorkers / kWarp; ++w) total += squares[w][r];
    p.squares_out[r * p.tiles + at.tile] = total;
  }
  WorkersBarrier<kWorkers>();
}

__device__ __forceinline__ float SiluOf(float x) { return x / (1.0f + __expf(-x)); }

template <int kBatch>
struct Pairs {
  static constexpr int kCount = kBatch / 8;
  float first[kCount][4], second[kCount][4];
};

template <int kBatch>
__device__ __forceinline__ void StoreGates(const SkinnyFinish& p, const Place& at, const Pairs<kBatch>& sum) {
#pragma unroll
  for (int j = 0; j < Pairs<kBatch>::kCount; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e), pair = at.pair + e / 2 * 8;
      if (r >= p.m || pair >= p.half) continue;
      p.glu[static_cast<int64_t>(r) * p.half + pair] = FromFloat<Bf16>(SiluOf(sum.first[j][e]) * sum.second[j][e]);
    }
  }
}

// Which rotations a thread's rows take part in: those of pairs first and first + step of a head.
struct Turned {
  int head, column, first, step;  // column: of the first row in its head
  __device__ Turned(const SkinnyFinish& p, int64_t row)
      : head(static_cast<int>(row) / p.rope.width),
        column(static_cast<int>(row) - head * p.rope.width),
        first(p.pairs ? column : column / 2),
        step(p.pairs ? 8 : 4) {}
};

// The rotations, and where their rows' keys or values go (0: nowhere).
template <int kBatch>
struct Turning {
  float c[Pairs<kBatch>::kCount][4], s[Pairs<kBatch>::kCount][4];
  int64_t places[Pairs<kBatch>::kCount][2];
};

// By the threads that have first rows of pairs, or by all.
template <int kBatch>
__device__ __forceinline__ void LoadTurning(const SkinnyFinish& p, const Place& at, Turning<kBatch>& turning) {
  const QkvRopeParams& rope = p.rope;
  const int64_t row = at.FirstRow(p.half);
  const Turned turned(p, row);
  const bool within = row < p.n, turns = turned.head < rope.heads + rope.kv_heads;
  const bool keeps = within && turned.head >= rope.heads && rope.places;
#pragma unroll
  for (int j = 0; j < Pairs<kBatch>::kCount; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = at.RowIn(j, h);
      turning.places[j][h] = keeps && r < p.m ? rope.places[2 * r + !turns] : 0;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e);
      const float* const angles =
          rope.angles + static_cast<int64_t>(r) * 2 * rope.pairs + turned.first + e / 2 * turned.step;
      const bool valid = within && turns && r < p.m;
      turning.c[j][e] = valid ? angles[0] : 1.0f;
      turning.s[j][e] = valid ? angles[rope.pairs] : 0.0f;
    }
  }
}

// A value of column `column` of a head to its place among keys or values, where it has one.
struct TurnedTo {
  int64_t offset;
  bool bf16;
  __device__ TurnedTo(const SkinnyFinish& p, const Turned& turned)
      : offset(p.rope.layer_offset +
               (turned.head - p.rope.heads - (turned.head < p.rope.heads + p.rope.kv_heads ? 0 : p.rope.kv_heads)) *
                   p.rope.head_stride),
        bf16(p.rope.kv_bf16) {}
  __device__ void Store(int64_t place, int column, float value) const {
    if (place == 0) return;
    if (bf16) {
      reinterpret_cast<Bf16*>(place)[offset + column] = FromFloat<Bf16>(value);
    } else {
      reinterpret_cast<float*>(place)[offset + column] = value;
    }
  }
};

template <int kBatch>
__device__ __forceinline__ void StoreTurned(const SkinnyFinish& p, const Place& at, const Pairs<kBatch>& sum,
                                            const Turning<kBatch>& turning) {
  const int64_t row = at.FirstRow(p.half);
  if (row >= p.n) return;
  const Turned turned(p, row);
  const TurnedTo to(p, turned);
#pragma unroll
  for (int j = 0; j < Pairs<kBatch>::kCount; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e), more = e / 2 * 8;
      if (r >= p.m) continue;
      const float c = turning.c[j][e], s = turning.s[j][e];
      const float a = sum.first[j][e] * c - sum.second[j][e] * s, b = sum.second[j][e] * c + sum.first[j][e] * s;
      float* const out = p.out + r * p.n + row + more;
      out[0] = a;
      out[p.half] = b;
      to.Store(turning.places[j][e % 2], turned.column + more, a);
      to.Store(turning.places[j][e % 2], turned.column + more + p.half, b);
    }
  }
}

// The same where neighbouring rows turn together: a thread four lanes on has the other one.
template <int kBatch>
__device__ __forceinline__ void StoreTurnedNeighbours(const SkinnyFinish& p, const Place& at,
                                                      const float (&sum)[kBatch / 8][4],
                                                      const Turning<kBatch>& turning) {
  const int64_t row = at.FirstRow(p.half);
  const Turned turned(p, row);
  const TurnedTo to(p, turned);
#pragma unroll
  for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float other = __shfl_xor_sync(~0u, sum[j][e], 4);
      const int r = at.RowIn(j, e), more = e / 2 * 8;
      if (r >= p.m || row >= p.n) continue;
      const float s = turning.s[j][e], value = sum[j][e] * turning.c[j][e] + (row % 2 == 0 ? -s : s) * other;
      p.out[r * p.n + row + more] = value;
      to.Store(turning.places[j][e % 2], turned.column + more, value);
    }
  }
}

// Second rows go through shared memory to the threads that have the first ones. `turning` is wanted where pairs turn.
template <int kBatch, int kWorkers>
__device__ __forceinline__ void StorePairs(const SkinnyFinish& p, const Place& at, const float (&sum)[kBatch / 8][4],
                                           float (*seconds)[kWorkers / 2], const Turning<kBatch>& turning) {
  const int thread = static_cast<int>(threadIdx.x) % (kWorkers / 2);
  if (at.second) {
#pragma unroll
    for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) seconds[4 * j + e][thread] = sum[j][e];
    }
  }
  WorkersBarrier<kWorkers>();
  if (!at.second) {
    Pairs<kBatch> pairs;
#pragma unroll
    for (int j = 0; j < kBatch / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        pairs.first[j][e] = sum[j][e];
        pairs.second[j][e] = seconds[4 * j + e][thread];
      }
    }
    if (p.turn) {
      StoreTurned<kBatch>(p, at, pairs, turning);
    } else {
      StoreGates<kBatch>(p, at, pairs);
    }
  }
  WorkersBarrier<kWorkers>();
}

}  // namespace skinny
}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_SKINNY_FINISH_CUH_
