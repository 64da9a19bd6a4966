// Descriptions of matrices for the copy engine (device/tensor_copy.cuh).
#ifndef STILLHOUSE_KERNELS_CUDA_TENSOR_MAP_H_
#define STILLHOUSE_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

namespace stillhouse::cuda {

// A bf16 matrix [rows, columns] whose rows begin `row_bytes` apart, in boxes of box_rows × 64 columns, which lie in
// shared memory as device/wgmma.cuh's MatrixDescriptor has them. Address and row_bytes are multiples of 16. Made on the
// host, without the device.
CUtensorMap MatrixMap(const void* data, int64_t rows, int64_t columns, int64_t row_bytes, int box_rows);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_TENSOR_MAP_H_
