// A view of typed, strided memory. Copying a Tensor copies the view, never the data.
#ifndef STILLHOUSE_KERNELS_TENSOR_TENSOR_H_
#define STILLHOUSE_KERNELS_TENSOR_TENSOR_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "kernels/base/logging.h"
#include "kernels/tensor/buffer.h"
#include "kernels/tensor/dtype.h"

namespace stillhouse {

using Shape = absl::InlinedVector<int64_t, 5>;

// An empty Tensor (default constructed) stands for "absent" in op arguments. Offsets and strides count elements;
// tensors of a quantised type are contiguous row-major matrices and offer only row slices. Not synchronised: share for
// reading.
class Tensor {
 public:
  Tensor() = default;

  // A contiguous tensor of undefined contents.
  static Tensor Empty(BufferPool& pool, DType dtype, Shape shape);
  // The same, or an empty Tensor where the pool has no memory left.
  static Tensor TryEmpty(BufferPool& pool, DType dtype, Shape shape);
  // A contiguous view of host memory that the caller keeps alive (`keep` may own it).
  static Tensor Wrap(const void* data, DType dtype, Shape shape, std::shared_ptr<const void> keep = nullptr);
  // Zeroed, or copied from host values; host memory only.
  static Tensor Zeros(BufferPool& pool, DType dtype, Shape shape);
  static Tensor FromFloats(BufferPool& pool, absl::Span<const float> values, Shape shape);
  static Tensor FromInts(BufferPool& pool, absl::Span<const int32_t> values, Shape shape);

  bool defined() const { return buffer_ != nullptr; }
  explicit operator bool() const { return defined(); }

  DType dtype() const { return dtype_; }
  DeviceType device() const { return buffer_->device(); }
  int rank() const { return static_cast<int>(shape_.size()); }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  // Negative dimensions count from the end.
  int64_t dim(int i) const { return shape_[i < 0 ? i + rank() : i]; }
  int64_t stride(int i) const { return strides_[i < 0 ? i + rank() : i]; }
  int64_t elements() const;
  bool contiguous() const;
  // Bytes of a contiguous tensor of this shape.
  int64_t bytes() const;
  const std::shared_ptr<Buffer>& buffer() const { return buffer_; }
  int64_t offset() const { return offset_; }

  void* raw() const;
  template <typename T>
  T* data() const {
    return static_cast<T*>(raw());
  }
  float* f32() const {
    STILLHOUSE_CHECK(dtype_ == DType::kF32) << DTypeName(dtype_);
    return static_cast<float*>(raw());
  }
  int32_t* i32() const {
    STILLHOUSE_CHECK(dtype_ == DType::kI32) << DTypeName(dtype_);
    return static_cast<int32_t*>(raw());
  }

  // Views. Reshape needs a contiguous tensor; one dimension may be -1.
  Tensor Reshape(Shape shape) const;
  Tensor Slice(int dim, int64_t begin, int64_t end) const;
  Tensor Select(int dim, int64_t index) const;  // drops the dimension
  Tensor Transpose(int a, int b) const;

  // `elements` at `byte_offset` (a multiple of the element's size) of a u8 block, as a tensor of their own.
  Tensor View(int64_t byte_offset, DType dtype, Shape shape) const;

  // A view of another buffer with this tensor's shape, strides and offset (a gradient of a view is a view of the
  // gradient).
  Tensor WithBuffer(std::shared_ptr<Buffer> buffer, DType dtype) const;

  std::string DebugString() const;  // "f32[3, 12, 64]"

 private:
  DType dtype_ = DType::kF32;
  Shape shape_;
  Shape strides_;
  int64_t offset_ = 0;  // elements
  std::shared_ptr<Buffer> buffer_;
};

// Copies elements between host tensors of one shape and dtype, any strides.
void CopyElements(const Tensor& from, const Tensor& to);
// Sets every element of a host tensor (f32) to `value`.
void FillF32(const Tensor& tensor, float value);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_TENSOR_H_
