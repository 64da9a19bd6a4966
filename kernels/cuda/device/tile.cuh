// fp32 products of tiles in shared memory, each thread keeping a block of the result in registers.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_TILE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_TILE_CUH_

#include <cstdint>

#include "kernels/cuda/device/async_copy.cuh"

namespace stillhouse::cuda {

// Floats between rows of a tile `width` floats wide: 16-byte reads of consecutive rows fall on different banks.
__host__ __device__ constexpr int TileStride(int width) { return width + 4; }

__device__ __forceinline__ float4 Float4At(const float* at) { return *reinterpret_cast<const float4*>(at); }

// sum[m][n] += Σ_c a[m][c] · b[n·kStep][c] for c below depth, a multiple of 4. `a` and `b` point at the thread's first
// rows; rows are kStride floats apart.
template <int kRows, int kColumns, int kStep, int kStride>
__device__ __forceinline__ void DotTile(const float* a, const float* b, int depth, float (&sum)[kRows][kColumns]) {
#pragma unroll 2
  for (int c = 0; c < depth; c += 4) {
    float4 x[kRows], y[kColumns];
#pragma unroll
    for (int m = 0; m < kRows; ++m) x[m] = Float4At(a + m * kStride + c);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) y[n] = Float4At(b + n * kStep * kStride + c);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        sum[m][n] = fmaf(x[m].x, y[n].x, sum[m][n]);
        sum[m][n] = fmaf(x[m].y, y[n].y, sum[m][n]);
        sum[m][n] = fmaf(x[m].z, y[n].z, sum[m][n]);
        sum[m][n] = fmaf(x[m].w, y[n].w, sum[m][n]);
      }
    }
  }
}

// sum[m][c] += Σ_j p[m][j] · b[j][4·kStep·c .. + 3] over groups of four j: first, first + step, … below `depth`. `p`
// points at the thread's first row (rows kStrideP apart), `b` at its first column (rows kStrideB apart). Chunks of
// columns from `chunks` on are skipped.
template <int kRows, int kChunks, int kStep, int kStrideP, int kStrideB>
__device__ __forceinline__ void AccumulateTile(const float* p, const float* b, int first, int step, int depth,
                                               int chunks, float4 (&sum)[kRows][kChunks]) {
  for (int j = first; j < depth; j += step) {
    float4 x[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) x[m] = Float4At(p + m * kStrideP + j);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c >= chunks) break;
      const float* column = b + j * kStrideB + 4 * kStep * c;
      const float4 y0 = Float4At(column), y1 = Float4At(column + kStrideB);
      const float4 y2 = Float4At(column + 2 * kStrideB), y3 = Float4At(column + 3 * kStrideB);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        float4& s = sum[m][c];
        s.x = fmaf(x[m].x, y0.x, s.x);
        s.y = fmaf(x[m].x, y0.y, s.y);
        s.z = fmaf(x[m].x, y0.z, s.z);
        s.w = fmaf(x[m].x, y0.w, s.w);
        s.x = fmaf(x[m].y, y1.x, s.x);
        s.y = fmaf(x[m].y, y1.y, s.y);
        s.z = fmaf(x[m].y, y1.z, s.z);
        s.w = fmaf(x[m].y, y1.w, s.w);
        s.x = fmaf(x[m].z, y2.x, s.x);
        s.y = fmaf(x[m].z, y2.y, s.y);
        s.z = fmaf(x[m].z, y2.z, s.z);
        s.w = fmaf(x[m].z, y2.w, s.w);
        s.x = fmaf(x[m].w, y3.x, s.x);
        s.y = fmaf(x[m].w, y3.y, s.y);
        s.z = fmaf(x[m].w, y3.z, s.z);
        s.w = fmaf(x[m].w, y3.w, s.w);
      }
    }
  }
}

// Copies rows of `width` floats, `row` floats apart, to a tile; rows from `count` to `kTileRows` and the columns from
// `width` to the next multiple of 4 become zero. `vector`: rows may be read 16 bytes at a time (then asynchronously:
// the caller commits and waits). All kThreads threads take part.
template <int kThreads, int kTileRows, int kStride>
__device__ __forceinline__ void LoadTile(float* tile, const float* from, int64_t row, int count, int width,
                                         bool vector) {
  constexpr int kChunks = (kStride - 4) / 4;
  for (int i = threadIdx.x; i < kTileRows * kChunks; i += kThreads) {
    const int r = i / kChunks, c = (i % kChunks) * 4;
    if (c >= width) continue;
    float* to = tile + r * kStride + c;
    if (vector) {
      CopyAsync16(to, r < count ? from + r * row + c : from, r < count);
    } else {
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (r < count) {
        const float* at = from + r * row + c;
        value.x = at[0];
        if (c + 1 < width) value.y = at[1];
        if (c + 2 < width) value.z = at[2];
        if (c + 3 < width) value.w = at[3];
      }
      *reinterpret_cast<float4*>(to) = value;
    }
  }
}

// Columns [column, column + 4) of a row of `width` floats: 16 bytes at once where the row allows it.
__device__ __forceinline__ void StoreColumns(float* row, int column, int width, float4 value, bool vector) {
  if (vector) {
    if (column < width) *reinterpret_cast<float4*>(row + column) = value;
    return;
  }
  if (column < width) row[column] = value.x;
  if (column + 1 < width) row[column + 1] = value.y;
  if (column + 2 < width) row[column + 2] = value.z;
  if (column + 3 < width) row[column + 3] = value.w;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_TILE_CUH_
