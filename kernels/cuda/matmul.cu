#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/matmul_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumLanes = 8;  // threads that share a column's sum

__global__ void __launch_bounds__(kThreads)
    FillRowsKernel(float* out, int64_t out_stride, const float* bias, int64_t rows, int64_t width) {
  const int64_t elements = rows * width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / width, c = i - r * width;
    out[r * out_stride + c] = bias ? bias[c] : 0.0f;
  }
}

// Threads in x are columns; thread y adds rows y, y + 8, …; the eight sums are added in order.
__global__ void __launch_bounds__(kWarp* kSumLanes)
    ColumnSumsKernel(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* sums) {
  __shared__ float partial[kSumLanes][kWarp];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  for (int64_t r = threadIdx.y; r < rows && c < width; r += kSumLanes) sum += x[r * x_stride + c];
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= width) return;
  for (int y = 1; y < kSumLanes; ++y) sum += partial[y][threadIdx.x];
  sums[c] += sum;
}

__global__ void __launch_bounds__(kThreads)
    RoundRowsKernel(const float* x, int64_t x_stride, int64_t rows, int64_t width, __nv_bfloat16* out) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t elements = rows * width, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t r = i / width;
    out[i] = FromFloat<__nv_bfloat16>(x[r * x_stride + i - r * width]);
  }
}

// Four at a time where rows and their distance allow it.
__global__ void __launch_bounds__(kThreads)
    RoundVectorsKernel(const float* x, int64_t x_stride, int64_t rows, int64_t width, __nv_bfloat16* out) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t per_row = width / 4, vectors = rows * per_row, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += step) {
    const int64_t r = i / per_row, c = 4 * (i - r * per_row);
    const Vec16<float> value = LoadVec16(x + r * x_stride + c);
    __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(value.at[0], value.at[1]),
                              __floats2bfloat162_rn(value.at[2], value.at[3])};
    *reinterpret_cast<uint2*>(out + 4 * i) = *reinterpret_cast<const uint2*>(pair);
  }
}

}  // namespace

void LaunchFillRows(float* out, int64_t out_stride, const float* bias, int64_t rows, int64_t width,
                    cudaStream_t stream) {
  const int64_t elements = rows * width;
  if (elements == 0) return;
  FillRowsKernel<<<GridFor(elements, kThreads), kThreads, 0, stream>>>(out, out_stride, bias, rows, width);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchColumnSums(const float* x, int64_t x_stride, int64_t rows, int64_t width, float* sums, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const unsigned blocks = static_cast<unsigned>(CeilDiv(width, kWarp));
  ColumnSumsKernel<<<blocks, dim3(kWarp, kSumLanes), 0, stream>>>(x, x_stride, rows, width, sums);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchRoundRows(const float* x, int64_t x_stride, int64_t rows, int64_t width, void* bf16, cudaStream_t stream) {
  const int64_t elements = rows * width;
  if (elements == 0) return;
  auto* out = static_cast<__nv_bfloat16*>(bf16);
  if (width % 4 == 0 && Aligned16(x, x_stride * static_cast<int64_t>(sizeof(float))) && Aligned16(out)) {
    LaunchKernelEarly(RoundVectorsKernel, GridFor(elements / 4, kThreads), kThreads, 0, stream, x, x_stride, rows,
                      width, out);
  } else {
    LaunchKernelEarly(RoundRowsKernel, GridFor(elements, kThreads), kThreads, 0, stream, x, x_stride, rows, width, out);
  }
}

}  // namespace stillhouse::cuda
