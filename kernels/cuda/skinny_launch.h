// Products of a few rows with a large bf16 weight: what a decode step of a small batch does, bound by reading the
// weight once.
#ifndef STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

inline constexpr int kSkinnyRows = 16;     // of x, at most
inline constexpr int kSkinnyNormRows = 2;  // where x is normalised on the way
inline constexpr int kSkinnyTile = 16;     // outputs of a block
inline constexpr int kSkinnyChunk = 64;    // elements of K that a warp takes at a time

// out[r, n] (+)= Σ_k x[r, k] · weight[n, k]; x rounded to bf16, sums in fp32 in a fixed order. With `norm`, x is
// RMS-normalised first (its rounding comes before the division by the row's length). With `glu`, the weight's first
// half gives gates and its second half what they multiply: glu[r, n] = bf16(silu(gate) · up), and there is no `out`.
struct SkinnyParams {
  const void* weight = nullptr;  // bf16 [n, k]
  int64_t n = 0, k = 0;
  const void* x = nullptr;  // f32, or bf16 where x_bf16
  bool x_bf16 = false;
  int64_t x_stride = 0;  // elements
  int m = 0;
  const float* norm = nullptr;  // [k]
  float eps = 0.0f;
  float* out = nullptr;
  int64_t out_stride = 0;
  bool add = false;
  void* glu = nullptr;        // bf16 [m, n / 2], contiguous
  int multiprocessors = 132;  // of the GPU
};

// Whether the shapes and addresses suit the kernel.
bool CanSkinny(const SkinnyParams& params);
// Whether it is also the faster way, as measured on an H200 beside cuBLAS: always with gates, whose two passes it
// saves; else up to about 26 million weights and 8192 outputs (K 4096, N 4096: 11.1 µs to 12.6, N 6144: 16.0 to 16.3; K
// 576, N 576: 1.7 to 3.1). Its copies are too small for the largest: K 4096, N 128256 takes 308 µs to cuBLAS's 240.
inline bool SkinnyPays(const SkinnyParams& p) { return p.glu || (p.n <= 8192 && p.n * p.k <= int64_t{26} << 20); }
void LaunchSkinny(const SkinnyParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_
