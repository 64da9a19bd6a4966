// What scans add up: a value, and in segmented scans whether a segment began within the stretch that it sums.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_ITEM_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_ITEM_CUH_

#include <cstdint>

#include "kernels/cuda/device/reduce.cuh"

namespace stillhouse::cuda {

template <typename T, bool kSegmented>
struct ScanItem {
  T v{};

  static __device__ __forceinline__ ScanItem Of(T value, uint32_t) { return {value}; }
  __device__ __forceinline__ uint32_t flag() const { return 0; }
  // This stretch followed by `next`.
  __device__ __forceinline__ ScanItem Then(const ScanItem& next) const { return {v + next.v}; }
};

template <typename T>
struct ScanItem<T, true> {
  T v{};
  uint32_t f = 0;

  static __device__ __forceinline__ ScanItem Of(T value, uint32_t head) { return {value, head}; }
  __device__ __forceinline__ uint32_t flag() const { return f; }
  __device__ __forceinline__ ScanItem Then(const ScanItem& next) const {
    return {next.f ? next.v : v + next.v, f | next.f};
  }
};

// The item `offset` lanes below (above), of the full warp; lanes without one get their own.
template <typename T, bool kSegmented>
__device__ __forceinline__ ScanItem<T, kSegmented> ShuffleUp(const ScanItem<T, kSegmented>& x, int offset) {
  ScanItem<T, kSegmented> y;
  y.v = __shfl_up_sync(kFullWarp, x.v, offset);
  if constexpr (kSegmented) y.f = __shfl_up_sync(kFullWarp, x.f, offset);
  return y;
}
template <typename T, bool kSegmented>
__device__ __forceinline__ ScanItem<T, kSegmented> ShuffleDown(const ScanItem<T, kSegmented>& x, int offset) {
  ScanItem<T, kSegmented> y;
  y.v = __shfl_down_sync(kFullWarp, x.v, offset);
  if constexpr (kSegmented) y.f = __shfl_down_sync(kFullWarp, x.f, offset);
  return y;
}
template <typename T, bool kSegmented>
__device__ __forceinline__ ScanItem<T, kSegmented> ShuffleFrom(const ScanItem<T, kSegmented>& x, int lane) {
  ScanItem<T, kSegmented> y;
  y.v = __shfl_sync(kFullWarp, x.v, lane);
  if constexpr (kSegmented) y.f = __shfl_sync(kFullWarp, x.f, lane);
  return y;
}

// Inclusive scan over the lanes.
template <typename Item>
__device__ __forceinline__ Item WarpScan(Item x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Item below = ShuffleUp(x, offset);
    if (lane >= offset) x = below.Then(x);
  }
  return x;
}

// The lanes' items one after the other, in a fixed order; every lane gets lane 0's.
template <typename Item>
__device__ __forceinline__ Item WarpChain(Item x) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    // After this step a lane that is a multiple of 2·offset holds the 2·offset lanes from it on.
    const Item above = ShuffleDown(x, offset);
    if (static_cast<int>(threadIdx.x) % (2 * offset) == 0) x = x.Then(above);
  }
  return ShuffleFrom(x, 0);
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_ITEM_CUH_
