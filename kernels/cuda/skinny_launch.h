// Products of a few rows with a large bf16 weight: what a decode step does, bound by reading the weight once.
#ifndef STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/fused_launch.h"

namespace stillhouse::cuda {

// Rows of x, at most: more are faster by wide_product.cu (an H200's 9.9 µs for 32 rows, K 4096, N 4096, to 15.2 of
// tiles twice as large here).
inline constexpr int kSkinnyRows = 16;
inline constexpr int64_t kSkinnyPartials = 64 * kSkinnyRows * 4;

// y[r, n] = Σ_k x[r, k] · weight[n, k], sums in fp32 in a fixed order. One of these becomes of it:
//   out = y, or out += y (`add`);
//   with `glu`, the weight's first half gives gates and its second half what they multiply:
//     glu[r, n] = bf16(silu(gate) · up);
//   with `rope`, y are heads of queries, keys and values: turned into out, keys and values also to their places.
struct SkinnyParams {
  const void* weight = nullptr;  // bf16 [n, k]
  int64_t n = 0, k = 0;
  const void* x = nullptr;  // bf16
  int64_t x_stride = 0;     // elements
  int m = 0;
  // Where x has still to be divided by its rows' root mean squares: f32 [m, parts], whose sums are Σ x².
  const float* squares = nullptr;
  int parts = 0;
  float eps = 0.0f;

  float* out = nullptr;
  int64_t out_stride = 0;
  bool add = false;
  // With `add`: what the sums become for the next product, scaled[r, n] = bf16(out · next_norm), and squares_out [m,
  // the schedule's tiles] of out.
  const float* next_norm = nullptr;
  void* scaled = nullptr;
  float* squares_out = nullptr;

  void* glu = nullptr;                  // bf16 [m, n / 2], contiguous
  const QkvRopeParams* rope = nullptr;  // qkv is `out`, contiguous; no norms; CanTurn

  // kSkinnyPartials bytes for each multiprocessor, all bits set, as they are again when the kernel ends.
  void* partials = nullptr;
  int multiprocessors = 132;
};

// Whether the shapes and addresses suit the kernel.
bool CanSkinny(const SkinnyParams& params);
// Whether rotations are of a kind that the product's end can do.
bool CanTurn(const QkvRopeParams& params);

// How the work is shared: `small` products by a block for each tile of kSmallSkinnyRows rows of the weight, which lie
// in its shared memory as a whole; else each of `blocks` (at most one for each multiprocessor) takes an equal part of
// all tiles' stages (whole tiles where `whole`), with `stages` of them in its ring.
struct SkinnySchedule {
  int tiles = 0, blocks = 0, stages = 0;
  bool whole = false, small = false;
};
SkinnySchedule ScheduleSkinny(const SkinnyParams& params);
void LaunchSkinny(const SkinnyParams& params, const SkinnySchedule& schedule, cudaStream_t stream);

// skinny_small.cu.
inline constexpr int kSmallSkinnyRows = 32;
bool CanSmallSkinny(const SkinnyParams& params);
void LaunchSmallSkinny(const SkinnyParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SKINNY_LAUNCH_H_
