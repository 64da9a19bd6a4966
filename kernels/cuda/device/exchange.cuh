// Sums that go from block to block of one launch through memory, in a buffer that is empty before and after: all bits
// set. Each float says itself that it has come, by not being absent, so that one read both waits for it and fetches it.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_EXCHANGE_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_EXCHANGE_CUH_

#include <cstdint>

namespace stillhouse::cuda {

// A NaN that no sum has (the device's own is another).
inline constexpr uint32_t kAbsent = 0xffffffffu;

__device__ __forceinline__ bool Absent(float x) { return __float_as_uint(x) == kAbsent; }
__device__ __forceinline__ bool Absent(const float4& x) {
  return Absent(x.x) || Absent(x.y) || Absent(x.z) || Absent(x.w);
}
__device__ __forceinline__ float Present(float x) {
  return __float_as_uint(x) == kAbsent ? __uint_as_float(0x7fffffffu) : x;
}

__device__ __forceinline__ void GiveSums(float4* to, const float4& sums) {
  __stcg(to, make_float4(Present(sums.x), Present(sums.y), Present(sums.z), Present(sums.w)));
}
// Anew each time: a load that the assembler may take for constant would be waited for once or forever.
__device__ __forceinline__ float4 LookForSums(const float4* from) {
  float4 value;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
// After they were taken.
__device__ __forceinline__ void EmptyPlace(float4* place) {
  const float absent = __uint_as_float(kAbsent);
  __stcg(place, make_float4(absent, absent, absent, absent));
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_EXCHANGE_CUH_
