// A warp's stretch of a scan: consecutive elements in registers, their sums, and the places they are read from and
// written to.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_STRETCH_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_STRETCH_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/scan_item.cuh"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {

template <typename T>
struct ScanView {
  const T* in;
  const uint8_t* heads;
  T* out;
  int64_t in_stride, n;
  bool exclusive, aligned;
};

// Consecutive elements as kVectors rounds of 32 vectors of 16 bytes: lane l has vector l of every round.
template <typename T, bool kSegmented, int kVectors = 8>
struct Stretch {
  static constexpr int kPer = 16 / static_cast<int>(sizeof(T));  // elements of a vector
  static constexpr int64_t kItems = int64_t{kWarp} * kVectors * kPer;

  using Item = ScanItem<T, kSegmented>;

  T x[kVectors][kPer];    // sums within a vector, from the last head in it on
  uint32_t heads = 0;     // a bit an element
  Item before[kVectors];  // the sum of the stretch before each vector
  Item total;             // of the whole stretch

  // Starts to bring the stretch at `begin` of a row into this thread's places, kStep vectors apart, of a slot; past the
  // row's end: zeros.
  template <int kStep>
  static __device__ __forceinline__ void Ask(const ScanView<T>& shape, int64_t row, int64_t begin, uint4* slot) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const T* in = shape.in + row * shape.in_stride;
    const bool whole = shape.aligned && begin + kItems <= shape.n;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int64_t i = begin + (j * kWarp + lane) * kPer;
      if (whole) {
        CopyAsync16(slot + j * kStep, in + i);
      } else {
        Vec16<T> v;
#pragma unroll
        for (int e = 0; e < kPer; ++e) v.at[e] = i + e < shape.n ? in[i + e] : T{};
        StoreVec16(reinterpret_cast<T*>(slot + j * kStep), v);
      }
    }
  }

  // What lies in this thread's places of a slot.
  template <int kStep>
  __device__ __forceinline__ void Take(const ScanView<T>& shape, int64_t row, int64_t begin, const uint4* slot) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const Vec16<T> v = LoadVec16(reinterpret_cast<const T*>(slot + j * kStep));
#pragma unroll
      for (int e = 0; e < kPer; ++e) x[j][e] = v.at[e];
    }
    heads = 0;
    if constexpr (kSegmented) {
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const uint8_t* marks = shape.heads + row * shape.n;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int64_t i = begin + (j * kWarp + lane) * kPer;
        if (shape.aligned && i + kPer <= shape.n) {
          using Marks = std::conditional_t<kPer == 4, uint32_t, uint16_t>;
          const Marks m = *reinterpret_cast<const Marks*>(marks + i);
#pragma unroll
          for (int e = 0; e < kPer; ++e) heads |= (m >> (8 * e) & 0xff ? 1u : 0u) << (j * kPer + e);
        } else {
#pragma unroll
          for (int e = 0; e < kPer; ++e) {
            if (i + e < shape.n) heads |= (marks[i + e] ? 1u : 0u) << (j * kPer + e);
          }
        }
      }
    }
  }

  // The sum of the stretch before Scan; in segmented scans this is Scan's.
  __device__ __forceinline__ Item Total() {
    if constexpr (kSegmented) {
      Scan();
      return total;
    } else {
      T sum{};
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) sum += x[j][e];
      }
      return Item::Of(WarpSum(sum), 0);
    }
  }

  __device__ __forceinline__ uint32_t HeadsOf(int j) const { return heads >> (j * kPer); }

  // Elements at `begin` and on of a row; those past its end are 0.
  __device__ __forceinline__ void Load(const ScanView<T>& shape, int64_t row, int64_t begin) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const T* in = shape.in + row * shape.in_stride;
    const uint8_t* marks = kSegmented ? shape.heads + row * shape.n : nullptr;
    heads = 0;
    if (shape.aligned && begin + kItems <= shape.n) {
      Vec16<T> v[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[j] = LoadVec16(in + begin + (j * kWarp + lane) * kPer);
      if constexpr (kSegmented) {
        using Marks = std::conditional_t<kPer == 4, uint32_t, uint16_t>;
        Marks m[kVectors];
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          m[j] = *reinterpret_cast<const Marks*>(marks + begin + (j * kWarp + lane) * kPer);
        }
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
          for (int e = 0; e < kPer; ++e) heads |= (m[j] >> (8 * e) & 0xff ? 1u : 0u) << (j * kPer + e);
        }
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) x[j][e] = v[j].at[e];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          const int64_t i = begin + (j * kWarp + lane) * kPer + e;
          x[j][e] = i < shape.n ? in[i] : T{};
          if (kSegmented && i < shape.n) heads |= (marks[i] ? 1u : 0u) << (j * kPer + e);
        }
      }
    }
  }

  __device__ __forceinline__ void Scan() {
    Item end[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
      for (int e = 1; e < kPer; ++e) {
        if (!kSegmented || !(HeadsOf(j) >> e & 1)) x[j][e] = x[j][e - 1] + x[j][e];
      }
      end[j] = Item::Of(x[j][kPer - 1], HeadsOf(j) & ((1u << kPer) - 1));
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) end[j] = WarpScan(end[j]);
    total = Item();
    const bool first = threadIdx.x % kWarp == 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const Item below = ShuffleUp(end[j], 1);
      before[j] = first ? total : total.Then(below);
      total = total.Then(ShuffleFrom(end[j], kWarp - 1));
    }
  }

  // The scan of the row, given the sum of all of it before this stretch. `once`: nobody reads it soon, so the caches
  // need not keep it.
  __device__ __forceinline__ void Store(const ScanView<T>& shape, int64_t row, int64_t begin, const Item& prefix,
                                        bool once = false) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    T* out = shape.out + row * shape.n;
    const bool whole = shape.aligned && begin + kItems <= shape.n;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const T base = prefix.Then(before[j]).v;
      Vec16<T> v;
      uint32_t seen = 0;  // a head among the elements so far
      T last = base;      // the inclusive sum of the element before
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        const uint32_t head = kSegmented ? HeadsOf(j) >> e & 1 : 0;
        seen |= head;
        const T sum = seen ? x[j][e] : base + x[j][e];
        v.at[e] = !shape.exclusive ? sum : head ? T{} : last;
        last = sum;
      }
      const int64_t i = begin + (j * kWarp + lane) * kPer;
      if (whole) {
        if (once) {
          __stcs(reinterpret_cast<uint4*>(out + i), *reinterpret_cast<const uint4*>(&v));
        } else {
          StoreVec16(out + i, v);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kPer; ++e) {
          if (i + e < shape.n) out[i + e] = v.at[e];
        }
      }
    }
  }
};

// The totals of kCount consecutive stretches, one after the other; and what comes before the `index`th, given what
// comes before the first.
template <int kCount, typename Item>
__device__ __forceinline__ Item FoldTotals(const Item (&totals)[kCount]) {
  Item total = totals[0];
#pragma unroll
  for (int w = 1; w < kCount; ++w) total = total.Then(totals[w]);
  return total;
}
template <int kCount, typename Item>
__device__ __forceinline__ Item BeforeStretch(Item prefix, const Item (&totals)[kCount], int index) {
#pragma unroll
  for (int w = 0; w < kCount - 1; ++w) {
    if (w < index) prefix = prefix.Then(totals[w]);
  }
  return prefix;
}

// Calls body(typed view, whether it is segmented as a constant).
template <typename T, typename Body>
void WithType(const ScanShape& s, const Body& body) {
  ScanView<T> view{static_cast<const T*>(s.in), s.heads, static_cast<T*>(s.out), s.in_stride, s.n, s.exclusive, false};
  constexpr uintptr_t kPer = 16 / sizeof(T);
  const int64_t in_step = s.rows > 1 ? s.in_stride * static_cast<int64_t>(sizeof(T)) : 0;
  const int64_t out_step = s.rows > 1 ? s.n * static_cast<int64_t>(sizeof(T)) : 0;
  view.aligned =
      Aligned16(s.in, in_step) && Aligned16(s.out, out_step) && reinterpret_cast<uintptr_t>(s.heads) % kPer == 0;
  if (s.heads) {
    body(view, std::true_type());
  } else {
    body(view, std::false_type());
  }
}
template <typename Body>
void WithTypes(const ScanShape& s, const Body& body) {
  switch (s.element) {
    case ScanElement::kFloat:
      return WithType<float>(s, body);
    case ScanElement::kInt32:
      return WithType<uint32_t>(s, body);
    case ScanElement::kInt64:
      return WithType<unsigned long long>(s, body);
  }
}

inline int64_t BytesOf(ScanElement element) { return element == ScanElement::kInt64 ? 8 : 4; }

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_STRETCH_CUH_
