// Tiles of bf16 rows in shared memory, as the tensor-core kernels of attention read them.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_ROWS_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_ROWS_CUH_

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/mma.cuh"

namespace stillhouse::cuda {

// Where the 16 bytes of columns [8·chunk, 8·chunk + 8) of a row lie in a tile: rotated by the row, so that the eight
// rows of a matrix fall on different banks.
template <int kWidth>
__device__ __forceinline__ int TileByte(int row, int chunk) {
  return row * kWidth * 2 + ((chunk ^ (row & 7)) << 4);
}

// Columns [8·chunk, 8·chunk + 8) of row `r` to their place; 0 beyond the width and from row `slots` on. `vector`: the
// row may be read 16 bytes at a time (then asynchronously: the caller commits and waits).
template <int kWidth>
__device__ __forceinline__ void LoadChunk(char* tile, const __nv_bfloat16* from, int64_t row, int slots, int width,
                                          bool vector, int r, int chunk) {
  char* const to = tile + TileByte<kWidth>(r, chunk);
  const bool there = r < slots && 8 * chunk < width;
  const __nv_bfloat16* const at = there ? from + r * row + 8 * chunk : from;
  if (vector) return CopyAsync16(to, at, there);
  Vec16<__nv_bfloat16> value;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    value.at[e] = there && 8 * chunk + e < width ? at[e] : FromFloat<__nv_bfloat16>(0.0f);
  }
  StoreVec16(reinterpret_cast<__nv_bfloat16*>(to), value);
}

// The tile's queries as bf16, 16 bytes of a row at a time; those that are not there are zero.
template <int kWidth, int kQueries, int kThreads>
__device__ __forceinline__ void LoadQueries(char* tile, const AttentionTensors& t, const AttentionItem& item,
                                            const int32_t* rows, int kv) {
  constexpr int kChunks = kWidth / 8;
  const int queries = item.row_count * item.head_count, first_head = kv * (t.heads / t.kv_heads) + item.head_begin;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * kChunks; i += kThreads) {
    const int query = i / kChunks, column = i % kChunks * 8;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (query < queries && column < t.width) {
      const int64_t at = RowOf(rows, item.rows, query / item.head_count) * t.q_row +
                         (first_head + query % item.head_count) * t.q_head + column;
      if (t.q_vector && t.q_bf16) {
        value = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(t.q) + at);
      } else if (t.q_vector && column + 8 <= t.width) {
        const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(t.q) + at);
        const float4 a = from[0], b = from[1];
        value = make_uint4(PackBf16(a.x, a.y), PackBf16(a.z, a.w), PackBf16(b.x, b.y), PackBf16(b.z, b.w));
      } else {
        uint32_t pairs[4] = {};
        for (int e = 0; e < 8; ++e) {
          if (column + e >= t.width) break;
          const float x = t.q_bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(t.q)[at + e])
                                   : static_cast<const float*>(t.q)[at + e];
          pairs[e / 2] |= PackBf16(x, 0.0f) << (e % 2 * 16);
        }
        value = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    *reinterpret_cast<uint4*>(tile + TileByte<kWidth>(query, i % kChunks)) = value;
  }
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_ROWS_CUH_
