#include <stdint.h>
#include <string.h>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/trap.cuh"
#include "kernels/cuda/quant_launch.h"

namespace stillhouse::cuda {
namespace {

__device__ __forceinline__ float DecodeHalf(uint16_t half) { return __half2float(__ushort_as_half(half)); }
#define STILLHOUSE_DECODE_FUNCTION __device__ __forceinline__
#include "kernels/ops/quant_blocks.inc"

constexpr int kThreads = 128;

// One block of the format each: kElements values from kBytes bytes.
#define STILLHOUSE_FORMAT(Name, elements, bytes)                                                            \
  struct Name {                                                                                             \
    static constexpr int kElements = elements, kBytes = bytes;                                              \
    static __device__ __forceinline__ void Decode(const uint8_t* in, float* out) { Decode##Name(in, out); } \
  };
STILLHOUSE_FORMAT(Q4_0, 32, 18)
STILLHOUSE_FORMAT(Q4_1, 32, 20)
STILLHOUSE_FORMAT(Q5_0, 32, 22)
STILLHOUSE_FORMAT(Q5_1, 32, 24)
STILLHOUSE_FORMAT(Q8_0, 32, 34)
STILLHOUSE_FORMAT(Q2_K, 256, 84)
STILLHOUSE_FORMAT(Q3_K, 256, 110)
STILLHOUSE_FORMAT(Q4_K, 256, 144)
STILLHOUSE_FORMAT(Q5_K, 256, 176)
STILLHOUSE_FORMAT(Q6_K, 256, 210)
#undef STILLHOUSE_FORMAT

__device__ __forceinline__ int64_t SourceRow(const DecodeParams& p, int64_t r) {
  return p.ids ? CheckedIndex(p.ids[r], p.in_rows) : r;
}

// A thread decodes a block. (Weights pass here once, at load; embedding rows are few.)
template <typename Format, typename Out>
__global__ void __launch_bounds__(kThreads) DecodeBlocksKernel(DecodeParams p) {
  const int64_t per_row = p.width / Format::kElements, blocks = p.rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < blocks; i += step) {
    const int64_t r = i / per_row, b = i - r * per_row;
    const uint8_t* in = static_cast<const uint8_t*>(p.in) + (SourceRow(p, r) * per_row + b) * Format::kBytes;
    Out* out = static_cast<Out*>(p.out) + r * p.out_stride + b * Format::kElements;
    float values[Format::kElements];
    Format::Decode(in, values);
    for (int j = 0; j < Format::kElements; ++j) out[j] = FromFloat<Out>(values[j]);
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads) ConvertKernel(DecodeParams p) {
  const int64_t elements = p.rows * p.width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / p.width, c = i - r * p.width;
    static_cast<Out*>(p.out)[r * p.out_stride + c] =
        FromFloat<Out>(ToFloat(static_cast<const In*>(p.in)[SourceRow(p, r) * p.width + c]));
  }
}

template <typename Format, typename Out>
void LaunchBlocks(const DecodeParams& p, cudaStream_t stream) {
  DecodeBlocksKernel<Format, Out>
      <<<GridFor(p.rows * (p.width / Format::kElements), kThreads), kThreads, 0, stream>>>(p);
}

template <typename In, typename Out>
void LaunchConvert(const DecodeParams& p, cudaStream_t stream) {
  ConvertKernel<In, Out><<<GridFor(p.rows * p.width, kThreads), kThreads, 0, stream>>>(p);
}

template <typename Out>
void Launch(const DecodeParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kF32:
      return LaunchConvert<float, Out>(p, stream);
    case DType::kF16:
      return LaunchConvert<__half, Out>(p, stream);
    case DType::kBF16:
      return LaunchConvert<__nv_bfloat16, Out>(p, stream);
    case DType::kQ4_0:
      return LaunchBlocks<Q4_0, Out>(p, stream);
    case DType::kQ4_1:
      return LaunchBlocks<Q4_1, Out>(p, stream);
    case DType::kQ5_0:
      return LaunchBlocks<Q5_0, Out>(p, stream);
    case DType::kQ5_1:
      return LaunchBlocks<Q5_1, Out>(p, stream);
    case DType::kQ8_0:
      return LaunchBlocks<Q8_0, Out>(p, stream);
    case DType::kQ2_K:
      return LaunchBlocks<Q2_K, Out>(p, stream);
    case DType::kQ3_K:
      return LaunchBlocks<Q3_K, Out>(p, stream);
    case DType::kQ4_K:
      return LaunchBlocks<Q4_K, Out>(p, stream);
    case DType::kQ5_K:
      return LaunchBlocks<Q5_K, Out>(p, stream);
    case DType::kQ6_K:
      return LaunchBlocks<Q6_K, Out>(p, stream);
    default:
      STILLHOUSE_CHECK(false) << "a type that does not hold floats";
  }
}

}  // namespace

void LaunchDecode(const DecodeParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.width == 0) return;
  if (params.to_bf16) {
    Launch<__nv_bfloat16>(params, stream);
  } else {
    Launch<float>(params, stream);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
