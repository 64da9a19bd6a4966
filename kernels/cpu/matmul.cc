#include "kernels/ops/matmul.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/packed_weight.h"

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
    if (col_stride_ == 1) {
      simd.pack_rows(from, depth_stride_, cols, k_end - k_begin, panel);
      return;
    }
    for (int64_t k = k_begin; k < k_end; ++k, from += depth_stride_, panel += simd.tile_cols) {
      for (int64_t j = 0; j < cols; ++j) panel[j] = from[j * col_stride_];
      std::fill(panel + cols, panel + simd.tile_cols, 0.0f);
    }
  }

 private:
  const float* data_;
  int64_t depth_stride_, col_stride_;
};

PackedMatrix MatrixOf(const PackedView& view) {
  const PackedFormat format = view.dtype == DType::kQ8_0   ? PackedFormat::kBytes
                              : view.dtype == DType::kQ4_1 ? PackedFormat::kNibblesMin
                                                           : PackedFormat::kNibbles;
  const int64_t groups = (view.first_row + view.rows + kPackRows - 1) / kPackRows;
  return {format, view.groups, groups, view.group_bytes, view.block_bytes, view.columns / kPackColumns};
}

// The same from a packed weight; a row slice that begins inside a group goes row by row through the file's format.
class PackedPanels final : public PanelSource {
 public:
  explicit PackedPanels(const PackedView& view) : view_(view), matrix_(MatrixOf(view)) {}

  int64_t depth_step() const override { return kPackColumns; }

  void Fill(const SimdTable& simd, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t cols,
            float* panel) const override {
    if (view_.aligned()) {
      simd.unpack_panel(matrix_, n_begin / simd.tile_cols, k_begin / kPackColumns, k_end / kPackColumns, panel);
      return;
    }
    const int64_t depth = k_end - k_begin;
    float* rows = ThreadScratch(ScratchSlot::kOperand, (cols + 1) * depth);
    auto* bytes = reinterpret_cast<uint8_t*>(rows + cols * depth);
    for (int64_t j = 0; j < cols; ++j) {
      UnpackRow(view_, n_begin + j, k_begin, k_end, bytes);
      simd.dequantize(view_.dtype, bytes, depth, rows + j * depth);
    }
    simd.pack_transposed(rows, depth, cols, depth, panel);
  }

 private:
  PackedView view_;
  PackedMatrix matrix_;
};

void CheckLinear(const Tensor& x, const Tensor& weight, const Tensor& out) {
  STILLHOUSE_CHECK(x.rank() == 2 && weight.rank() >= 2 && out.rank() == 2);
  STILLHOUSE_CHECK(x.dim(1) == weight.dim(1) && out.dim(0) == x.dim(0) && out.dim(1) == weight.dim(0))
      << x.DebugString() << " · " << weight.DebugString() << "ᵀ -> " << out.DebugString();
  STILLHOUSE_CHECK(x.dim(1) <= 1 || x.stride(1) == 1) << x.DebugString();
  STILLHOUSE_CHECK(out.dim(1) <= 1 || out.stride(1) == 1) << out.DebugString();
  STILLHOUSE_CHECK(weight.contiguous());
}

// Rows of x up to which a weight row is decoded into cache and dotted, instead of packed for a tiled product.
constexpr int64_t kDotRows = 4;

void DotWeightRows(Backend& backend, const Tensor& x, const Tensor& weight, const float* bias, const Tensor& out) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = x.dim(0), k = x.dim(1), ldc = out.stride(0);
  const DType dtype = weight.dtype();
  const char* data = static_cast<const char*>(weight.raw());
  const int64_t row_bytes = RowBytes(dtype, k);
  const float* a = x.f32();
  float* c = out.f32();
  backend.threads().ParallelRanges(weight.dim(0), 16, [&](int64_t begin, int64_t end, int) {
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
      simd.dot_rows(a, x.stride(0), m, w, k, dots);
      for (int64_t i = 0; i < m; ++i) c[i * ldc + j] = dots[i] + (bias ? bias[j] : 0.0f);
    }
  });
}

// Rows of x up to which integer and byte dots beat decoding the weight into panels.
constexpr int64_t kPackedDotRows = 12;

// Few rows of x on a packed weight: nothing is decoded to memory.
void DotPacked(Backend& backend, const Tensor& x, const PackedView& view, const float* bias, const Tensor& out) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = x.dim(0), n = view.rows, ldc = out.stride(0);
  PackedDot dot{.weight = MatrixOf(view), .rows = m, .x = x.f32(), .x_row = x.stride(0)};
  const int64_t blocks = dot.weight.blocks;
  if (dot.weight.format != PackedFormat::kBytes) {
    float* scratch = ThreadScratch(ScratchSlot::kDigits, m * blocks * (kPackColumns + 3));
    auto* digits = reinterpret_cast<int8_t*>(scratch);
    float* scales = scratch + m * blocks * kPackColumns;
    float* sums = scales + m * blocks;
    auto* offsets = reinterpret_cast<int32_t*>(sums + m * blocks);
    dot.digit_row = blocks * kPackColumns * 4;
    for (int64_t i = 0; i < m; ++i) {
      simd.split_digits(dot.x + i * dot.x_row, blocks, digits + i * dot.digit_row, offsets + i * blocks,
                        scales + i * blocks, sums + i * blocks);
    }
    dot.digits = digits;
    dot.offsets = offsets;
    dot.scales = scales;
    dot.sums = sums;
  }
  const int64_t units = (n + simd.lanes - 1) / simd.lanes;
  // Units are taken in pairs; four tasks a thread even out a disturbed core.
  const int64_t tasks = 4 * backend.threads().num_threads();
  const int64_t step = ((units + tasks - 1) / tasks + 3) / 4 * 4;
  backend.threads().ParallelFor((units + step - 1) / step, [&](int64_t task, int) {
    const int64_t begin = task * step, end = std::min(units, begin + step);
    const int64_t whole = std::min(end, n / simd.lanes);
    PackedDot part = dot;
    part.out = out.f32() + begin * simd.lanes;
    part.out_row = ldc;
    if (whole > begin) simd.packed_dot(part, begin, whole);
    if (end > whole) {
      // The last unit is longer than what is left of out.
      float tail[kPackedDotRows * 16];
      part.out = tail;
      part.out_row = 16;
      simd.packed_dot(part, whole, end);
      for (int64_t i = 0; i < m; ++i) {
        std::copy(tail + i * 16, tail + i * 16 + n - whole * simd.lanes, out.f32() + i * ldc + whole * simd.lanes);
      }
    }
    if (bias) {
      const int64_t first = begin * simd.lanes, last = std::min(n, end * simd.lanes);
      for (int64_t i = 0; i < m; ++i) {
        simd.add(out.f32() + i * ldc + first, bias + first, out.f32() + i * ldc + first, last - first);
      }
    }
  });
}

void GemmWeight(Backend& backend, const Tensor& x, const PanelSource& panels, const float* bias, const Tensor& out) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = x.dim(0), n = out.dim(1), k = x.dim(1), ldc = out.stride(0);
  const int64_t tiles = (n + simd.tile_cols - 1) / simd.tile_cols;
  backend.threads().ParallelRanges(tiles, 2, [&](int64_t begin, int64_t end, int) {
    const int64_t n_begin = begin * simd.tile_cols, n_end = std::min(n, end * simd.tile_cols);
    if (bias) {
      for (int64_t i = 0; i < m; ++i) std::copy(bias + n_begin, bias + n_end, out.f32() + i * ldc + n_begin);
    }
    GemmPanels(simd, m, n_begin, n_end, k, 1.0f, x.f32(), x.stride(0), 1, panels, out.f32(), ldc, bias != nullptr);
  });
}

}  // namespace

void LinearInto(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out) {
  CheckLinear(x, weight, out);
  if (x.dim(0) == 0 || weight.dim(0) == 0) return;
  const float* b = bias.defined() ? bias.f32() : nullptr;
  if (!IsPacked(weight)) {
    if (x.dim(0) <= kDotRows) {
      DotWeightRows(backend, x, weight, b, out);
    } else {
      GemmWeight(backend, x, WeightPanels(weight), b, out);
    }
    return;
  }
  const PackedView view(weight);
  const bool dots = view.dtype == DType::kQ8_0 || SimdOf(backend).int_dot;
  if (x.dim(0) <= kPackedDotRows && view.aligned() && dots) {
    DotPacked(backend, x, view, b, out);
  } else {
    GemmWeight(backend, x, PackedPanels(view), b, out);
  }
}

namespace {

// Rows [begin, end) and columns [k_begin, k_begin + cols) of a weight as float rows; cols covers whole blocks.
void DecodeRows(const SimdTable& simd, const Tensor& weight, int64_t begin, int64_t end, int64_t k_begin, int64_t cols,
                float* out, int64_t out_row) {
  const DType dtype = weight.dtype();
  if (!IsPacked(weight)) {
    const int64_t row_bytes = RowBytes(dtype, weight.dim(1));
    const char* data = static_cast<const char*>(weight.raw()) + RowBytes(dtype, k_begin);
    for (int64_t j = begin; j < end; ++j)
      simd.dequantize(dtype, data + j * row_bytes, cols, out + (j - begin) * out_row);
    return;
  }
  const PackedView view(weight);
  const PackedMatrix matrix = MatrixOf(view);
  std::vector<uint8_t> bytes(static_cast<size_t>(RowBytes(dtype, cols)));
  for (int64_t j = begin; j < end; ++j, out += out_row) {
    if ((view.first_row + j) % kPackRows == 0 && j + kPackRows <= end) {
      simd.unpack_group(matrix, (view.first_row + j) / kPackRows, k_begin / kPackColumns,
                        (k_begin + cols) / kPackColumns, out, out_row);
      j += kPackRows - 1;
      out += (kPackRows - 1) * out_row;
    } else {
      UnpackRow(view, j, k_begin, k_begin + cols, bytes.data());
      simd.dequantize(dtype, bytes.data(), cols, out);
    }
  }
}

}  // namespace

void LinearGradInto(Backend& backend, const Tensor& dout, const Tensor& weight, const Tensor& dx) {
  CheckLinear(dx, weight, dout);
  const SimdTable& simd = SimdOf(backend);
  const int64_t m = dx.dim(0), n = weight.dim(0), k = dx.dim(1);
  if (m == 0 || n == 0 || k == 0) return;
  // A task owns some columns (whole blocks of the weight's type) of some rows of dx. It decodes its columns of `depth`
  // rows of the weight at a time, cuts them into panels one tile wide, and sweeps its rows over each.
  const int64_t width = std::max<int64_t>({BlockElements(weight.dtype()), simd.tile_cols, 32});
  const int64_t column_tasks = (k + width - 1) / width;
  const int64_t row_tasks = (m + kRowBlock - 1) / kRowBlock, row_step = (m + row_tasks - 1) / row_tasks;
  backend.threads().ParallelFor(column_tasks * row_tasks, [&](int64_t task, int) {
    const int64_t k_begin = task % column_tasks * width, cols = std::min(width, k - k_begin);
    const int64_t row_begin = task / column_tasks * row_step, rows = std::min(row_step, m - row_begin);
    float* decoded = ThreadScratch(ScratchSlot::kOperand, kDepthBlock * width);
    float* panel = ThreadScratch(ScratchSlot::kPanel, kDepthBlock * simd.tile_cols);
    for (int64_t n_begin = 0; n_begin < n; n_begin += kDepthBlock) {
      const int64_t depth = std::min(kDepthBlock, n - n_begin);
      DecodeRows(simd, weight, n_begin, n_begin + depth, k_begin, cols, decoded, width);
      for (int64_t at = 0; at < cols; at += simd.tile_cols) {
        const int64_t tile_cols = std::min<int64_t>(simd.tile_cols, cols - at);
        simd.pack_rows(decoded + at, width, tile_cols, depth, panel);
        GemmNN(simd, rows, tile_cols, depth, 1.0f, dout.f32() + row_begin * dout.stride(0) + n_begin, dout.stride(0),
               panel, simd.tile_cols, dx.f32() + row_begin * dx.stride(0) + k_begin + at, dx.stride(0), true);
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

void PrepareWeight(Backend& backend, const PrepareWeightArgs& args) {
  *args.out = CanPack(args.weight) ? Pack(WeightsOf(backend), args.weight) : args.weight;
}

}  // namespace stillhouse::cpu
