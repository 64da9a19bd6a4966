#include "kernels/tensor/tensor.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace stillhouse {
namespace {

Shape RowMajor(const Shape& shape) {
  Shape strides(shape.size());
  int64_t step = 1;
  for (int i = static_cast<int>(shape.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i];
  }
  return strides;
}

int64_t Product(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

// Calls body(offset_a, offset_b, run) for runs of the last dimension.
template <typename Body>
void ForEachRun(const Tensor& a, const Shape& strides_b, const Body& body) {
  const int rank = a.rank();
  if (a.elements() == 0) return;
  if (rank == 0) {
    body(0, 0, 1);
    return;
  }
  Shape index(rank, 0);
  while (true) {
    int64_t offset_a = 0, offset_b = 0;
    for (int i = 0; i + 1 < rank; ++i) {
      offset_a += index[i] * a.stride(i);
      offset_b += index[i] * strides_b[i];
    }
    body(offset_a, offset_b, a.dim(-1));
    int d = rank - 2;
    while (d >= 0 && ++index[d] == a.dim(d)) index[d--] = 0;
    if (d < 0) return;
  }
}

}  // namespace

Tensor Tensor::Empty(BufferPool& pool, DType dtype, Shape shape) {
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.strides_ = RowMajor(t.shape_);
  t.buffer_ = pool.Allocate(static_cast<size_t>(std::max<int64_t>(t.bytes(), 1)));
  return t;
}

Tensor Tensor::TryEmpty(BufferPool& pool, DType dtype, Shape shape) {
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.strides_ = RowMajor(t.shape_);
  t.buffer_ = pool.TryAllocate(static_cast<size_t>(std::max<int64_t>(t.bytes(), 1)));
  return t.buffer_ ? t : Tensor();
}

Tensor Tensor::Wrap(const void* data, DType dtype, Shape shape, std::shared_ptr<const void> keep) {
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.strides_ = RowMajor(t.shape_);
  t.buffer_ = std::make_shared<Buffer>(const_cast<void*>(data), static_cast<size_t>(t.bytes()), DeviceType::kCpu,
                                       [keep = std::move(keep)](void*, size_t) {});
  return t;
}

Tensor Tensor::Zeros(BufferPool& pool, DType dtype, Shape shape) {
  Tensor t = Empty(pool, dtype, std::move(shape));
  STILLHOUSE_CHECK(t.device() == DeviceType::kCpu);
  std::memset(t.raw(), 0, static_cast<size_t>(t.bytes()));
  return t;
}

Tensor Tensor::FromFloats(BufferPool& pool, absl::Span<const float> values, Shape shape) {
  Tensor t = Empty(pool, DType::kF32, std::move(shape));
  STILLHOUSE_CHECK_EQ(t.elements(), static_cast<int64_t>(values.size()));
  if (!values.empty()) std::memcpy(t.raw(), values.data(), values.size() * sizeof(float));
  return t;
}

Tensor Tensor::FromInts(BufferPool& pool, absl::Span<const int32_t> values, Shape shape) {
  Tensor t = Empty(pool, DType::kI32, std::move(shape));
  STILLHOUSE_CHECK_EQ(t.elements(), static_cast<int64_t>(values.size()));
  if (!values.empty()) std::memcpy(t.raw(), values.data(), values.size() * sizeof(int32_t));
  return t;
}

int64_t Tensor::elements() const { return Product(shape_); }

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

int64_t Tensor::bytes() const { return elements() / BlockElements(dtype_) * BlockBytes(dtype_); }

void* Tensor::raw() const {
  STILLHOUSE_CHECK(defined());
  return static_cast<char*>(buffer_->data()) + offset_ / BlockElements(dtype_) * BlockBytes(dtype_);
}

Tensor Tensor::Reshape(Shape shape) const {
  STILLHOUSE_CHECK(contiguous()) << DebugString();
  int64_t known = 1;
  int free = -1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      free = static_cast<int>(i);
    } else {
      known *= shape[i];
    }
  }
  if (free >= 0) shape[free] = known == 0 ? 0 : elements() / known;
  STILLHOUSE_CHECK_EQ(Product(shape), elements()) << DebugString();
  Tensor t = *this;
  t.shape_ = std::move(shape);
  t.strides_ = RowMajor(t.shape_);
  return t;
}

Tensor Tensor::Slice(int dim, int64_t begin, int64_t end) const {
  if (dim < 0) dim += rank();
  STILLHOUSE_CHECK(0 <= begin && begin <= end && end <= shape_[dim]) << begin << ".." << end << " of " << DebugString();
  STILLHOUSE_CHECK(!IsQuantized(dtype_) || dim == 0);
  Tensor t = *this;
  t.shape_[dim] = end - begin;
  t.offset_ += begin * strides_[dim];
  return t;
}

Tensor Tensor::Select(int dim, int64_t index) const {
  if (dim < 0) dim += rank();
  Tensor t = Slice(dim, index, index + 1);
  t.shape_.erase(t.shape_.begin() + dim);
  t.strides_.erase(t.strides_.begin() + dim);
  return t;
}

Tensor Tensor::Transpose(int a, int b) const {
  STILLHOUSE_CHECK(!IsQuantized(dtype_));
  if (a < 0) a += rank();
  if (b < 0) b += rank();
  Tensor t = *this;
  std::swap(t.shape_[a], t.shape_[b]);
  std::swap(t.strides_[a], t.strides_[b]);
  return t;
}

Tensor Tensor::View(int64_t byte_offset, DType dtype, Shape shape) const {
  const int64_t size = BlockBytes(dtype);
  STILLHOUSE_CHECK(dtype_ == DType::kU8 && contiguous() && !IsQuantized(dtype)) << DebugString();
  STILLHOUSE_CHECK(byte_offset >= 0 && (offset_ + byte_offset) % size == 0 &&
                   byte_offset + Product(shape) * size <= elements())
      << byte_offset << " of " << DebugString();
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.strides_ = RowMajor(t.shape_);
  t.offset_ = (offset_ + byte_offset) / size;
  t.buffer_ = buffer_;
  return t;
}

Tensor Tensor::WithBuffer(std::shared_ptr<Buffer> buffer, DType dtype) const {
  Tensor t = *this;
  t.dtype_ = dtype;
  t.buffer_ = std::move(buffer);
  return t;
}

std::string Tensor::DebugString() const {
  return absl::StrCat(DTypeName(dtype_), "[", absl::StrJoin(shape_, ", "), "]", contiguous() ? "" : " strided");
}

void CopyElements(const Tensor& from, const Tensor& to) {
  STILLHOUSE_CHECK(from.shape() == to.shape() && from.dtype() == to.dtype())
      << from.DebugString() << " -> " << to.DebugString();
  if (from.contiguous() && to.contiguous()) {
    if (from.bytes() > 0) std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
    return;
  }
  STILLHOUSE_CHECK(!IsQuantized(from.dtype()));
  const int64_t size = BlockBytes(from.dtype());
  const char* source = static_cast<const char*>(from.raw());
  char* target = static_cast<char*>(to.raw());
  const int64_t step_from = from.rank() ? from.stride(-1) : 1, step_to = to.rank() ? to.stride(-1) : 1;
  ForEachRun(from, to.strides(), [&](int64_t a, int64_t b, int64_t run) {
    if (step_from == 1 && step_to == 1) {
      std::memcpy(target + b * size, source + a * size, static_cast<size_t>(run * size));
    } else {
      for (int64_t i = 0; i < run; ++i) {
        std::memcpy(target + (b + i * step_to) * size, source + (a + i * step_from) * size, static_cast<size_t>(size));
      }
    }
  });
}

void FillF32(const Tensor& tensor, float value) {
  float* data = tensor.f32();
  const int64_t step = tensor.rank() ? tensor.stride(-1) : 1;
  ForEachRun(tensor, tensor.strides(), [&](int64_t a, int64_t, int64_t run) {
    for (int64_t i = 0; i < run; ++i) data[a + i * step] = value;
  });
}

}  // namespace stillhouse
