// What the tiles of a scan publish: a value and its state in one word that is written and read at once. Nothing else
// hangs on it, so relaxed accesses at the scope of the device are all the order that is needed.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_WORD_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_WORD_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/scan_item.cuh"

namespace stillhouse::cuda {

enum : uint32_t { kNothing = 0, kTotal = 1, kPrefix = 2, kState = 3, kFlag = 4 };

template <int kBytes>
struct Word;

template <>
struct alignas(8) Word<4> {
  uint32_t value, state;
  static __device__ __forceinline__ Word Load(const Word* from) {
    uint64_t bits;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");
    return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  }
  __device__ __forceinline__ void Store(Word* to) const {
    const uint64_t bits = static_cast<uint64_t>(state) << 32 | value;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
  }
};

template <>
struct alignas(16) Word<8> {
  uint64_t value, state;
  static __device__ __forceinline__ Word Load(const Word* from) {
    Word w;
    asm volatile("{\n\t.reg .b128 q;\n\tld.relaxed.gpu.global.b128 q, [%2];\n\tmov.b128 {%0, %1}, q;\n\t}"
                 : "=l"(w.value), "=l"(w.state)
                 : "l"(from)
                 : "memory");
    return w;
  }
  __device__ __forceinline__ void Store(Word* to) const {
    asm volatile("{\n\t.reg .b128 q;\n\tmov.b128 q, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], q;\n\t}" ::"l"(to),
                 "l"(value), "l"(state)
                 : "memory");
  }
};

template <typename T>
__device__ __forceinline__ T FromBits(uint64_t bits) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<T>(bits);
  } else if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(static_cast<uint32_t>(bits));
  } else {
    return static_cast<T>(bits);
  }
}
template <typename T>
__device__ __forceinline__ auto ToBits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(value);
  } else {
    return value;
  }
}

// The word of an item, and back.
template <typename Item>
__device__ __forceinline__ void Publish(Word<sizeof(Item::v)>* to, const Item& item, uint32_t state) {
  Word<sizeof(Item::v)>{ToBits(item.v), state | (item.flag() ? kFlag : 0u)}.Store(to);
}
template <typename Item>
__device__ __forceinline__ Item ItemOf(const Word<sizeof(Item::v)>& word) {
  return Item::Of(FromBits<decltype(Item::v)>(word.value), word.state & kFlag ? 1 : 0);
}
template <int kBytes>
__device__ __forceinline__ uint32_t StateOf(const Word<kBytes>& word) {
  return word.state & kState;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_SCAN_WORD_CUH_
