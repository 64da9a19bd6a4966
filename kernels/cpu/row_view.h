// Rows of a float tensor of any rank: the last dimension is contiguous, the others are walked in row-major order.
#ifndef STILLHOUSE_KERNELS_CPU_ROW_VIEW_H_
#define STILLHOUSE_KERNELS_CPU_ROW_VIEW_H_

#include "kernels/tensor/tensor.h"

namespace stillhouse::cpu {

class RowView {
 public:
  explicit RowView(const Tensor& t) : data_(t.f32()), width_(t.dim(-1)), rows_(1), rank_(t.rank() - 1) {
    STILLHOUSE_CHECK(rank_ >= 0 && rank_ <= kMaxOuter && (width_ <= 1 || t.stride(-1) == 1)) << t.DebugString();
    for (int i = 0; i < rank_; ++i) {
      dims_[i] = t.dim(i);
      strides_[i] = t.stride(i);
      rows_ *= t.dim(i);
    }
  }

  int64_t rows() const { return rows_; }
  int64_t width() const { return width_; }

  float* row(int64_t r) const {
    if (rank_ == 0) return data_;
    int64_t offset = 0;
    for (int i = rank_ - 1; i > 0; --i) {
      offset += r % dims_[i] * strides_[i];
      r /= dims_[i];
    }
    return data_ + offset + r * strides_[0];
  }

 private:
  static constexpr int kMaxOuter = 4;
  float* data_;
  int64_t width_;
  int64_t rows_;
  int rank_;
  int64_t dims_[kMaxOuter] = {};
  int64_t strides_[kMaxOuter] = {};
};

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_ROW_VIEW_H_
