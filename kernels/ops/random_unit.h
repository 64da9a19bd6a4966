// The generator behind RandomFill, for the host and for kernels.
#ifndef STILLHOUSE_KERNELS_OPS_RANDOM_UNIT_H_
#define STILLHOUSE_KERNELS_OPS_RANDOM_UNIT_H_

#include <cstdint>

#ifdef __CUDACC__
#define STILLHOUSE_RANDOM_INLINE __host__ __device__ inline
#else
#define STILLHOUSE_RANDOM_INLINE inline
#endif

namespace stillhouse {

// The i-th value in [-1, 1) of a seed: 24 bits of a mixed counter (SplitMix64, Steele et al. 2014).
STILLHOUSE_RANDOM_INLINE float RandomUnit(uint64_t seed, uint64_t i) {
  uint64_t z = seed * 0xD1342543DE82EF95ull + (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<int32_t>(z >> 40) - (1 << 23)) * (1.0f / (1 << 23));
}

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_RANDOM_UNIT_H_
