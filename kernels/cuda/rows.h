// Tensors as the kernels' plain structs.
#ifndef STILLHOUSE_KERNELS_CUDA_ROWS_H_
#define STILLHOUSE_KERNELS_CUDA_ROWS_H_

#include "kernels/cuda/device/strided.h"
#include "kernels/tensor/tensor.h"

namespace stillhouse::cuda {

// Length of the last dimension (1 for a scalar), and how many such rows there are.
inline int64_t WidthOf(const Tensor& t) { return t.rank() ? t.dim(-1) : 1; }
inline int64_t RowsOf(const Tensor& t) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < t.rank(); ++i) rows *= t.dim(i);
  return rows;
}

// f32 with the last dimension contiguous; an absent tensor gives absent rows.
inline Rows MakeRows(const Tensor& t) {
  Rows rows;
  if (!t) return rows;
  rows.data = t.f32();
  rows.rank = t.rank() > 0 ? t.rank() - 1 : 0;
  STILLHOUSE_CHECK(t.device() == DeviceType::kCuda) << t.DebugString() << " is not on the GPU";
  STILLHOUSE_CHECK(rows.rank <= kMaxOuterDims && (WidthOf(t) <= 1 || t.stride(-1) == 1)) << t.DebugString();
  for (int i = 0; i < rows.rank; ++i) {
    rows.dims[i] = t.dim(i);
    rows.strides[i] = t.stride(i);
  }
  return rows;
}

// An optional f32 vector.
inline float* VectorOf(const Tensor& t, int64_t elements) {
  if (!t) return nullptr;
  STILLHOUSE_CHECK(t.elements() == elements && t.contiguous() && t.device() == DeviceType::kCuda) << t.DebugString();
  return t.f32();
}

// A matrix of floats whose rows may be strided.
inline void CheckMatrix(const Tensor& t, int64_t rows, int64_t width) {
  STILLHOUSE_CHECK(t.rank() == 2 && t.dim(0) == rows && t.dim(1) == width && (width <= 1 || t.stride(1) == 1) &&
                   t.device() == DeviceType::kCuda)
      << t.DebugString() << " for " << rows << " rows of " << width;
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ROWS_H_
