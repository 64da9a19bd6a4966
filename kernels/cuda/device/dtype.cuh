// Elements of storage as floats and back, one at a time or 16 bytes at once.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_DTYPE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_DTYPE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace stillhouse::cuda {

__device__ __forceinline__ float ToFloat(float v) { return v; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float ToFloat(__half v) { return __half2float(v); }

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T FromFloat(float v);
template <>
__device__ __forceinline__ float FromFloat<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float v) {
  return __float2half_rn(v);
}

// 16 bytes of elements; an address must be a multiple of 16.
template <typename T>
struct alignas(16) Vec16 {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};
template <typename T>
__device__ __forceinline__ Vec16<T> LoadVec16(const T* from) {
  return *reinterpret_cast<const Vec16<T>*>(from);
}
template <typename T>
__device__ __forceinline__ void StoreVec16(T* to, const Vec16<T>& value) {
  *reinterpret_cast<Vec16<T>*>(to) = value;
}

// True where rows of `stride_bytes` from `base` can be read 16 bytes at a time.
__host__ __device__ inline bool Aligned16(const void* base, int64_t stride_bytes = 0) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_DTYPE_CUH_
