// Decoding of stored rows: every GGUF block format, and half-precision.
#ifndef STILLHOUSE_KERNELS_CUDA_QUANT_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_QUANT_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/tensor/dtype.h"

namespace stillhouse::cuda {

// out[i] = decoded in[ids ? ids[i] : i], exact in f32; to bf16 it is rounded to nearest even.
struct DecodeParams {
  DType dtype = DType::kF32;
  const void* in = nullptr;  // rows of `width` elements, contiguous
  int64_t in_rows = 0;
  const int32_t* ids = nullptr;  // [rows], checked against in_rows; absent: every row in order
  int64_t rows = 0, width = 0;   // width is a multiple of the block
  void* out = nullptr;
  int64_t out_stride = 0;  // elements
  bool to_bf16 = false;
};
void LaunchDecode(const DecodeParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_QUANT_LAUNCH_H_
