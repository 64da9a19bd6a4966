#include "kernels/ops/matmul.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm.h"

namespace stillhouse::cpu {
namespace {

// Rows of a weight [N, K] as float panels of weightᵀ [K, N].
class WeightPanels final : public PanelSource {
 public:
  explicit WeightPanels(const Tensor& weight)
      : dtype_(weight.dtype()),
        data_(static_cast<const char*>(weight.raw())),
        row_bytes_(RowBytes(weight.dtype(), weight.dim(1))) {}

  int64_t depth_step() const override { return BlockElements(dtype_); }

  void Fill(const SimdTable& simd, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t cols,
            float* panel) const override {
    const int64_t depth = k_end - k_begin;
    const char* first = data_ + n_begin * row_bytes_ + RowBytes(dtype_, k_begin);
    if (dtype_ == DType::kF32) {
      simd.pack_transposed(reinterpret_cast<const float*>(first), row_bytes_ / 4, cols, depth, panel);
      return;
    }
    float* rows = ThreadScratch(ScratchSlot::kOperand, cols * depth);
    for (int64_t j = 0; j < cols; ++j) simd.dequantize(dtype_, first + j * row_bytes_, depth, rows + j * depth);
    simd.pack_transposed(rows, depth, cols, depth, panel);
  }

 private:
  DType dtype_;
  const char* data_;
  int64_t row_bytes_;
};

// Any matrix of floats [K, N].
class StridedPanels final : public PanelSource {
 public:
  StridedPanels(const float* data, int64_t depth_stride, int64_t col_stride)
      : data_(data), depth_stride_(depth_stride), col_stride_(col_stride) {}

  void Fill(const SimdTable& simd, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t cols,
            float* panel) const override {
    const float* from = data_ + k_begin * depth_stride_ + n_begin * col_stride_;
    if (depth_stride_ == 1) {
      simd.pack_transposed(from, col_stride_, cols, k_end - k_begin, panel);
      return;
    }
    for (int64_t k = k_begin; k < k_end; ++k, from += depth_stride_, panel += simd.tile_cols) {
      if (col_stride_ == 1) {
        std::memcpy(panel, from, static_cast<size_t>(cols) * sizeof(float));
      } else {
        for (int64_t j = 0; j < cols; ++j) panel[j] = from[j * col_stride_];
      }
      std::fill(panel + cols, panel + simd.tile_cols, 0.0f);
    }
  }

 private:
  const float* data_;
  int64_t depth_stride_, col_stride_;
};

void CheckLinear(const Tensor& x, const Tensor& weight, const Tensor& out) {
  STILLHOUSE_CHECK(x.rank() == 2 && weight.rank() >= 2 && out.rank() == 2);
  STILLHOUSE_CHECK(x.dim(1) == weight.dim(1) && out.dim(0) == x.dim(0) && out.dim(1) == weight.dim(0))
      << x.DebugString() << " · " << weight.DebugString() << "ᵀ -> " << out.DebugString();
  STILLHOUSE_CHECK(x.dim(1) <= 1 || x.stride(1) == 1) << x.DebugString();
  STILLHOUSE_CHECK(out.dim(1) <= 1 || out.stride(1) == 1) << out.DebugString();
  STILLHOUSE_CHECK(weight.contiguous());
}

// Rows of x up to which each weight row is decoded into cache and dotted, instead of packed for a tiled product.
constexpr int64_t kDotRows = 4;

}  // namespace

void LinearInto(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  CheckLinear(x, weight, out);
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = x.dim(0), n = weight.dim(0), k = x.dim(1);
  const float* a = x.f32();
  float* c = out.f32();
  const int64_t lda = x.stride(0), ldc = out.stride(0);
  const float* b0 = bias.defined() ? bias.f32() : nullptr;
  if (m == 0 || n == 0) return;
  if (m <= kDotRows) {
    const DType dtype = weight.dtype();
    const char* data = static_cast<const char*>(weight.raw());
    const int64_t row_bytes = RowBytes(dtype, k);
    backend.threads().ParallelRanges(n, 16, [&](int64_t begin, int64_t end, int) {
      float* row = ThreadScratch(ScratchSlot::kOperand, k);
      float dots[kDotRows];
      for (int64_t j = begin; j < end; ++j) {
        const char* bytes = data + j * row_bytes;
        const float* w = row;
        if (dtype == DType::kF32) {
          w = reinterpret_cast<const float*>(bytes);
        } else {
          simd.dequantize(dtype, bytes, k, row);
        }
        simd.dot_rows(a, lda, m, w, k, dots);
        for (int64_t i = 0; i < m; ++i) c[i * ldc + j] = dots[i] + (b0 ? b0[j] : 0.0f);
      }
    });
    return;
  }
  const WeightPanels panels(weight);
  const int64_t tiles = (n + simd.tile_cols - 1) / simd.tile_cols;
  backend.threads().ParallelRanges(tiles, 2, [&](int64_t begin, int64_t end, int) {
    const int64_t n_begin = begin * simd.tile_cols, n_end = std::min(n, end * simd.tile_cols);
    if (b0) {
      for (int64_t i = 0; i < m; ++i) std::copy(b0 + n_begin, b0 + n_end, c + i * ldc + n_begin);
    }
    GemmPanels(simd, m, n_begin, n_end, k, 1.0f, a, lda, 1, panels, c, ldc, b0 != nullptr);
  });
}

void LinearGradInto(Backend& backend, const Tensor& dout, const Tensor& weight, const Tensor& dx) {
  CheckLinear(dx, weight, dout);
  const SimdTable& simd = SimdOf(backend);
  const DType dtype = weight.dtype();
  const char* data = static_cast<const char*>(weight.raw());
  const int64_t m = dx.dim(0), n = weight.dim(0), k = dx.dim(1);
  const int64_t row_bytes = RowBytes(dtype, k);
  if (m == 0 || n == 0 || k == 0) return;
  // Columns of dx that one task owns: whole blocks of the weight's type, decoded once.
  const int64_t width = std::max<int64_t>(BlockElements(dtype), 4 * simd.tile_cols);
  constexpr int64_t kDepth = 256;
  backend.threads().ParallelFor((k + width - 1) / width, [&](int64_t task, int) {
    const int64_t k_begin = task * width, cols = std::min(width, k - k_begin);
    const int64_t tiles = (cols + simd.tile_cols - 1) / simd.tile_cols;
    float* panels = ThreadScratch(ScratchSlot::kPanel, tiles * simd.tile_cols * kDepth);
    float* row = ThreadScratch(ScratchSlot::kOperand, tiles * simd.tile_cols);
    for (int64_t n_begin = 0; n_begin < n; n_begin += kDepth) {
      const int64_t depth = std::min(kDepth, n - n_begin);
      for (int64_t j = 0; j < depth; ++j) {
        simd.dequantize(dtype, data + (n_begin + j) * row_bytes + RowBytes(dtype, k_begin), cols, row);
        for (int64_t t = 0; t < tiles; ++t) {
          std::memcpy(panels + (t * kDepth + j) * simd.tile_cols, row + t * simd.tile_cols,
                      static_cast<size_t>(simd.tile_cols) * sizeof(float));
        }
      }
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t tile_cols = std::min<int64_t>(simd.tile_cols, cols - t * simd.tile_cols);
        GemmNN(simd, m, tile_cols, depth, 1.0f, dout.f32() + n_begin, dout.stride(0),
               panels + t * kDepth * simd.tile_cols, simd.tile_cols, dx.f32() + k_begin + t * simd.tile_cols,
               dx.stride(0), true);
      }
    }
  });
}

void Linear(Backend& backend, const LinearArgs& args) { LinearInto(backend, args.x, args.weight, args.bias, args.out); }

void LinearGrad(Backend& backend, const LinearGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = args.dout.dim(0), n = args.dout.dim(1);
  if (args.dx) LinearGradInto(backend, args.dout, args.weight, args.dx);
  if (args.dweight) {
    STILLHOUSE_CHECK(args.weight.dtype() == DType::kF32) << args.weight.DebugString();
    const int64_t k = args.x.dim(1);
    backend.threads().ParallelRanges(n, simd.tile_rows, [&](int64_t begin, int64_t end, int) {
      GemmTN(simd, end - begin, k, m, 1.0f, args.dout.f32() + begin, args.dout.stride(0), args.x.f32(),
             args.x.stride(0), args.dweight.f32() + begin * args.dweight.stride(0), args.dweight.stride(0), true);
    });
  }
  if (args.dbias) {
    for (int64_t i = 0; i < m; ++i) {
      simd.axpy(1.0f, args.dout.f32() + i * args.dout.stride(0), args.dbias.f32(), n);
    }
  }
}

void MatMul(Backend& backend, const MatMulArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  Tensor a = args.a, b = args.b, c = args.out;
  STILLHOUSE_CHECK(a.rank() == b.rank() && a.rank() == c.rank() && (a.rank() == 2 || a.rank() == 3));
  if (c.dim(-1) > 1 && c.stride(-1) != 1) {
    // Cᵀ = Bᵀ·Aᵀ.
    STILLHOUSE_CHECK(c.dim(-2) <= 1 || c.stride(-2) == 1) << "rows or columns of a product must be contiguous";
    std::swap(a, b);
    a = a.Transpose(-1, -2);
    b = b.Transpose(-1, -2);
    c = c.Transpose(-1, -2);
  }
  const int64_t batch = a.rank() == 3 ? a.dim(0) : 1;
  const int64_t m = c.dim(-2), n = c.dim(-1), k = a.dim(-1);
  STILLHOUSE_CHECK(a.dim(-2) == m && b.dim(-2) == k && b.dim(-1) == n) << a.DebugString() << b.DebugString();
  if (a.rank() == 3) STILLHOUSE_CHECK(b.dim(0) == batch && c.dim(0) == batch);
  if (batch == 0 || m == 0 || n == 0) return;
  const int64_t a_batch = a.rank() == 3 ? a.stride(0) : 0, b_batch = b.rank() == 3 ? b.stride(0) : 0,
                c_batch = c.rank() == 3 ? c.stride(0) : 0;
  // Columns are cut so that every thread has work; a cut costs nothing but re-reading A.
  const int64_t tiles = (n + simd.tile_cols - 1) / simd.tile_cols;
  const int64_t wanted = batch >= 2 * backend.threads().num_threads() ? 1 : 4 * backend.threads().num_threads();
  const int64_t step = std::max<int64_t>(1, (tiles + wanted - 1) / wanted) * simd.tile_cols;
  const int64_t cuts = (n + step - 1) / step;
  backend.threads().ParallelFor(batch * cuts, [&](int64_t task, int) {
    const int64_t i = task / cuts, n_begin = task % cuts * step, n_end = std::min(n, n_begin + step);
    const StridedPanels panels(b.f32() + i * b_batch, b.stride(-2), b.stride(-1));
    GemmPanels(simd, m, n_begin, n_end, k, args.alpha, a.f32() + i * a_batch, a.stride(-2), a.stride(-1), panels,
               c.f32() + i * c_batch, c.stride(-2), args.accumulate);
  });
}

void PrepareWeight(Backend& backend, const PrepareWeightArgs& args) { *args.out = args.weight; }

}  // namespace stillhouse::cpu
