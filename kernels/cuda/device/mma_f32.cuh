// Products of f32 tiles in shared memory on tensor cores, as precise as fp32 arithmetic: each factor is split into two
// tf32 numbers, and of their four products the three that matter are summed ("3xTF32", Ootomo and Yokota 2022).
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_F32_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_F32_CUH_

#include <cstdint>

namespace stillhouse::cuda {

// x = large + small, to 2^-21 of x: the hardware leaves out the 13 low bits of what it is given.
struct SplitFloat {
  uint32_t large, small;
};
__device__ __forceinline__ SplitFloat Split(float x) {
  const uint32_t large = __float_as_uint(x) & 0xffffe000u;
  return {large, __float_as_uint(x - __uint_as_float(large))};
}

// sum[16×8] += a[16×8] · b[8×8] in tf32. With g = lane / 4 and t = lane % 4: a holds (g, t), (g + 8, t), (g, t + 4),
// (g + 8, t + 4); b (t, g), (t + 4, g); sum (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void MultiplyAddTf32(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's 16×8 factor, split.
struct SplitA {
  uint32_t large[4], small[4];
  __device__ __forceinline__ SplitA(float a0, float a1, float a2, float a3) {
    const float a[4] = {a0, a1, a2, a3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitFloat x = Split(a[i]);
      large[i] = x.large;
      small[i] = x.small;
    }
  }
};

// sum[n] += a · b[n], the small products first. Products of one sum wait for each other, those of several do not.
template <int kTiles>
__device__ __forceinline__ void MultiplyAdd(float (&sum)[kTiles][4], const SplitA& a, const float (&b)[kTiles][2]) {
  SplitFloat x[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    x[n][0] = Split(b[n][0]);
    x[n][1] = Split(b[n][1]);
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) MultiplyAddTf32(sum[n], a.small, x[n][0].large, x[n][1].large);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) MultiplyAddTf32(sum[n], a.large, x[n][0].small, x[n][1].small);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) MultiplyAddTf32(sum[n], a.large, x[n][0].large, x[n][1].large);
}

// sum += a · bᵀ over `depth` columns, a multiple of 4: 16 rows of `a`, 8·kTiles rows of `b`, kStride floats apart
// (4 more than a multiple of 32: no two lanes read one bank). A warp; tile n of the sum is rows 8n … 8n + 7 of `b`.
template <int kTiles, int kStride>
__device__ __forceinline__ void WarpDot(const float* a, const float* b, int depth, float (&sum)[kTiles][4]) {
  static_assert(kStride % 32 == 4);
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const float* const x = a + g * kStride + t;
  const float* const y = b + g * kStride + t;
#pragma unroll 2
  for (int c = 0; c < depth; c += 8) {
    const bool whole = c + 4 < depth;  // of eight columns the last four may not be there
    const SplitA split(x[c], x[8 * kStride + c], whole ? x[c + 4] : 0.0f, whole ? x[8 * kStride + c + 4] : 0.0f);
    float factor[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* const from = y + 8 * n * kStride + c;
      factor[n][0] = from[0];
      factor[n][1] = whole ? from[4] : 0.0f;
    }
    MultiplyAdd(sum, split, factor);
  }
}

// sum += p · b over `depth` rows of b, a multiple of 8: 16 rows of `p`, kStrideP floats apart (8 more than a multiple
// of 32), and columns [0, 8·kTiles) of `b`, whose rows are kStrideB floats apart (4 more than a multiple of 32). Tiles
// from `tiles` on count as zero.
template <int kTiles, int kStrideP, int kStrideB>
__device__ __forceinline__ void WarpAccumulate(const float* p, const float* b, int depth, int tiles,
                                               float (&sum)[kTiles][4]) {
  static_assert(kStrideP % 32 == 8 && kStrideB % 32 == 4);
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  // Rows 2t and 2t + 1 of each eight stand for t and t + 4: the order of a sum's terms is free, and so no two lanes
  // read one bank.
  const float* const x = p + g * kStrideP + 2 * t;
  const float* const y = b + 2 * t * kStrideB + g;
#pragma unroll 2
  for (int j = 0; j < depth; j += 8) {
    const float2 low = *reinterpret_cast<const float2*>(x + j);
    const float2 high = *reinterpret_cast<const float2*>(x + 8 * kStrideP + j);
    const SplitA split(low.x, high.x, low.y, high.y);
    float factor[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* const from = y + j * kStrideB + 8 * n;
      factor[n][0] = n < tiles ? from[0] : 0.0f;
      factor[n][1] = n < tiles ? from[kStrideB] : 0.0f;
    }
    MultiplyAdd(sum, split, factor);
  }
}

// Where a lane's part of a block's products lies, when kGroups warps share the rows, 16 each, and the others the
// columns: kScores tiles of eight of a table of scores, kOuts of a result as wide as a head. A lane has rows `row` and
// `row` + 8, and in each tile two columns from `score` or `out` on.
template <int kGroups, int kScores, int kOuts>
struct TileLane {
  int first_row, row, first_score, score, first_out, out;
  int across;  // the warp's place along the columns
  int outs;    // tiles of a result within the head's width
  __device__ __forceinline__ explicit TileLane(int width) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    across = warp / kGroups;
    first_row = warp % kGroups * 16;
    row = first_row + lane / 4;
    first_score = across * 8 * kScores;
    score = first_score + 2 * (lane % 4);
    first_out = across * 8 * kOuts;
    out = first_out + 2 * (lane % 4);
    outs = (width - first_out + 7) / 8;
  }
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_MMA_F32_CUH_
