// Strided tensors as plain structs, for kernel parameters.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_STRIDED_H_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_STRIDED_H_

#include <cstdint>

#ifdef __CUDACC__
#define STILLHOUSE_CUDA_INLINE __host__ __device__ __forceinline__
#else
#define STILLHOUSE_CUDA_INLINE inline
#endif

namespace stillhouse::cuda {

inline constexpr int kMaxOuterDims = 4;

// Rows of floats: the last dimension is contiguous and not part of this; the others are walked in row-major order. An
// absent tensor has no data.
struct Rows {
  float* data = nullptr;
  int rank = 0;  // outer dimensions
  int64_t dims[kMaxOuterDims] = {};
  int64_t strides[kMaxOuterDims] = {};  // elements

  STILLHOUSE_CUDA_INLINE float* at(int64_t r) const {
    int64_t offset = 0;
    for (int i = kMaxOuterDims - 1; i > 0; --i) {
      if (i >= rank) continue;
      offset += r % dims[i] * strides[i];
      r /= dims[i];
    }
    return data + offset + (rank > 0 ? r * strides[0] : 0);
  }
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_STRIDED_H_
