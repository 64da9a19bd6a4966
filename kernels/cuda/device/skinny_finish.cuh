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
// gates and what they multiply, the two elements that turn together, or (half = a tile's rows / 2) plain rows.
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
  bool turn;
  QkvRopeParams rope;
};

inline SkinnyFinish FinishOf(const SkinnyParams& p, int tile_rows) {
  SkinnyFinish f;
  f.n = p.n;
  f.m = p.m;
  f.half = p.glu ? static_cast<int>(p.n / 2) : p.rope ? p.rope->width / 2 : tile_rows / 2;
  f.tiles = static_cast<int>((p.n + tile_rows - 1) / tile_rows);
  f.out = p.rope ? p.rope->qkv : p.out;
  f.out_stride = p.out_stride;
  f.add = p.add;
  f.next_norm = p.next_norm;
  f.scaled = static_cast<__nv_bfloat16*>(p.scaled);
  f.squares_out = p.squares_out;
  f.glu = static_cast<__nv_bfloat16*>(p.glu);
  f.turn = p.rope != nullptr;
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
};

// What a sum is added to, and the norm that it goes into: asked for before the sums are ready.
template <int kBatch>
struct Before {
  float at[kBatch / 8][4], norm[2];
};

template <int kBatch>
__device__ __forceinline__ void LoadBefore(const SkinnyFinish& p, const Place& at, Before<kBatch>& before) {
  const int64_t row = RowOf(at.pair, p.half) + (at.second ? p.half : 0);
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
  const int64_t row = RowOf(at.pair, p.half) + (at.second ? p.half : 0);
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

// The rotations of pairs, and where their rows' keys or values go (0: nowhere).
template <int kBatch>
struct Turning {
  float c[Pairs<kBatch>::kCount][4], s[Pairs<kBatch>::kCount][4];
  int64_t places[Pairs<kBatch>::kCount][2];
};

template <int kBatch>
__device__ __forceinline__ void LoadTurning(const SkinnyFinish& p, const Place& at, Turning<kBatch>& turning) {
  const QkvRopeParams& rope = p.rope;
  const int head = at.pair / p.half, i = at.pair - head * p.half;  // the pairs of a thread are of one head
  const bool within = 2 * static_cast<int64_t>(at.pair) < p.n;
  const bool turns = head < rope.heads + rope.kv_heads, keeps = within && head >= rope.heads && rope.places;
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
      const float* const angles = rope.angles + static_cast<int64_t>(r) * 2 * p.half + i + e / 2 * 8;
      const bool valid = within && turns && r < p.m;
      turning.c[j][e] = valid ? angles[0] : 1.0f;
      turning.s[j][e] = valid ? angles[p.half] : 0.0f;
    }
  }
}

template <int kBatch>
__device__ __forceinline__ void StoreTurned(const SkinnyFinish& p, const Place& at, const Pairs<kBatch>& sum,
                                            const Turning<kBatch>& turning) {
  const QkvRopeParams& rope = p.rope;
  const int head = at.pair / p.half, i = at.pair - head * p.half;
  if (2 * static_cast<int64_t>(at.pair) >= p.n) return;
  const int kv = head - rope.heads - (head < rope.heads + rope.kv_heads ? 0 : rope.kv_heads);
  const int64_t to = rope.layer_offset + kv * rope.head_stride + i;
#pragma unroll
  for (int j = 0; j < Pairs<kBatch>::kCount; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int r = at.RowIn(j, e);
      if (r >= p.m) continue;
      const float c = turning.c[j][e], s = turning.s[j][e];
      const float a = sum.first[j][e] * c - sum.second[j][e] * s, b = sum.second[j][e] * c + sum.first[j][e] * s;
      float* const out = p.out + r * p.n + static_cast<int64_t>(head) * 2 * p.half + i + e / 2 * 8;
      out[0] = a;
      out[p.half] = b;
      const int64_t place = turning.places[j][e % 2], offset = to + e / 2 * 8;
      if (place == 0) continue;
      if (rope.kv_bf16) {
        reinterpret_cast<Bf16*>(place)[offset] = FromFloat<Bf16>(a);
        reinterpret_cast<Bf16*>(place)[offset + p.half] = FromFloat<Bf16>(b);
      } else {
        reinterpret_cast<float*>(place)[offset] = a;
        reinterpret_cast<float*>(place)[offset + p.half] = b;
      }
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
