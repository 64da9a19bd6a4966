// The best of a row of logits, exactly: best first, ties to the lower id. One block of kThreads on one row.
//
// A logit's key is a 32-bit integer in the order of floats (0: not to be taken); a key and an id make one 64-bit entry,
// all different, so that whatever order threads collect entries in, sorting makes the result the same.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_SELECT_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_SELECT_CUH_

#include <cstdint>

#include "kernels/cuda/device/row.cuh"
#include "kernels/cuda/select_room.h"

namespace stillhouse::cuda {

// −inf and NaN are passed over. 0 and −0 are equal.
__device__ __forceinline__ uint32_t LogitKey(float x) {
  if (!(x > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float KeyLogit(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ uint64_t MakeEntry(uint32_t key, int64_t id) {
  return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ uint32_t EntryKey(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }
__device__ __forceinline__ int32_t EntryId(uint64_t entry) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(entry));
}

// Sorts list[0, count) by falling value; the list has room up to the next power of two (filled with 0). Shared or
// global memory. Ends with a barrier.
template <int kThreads>
__device__ void SortFalling(uint64_t* list, int64_t count) {
  const int64_t room = PowerOfTwoAtLeast(count);
  for (int64_t i = count + threadIdx.x; i < room; i += kThreads) list[i] = 0;
  __syncthreads();
  for (int64_t run = 2; run <= room; run *= 2) {
    for (int64_t step = run / 2; step > 0; step /= 2) {
      for (int64_t i = threadIdx.x; i < room / 2; i += kThreads) {
        const int64_t low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t a = list[low], b = list[high];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// The largest bound such that at least k (≤ kThreads) threads hold a key at or above it; 0 if there are not so many.
template <int kThreads>
__device__ uint32_t BoundOfMaxima(uint32_t own, int64_t k) {
  uint32_t bound = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = bound | 1u << bit;
    if (__syncthreads_count(own >= candidate) >= k) bound = candidate;
  }
  return bound;
}

// Collects the entries of the row for which take(i, key), in any order, as far as the list's room reaches; returns how
// many there are.
template <int kThreads, typename Take>
__device__ int64_t Gather(const float* row, int64_t n, uint64_t* list, int64_t room, const Take& take) {
  __shared__ unsigned long long count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  ForEachInRow<kThreads>(row, n, [&](int64_t i, float x) {
    const uint32_t key = LogitKey(x);
    if (!take(i, key)) return;
    const int64_t at = static_cast<int64_t>(atomicAdd(&count, 1ull));
    if (at < room) list[at] = MakeEntry(key, i);
  });
  __syncthreads();
  const int64_t result = static_cast<int64_t>(count);
  __syncthreads();
  return result;
}

// Σ weight(i, row[i]) in integers: the same whatever the order.
template <int kThreads, typename Weight>
__device__ uint64_t SumOverRow(const float* row, int64_t n, const Weight& weight) {
  uint64_t sum = 0;
  ForEachInRow<kThreads>(row, n, [&](int64_t i, float x) { sum += weight(i, x); });
  return BlockSum<kThreads>(sum);
}

// The largest key at or above which weights sum to at least `wanted`; 0 if all together do not.
template <int kThreads, typename Weight>
__device__ uint32_t KeyHolding(const float* row, int64_t n, uint64_t wanted, const Weight& weight) {
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = found | 1u << bit;
    const uint64_t sum = SumOverRow<kThreads>(
        row, n, [&](int64_t i, float x) { return LogitKey(x) >= candidate ? weight(i, x) : uint64_t{0}; });
    if (sum >= wanted) found = candidate;
  }
  return found;
}

// The first index at which the running sum of weight(i, row[i]), in order, exceeds choose(total), which must be below
// the total. Narrows the row down to a 32nd of it at a time.
template <int kThreads, typename Weight, typename Choose>
__device__ int64_t FirstExceeding(const float* row, int64_t n, const Weight& weight, const Choose& choose) {
  constexpr int kParts = kThreads / kWarp;
  static_assert(kParts <= kWarp);
  __shared__ uint64_t sums[kParts];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t begin = 0, end = n;
  uint64_t target = 0;
  for (bool first = true;; first = false) {
    // The parts are at least one element wide, so the last round has one element a part.
    const int64_t width = (end - begin + kParts - 1) / kParts;
    const int64_t from = begin + warp * width, to = from + width < end ? from + width : end;
    uint64_t sum = 0;
    for (int64_t i = from + lane; i < to; i += kWarp) sum += weight(i, row[i]);
    sum = WarpSum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    uint64_t running = lane < kParts ? sums[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t below = __shfl_up_sync(kFullWarp, running, offset);
      if (lane >= offset) running += below;
    }
    if (first) target = choose(__shfl_sync(kFullWarp, running, kWarp - 1));
    const unsigned over = __ballot_sync(kFullWarp, running > target);
    // Nothing over the target cannot happen; the last part then.
    const int part = over ? __ffs(over) - 1 : kParts - 1;
    const uint64_t before = __shfl_sync(kFullWarp, running, part > 0 ? part - 1 : 0);
    if (part > 0) target -= before;
    begin += part * width;
    end = begin + width < end ? begin + width : end;
    __syncthreads();
    if (width == 1 || end - begin <= 1) return begin;
  }
}

// The k best of the row, best first, into `list` (the block's kSelectRoom entries of shared memory) or, where k asks
// for more, into `large` (PowerOfTwoAtLeast(k) entries); *result is the one used. Returns how many there are (fewer
// than k where fewer logits are above −inf). `own` is the largest key among the elements that this thread visits in
// ForEachInRow<kThreads>.
template <int kThreads>
__device__ int64_t SelectBest(const float* row, int64_t n, int64_t k, uint32_t own, uint64_t* list, uint64_t* large,
                              uint64_t** result) {
  k = k < n ? k : n;
  *result = list;
  if (k <= 0) return 0;
  if (k <= kThreads) {
    // No fewer than k keys are at or above the k-th largest of the threads' maxima, and mostly few more.
    const uint32_t bound = BoundOfMaxima<kThreads>(own, k);
    const int64_t count =
        Gather<kThreads>(row, n, list, kSelectRoom, [bound](int64_t, uint32_t key) { return key >= bound && key > 0; });
    if (count <= kSelectRoom) {
      SortFalling<kThreads>(list, count);
      return count < k ? count : k;
    }
  }
  // Exactly: the k-th key, and how many of those that equal it are taken, lowest ids first.
  const auto above = [](uint32_t bound) {
    return [bound](int64_t, float x) -> uint64_t { return LogitKey(x) > bound; };
  };
  const int64_t usable = static_cast<int64_t>(SumOverRow<kThreads>(row, n, above(0)));
  k = k < usable ? k : usable;
  if (k == 0) return 0;
  const uint32_t bound =
      KeyHolding<kThreads>(row, n, static_cast<uint64_t>(k), [](int64_t, float) { return uint64_t{1}; });
  const uint64_t ties = static_cast<uint64_t>(k) - SumOverRow<kThreads>(row, n, above(bound));
  const int64_t last = FirstExceeding<kThreads>(
      row, n, [bound](int64_t, float x) -> uint64_t { return LogitKey(x) == bound; },
      [ties](uint64_t) { return ties - 1; });
  uint64_t* to = k <= kSelectRoom ? list : large;
  Gather<kThreads>(row, n, to, k, [&](int64_t i, uint32_t key) { return key > bound || (key == bound && i <= last); });
  SortFalling<kThreads>(to, k);
  *result = to;
  return k;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_SELECT_CUH_
