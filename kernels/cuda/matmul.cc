#include "kernels/ops/matmul.h"

#include <algorithm>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/matmul_launch.h"
#include "kernels/cuda/quant_launch.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/skinny.h"

namespace stillhouse::cuda {

namespace {

// Distance of rows; a single row may carry any stride.
int64_t RowStride(const Tensor& t) { return t.dim(0) > 1 ? t.stride(0) : std::max<int64_t>(t.dim(1), 1); }

void CheckLinear(const Tensor& x, const Tensor& weight, const Tensor& out) {
  STILLHOUSE_CHECK(weight.rank() == 2 && weight.contiguous() && weight.device() == DeviceType::kCuda)
      << weight.DebugString();
  CheckMatrix(x, x.dim(0), weight.dim(1));
  CheckMatrix(out, x.dim(0), weight.dim(0));
}

// Floats of a decoded chunk of a weight that was not prepared.
constexpr int64_t kChunkFloats = int64_t{16} << 20;

// Calls body(first row, rows, their data) for a weight's rows in the type of the product: all at once where they are
// stored so, else in decoded chunks.
template <typename Body>
void ForWeightRows(Backend& backend, const Tensor& weight, bool bf16, const Body& body) {
  if (weight.dtype() == DType::kF32 || bf16) {
    body(int64_t{0}, weight.dim(0), weight.raw());
    return;
  }
  const int64_t n = weight.dim(0), k = weight.dim(1);
  const int64_t rows = std::clamp<int64_t>(kChunkFloats / std::max<int64_t>(k, 1), 1, n);
  const Tensor decoded = Tensor::Empty(backend.pool(), DType::kF32, {rows, k});
  for (int64_t begin = 0; begin < n; begin += rows) {
    DecodeParams params;
    params.dtype = weight.dtype();
    params.in = static_cast<const char*>(weight.raw()) + begin * RowBytes(weight.dtype(), k);
    params.rows = params.in_rows = std::min(rows, n - begin);
    params.width = params.out_stride = k;
    params.out = decoded.f32();
    LaunchDecode(params, StreamOf(backend));
    body(begin, params.rows, decoded.raw());
  }
}

// Rows in the type of the product; `rounded` keeps the scratch alive.
MatrixOperand RowsOperand(Backend& backend, const Tensor& t, bool bf16, Tensor* rounded) {
  if (!bf16 || t.dtype() == DType::kBF16) return {t.raw(), RowStride(t)};
  *rounded = Tensor::Empty(backend.pool(), DType::kBF16, {t.dim(0), t.dim(1)});
  LaunchRoundRows(t.f32(), RowStride(t), t.dim(0), t.dim(1), rounded->raw(), StreamOf(backend));
  return {rounded->raw(), std::max<int64_t>(t.dim(1), 1)};
}

}  // namespace

// bf16 weights are multiplied as such only where the backend stores weights so: elsewhere products are exact in fp32.
bool IsBf16Product(Backend& backend, const Tensor& weight) {
  return weight.dtype() == DType::kBF16 && DeviceOf(backend).storage() == CudaStorage::kBf16;
}

DecomposeKShape LinearShape(const Tensor& x, const Tensor& weight) {
  DecomposeKShape s;
  s.a = {x.raw(), x.dtype() == DType::kBF16, RowStride(x), 1};
  s.b = {weight.raw(), weight.dtype() == DType::kBF16, weight.dim(1), 1};
  s.m = x.dim(0);
  s.n = weight.dim(0);
  s.k = x.dim(1);
  s.constant_b = true;
  return s;
}

void LinearInto(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out,
                bool add, PlanEpilogue ending) {
  CheckLinear(x, weight, out);
  STILLHOUSE_CHECK(!add || !bias);
  const int64_t m = x.dim(0), n = weight.dim(0), k = x.dim(1);
  if (m == 0 || n == 0) return;
  if (k == 0) {
    STILLHOUSE_CHECK(out.dtype() == DType::kF32) << out.DebugString();
    if (!add) LaunchFillRows(out.f32(), RowStride(out), VectorOf(bias, n), m, n, StreamOf(backend));
    return;
  }
  const bool bf16 = IsBf16Product(backend, weight), out_bf16 = out.dtype() == DType::kBF16;
  STILLHOUSE_CHECK(bf16 || x.dtype() == DType::kF32) << x.DebugString();
  STILLHOUSE_CHECK(out_bf16 ? bf16 && !bias && !add : out.dtype() == DType::kF32) << out.DebugString();
  Tensor rounded;
  const MatrixOperand rows = RowsOperand(backend, x, bf16, &rounded);
  DecomposeKPlan way{DecomposeKWay::kLibrary};
  if (bf16) {
    DecomposeKShape shape = LinearShape(rounded ? rounded : x, weight);
    way = WayOfLinear(backend, shape, ending);
    if (out_bf16 && (way.way != DecomposeKWay::kLibrary || way.splits > 1)) way = {DecomposeKWay::kLibrary};
    if (way.way != DecomposeKWay::kSkinny && (way.way != DecomposeKWay::kLibrary || way.splits > 1)) {
      shape.op = bias ? ElementOp::kScaleBias : ElementOp::kNone;
      shape.bias = VectorOf(bias, n);
      shape.out = out.f32();
      shape.out_stride = RowStride(out);
      shape.add = add;
      return RunDecomposeK(backend, shape, way, nullptr);
    }
  }
  if (bias) LaunchFillRows(out.f32(), RowStride(out), VectorOf(bias, n), m, n, StreamOf(backend));
  if (way.way == DecomposeKWay::kSkinny) {
    SkinnyParams p = SkinnyOf(backend, rounded ? rounded : x, weight);
    p.out = out.f32();
    p.out_stride = RowStride(out);
    p.add = bias || add;
    if (RunSkinny(backend, p)) return;
  }
  ForWeightRows(backend, weight, bf16, [&](int64_t begin, int64_t count, const void* data) {
    Product product{.m = count,
                    .n = m,
                    .k = k,
                    .a = {data, k, true},
                    .b = rows,
                    .c = static_cast<char*>(out.raw()) + begin * BlockBytes(out.dtype()),
                    .ldc = RowStride(out),
                    .beta = bias || add ? 1.0f : 0.0f,
                    .bf16 = bf16,
                    .c_bf16 = out_bf16};
    product.AskFor(way);
    RunProduct(backend, product);
  });
}

void LinearGradInto(Backend& backend, const Tensor& dout, const Tensor& weight, const Tensor& dx) {
  CheckLinear(dx, weight, dout);
  const int64_t m = dx.dim(0), n = weight.dim(0), k = dx.dim(1);
  if (m == 0 || n == 0 || k == 0) return;
  const bool bf16 = IsBf16Product(backend, weight);
  Tensor rounded;
  const MatrixOperand rows = RowsOperand(backend, dout, bf16, &rounded);
  const int64_t element = bf16 ? 2 : 4;
  ForWeightRows(backend, weight, bf16, [&](int64_t begin, int64_t count, const void* data) {
    MatrixOperand part = rows;
    part.data = static_cast<const char*>(rows.data) + begin * element;
    RunProduct(backend, {.m = k,
                         .n = m,
                         .k = count,
                         .a = {data, k},
                         .b = part,
                         .c = dx.f32(),
                         .ldc = RowStride(dx),
                         .beta = 1.0f,
                         .bf16 = bf16});
  });
}

void Linear(Backend& backend, const LinearArgs& args) { LinearInto(backend, args.x, args.weight, args.bias, args.out); }

void LinearGrad(Backend& backend, const LinearGradArgs& args) {
  const int64_t m = args.dout.dim(0), n = args.dout.dim(1);
  if (args.dx) LinearGradInto(backend, args.dout, args.weight, args.dx);
  if (args.dweight) {
    STILLHOUSE_CHECK(args.weight.dtype() == DType::kF32) << args.weight.DebugString();
    const int64_t k = args.x.dim(1);
    CheckMatrix(args.x, m, k);
    CheckMatrix(args.dweight, n, k);
    if (m > 0 && n > 0 && k > 0) {
      RunProduct(backend, {.m = k,
                           .n = n,
                           .k = m,
                           .a = {args.x.raw(), RowStride(args.x)},
                           .b = {args.dout.raw(), RowStride(args.dout), true},
                           .c = args.dweight.f32(),
                           .ldc = RowStride(args.dweight),
                           .beta = 1.0f});
    }
  }
  if (args.dbias) {
    LaunchColumnSums(args.dout.f32(), RowStride(args.dout), m, n, VectorOf(args.dbias, n), StreamOf(backend));
  }
}

namespace {

// The last two dimensions of a tensor as a column-major operand of the product Cᵀ = Bᵀ·Aᵀ; one of them must be
// contiguous (others are copied to scratch first).
MatrixOperand OperandOf(Backend& backend, const Tensor& t, Tensor* copy) {
  const Tensor* source = &t;
  const bool row_major = t.dim(-1) <= 1 || t.stride(-1) == 1, col_major = t.dim(-2) <= 1 || t.stride(-2) == 1;
  if (!row_major && !col_major) {
    *copy = Tensor::Empty(backend.pool(), DType::kF32, t.shape());
    backend.Copy(t, *copy);
    source = copy;
  }
  MatrixOperand operand;
  operand.data = source->raw();
  operand.batch_stride = source->rank() == 3 ? source->stride(0) : 0;
  operand.transposed = !(source->dim(-1) <= 1 || source->stride(-1) == 1);
  const int64_t width = operand.transposed ? source->dim(-2) : source->dim(-1);
  const int64_t count = operand.transposed ? source->dim(-1) : source->dim(-2);
  operand.ld = std::max<int64_t>(width, 1);
  if (count > 1) operand.ld = operand.transposed ? source->stride(-1) : source->stride(-2);
  return operand;
}

}  // namespace

void MatMul(Backend& backend, const MatMulArgs& args) {
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
  const int64_t ldc = m > 1 ? c.stride(-2) : std::max<int64_t>(n, 1);
  const int64_t c_batch = c.rank() == 3 ? c.stride(0) : 0;
  if (k == 0) {
    for (int64_t i = 0; i < batch && !args.accumulate; ++i) {
      LaunchFillRows(c.f32() + i * c_batch, ldc, nullptr, m, n, StreamOf(backend));
    }
    return;
  }
  Tensor a_copy, b_copy;
  // Column-major cuBLAS computes Cᵀ [n, m] = Bᵀ · Aᵀ: a row-major B is Bᵀ as it lies.
  Product product{.m = n,
                  .n = m,
                  .k = k,
                  .a = OperandOf(backend, b, &b_copy),
                  .b = OperandOf(backend, a, &a_copy),
                  .c = c.f32(),
                  .ldc = ldc,
                  .c_batch_stride = c_batch,
                  .batch = batch,
                  .alpha = args.alpha,
                  .beta = args.accumulate ? 1.0f : 0.0f};
  RunProduct(backend, product);
}

void PrepareWeight(Backend& backend, const PrepareWeightArgs& args) {
  const Tensor& weight = args.weight;
  const bool to_bf16 = DeviceOf(backend).storage() == CudaStorage::kBf16;
  const DType stored = to_bf16 ? DType::kBF16 : DType::kF32;
  STILLHOUSE_CHECK(weight.rank() == 2 && weight.contiguous()) << weight.DebugString();
  Tensor device = weight;
  if (weight.device() != DeviceType::kCuda) {
    device = Tensor::Empty(backend.pool(), weight.dtype(), weight.shape());
    backend.Upload(weight.raw(), device);
  }
  if (weight.dtype() == stored) {
    *args.out = device;
    return;
  }
  *args.out = Tensor::Empty(backend.pool(), stored, weight.shape());
  DecodeParams params;
  params.dtype = weight.dtype();
  params.in = device.raw();
  params.rows = params.in_rows = weight.dim(0);
  params.width = params.out_stride = weight.dim(1);
  params.out = args.out->raw();
  params.to_bf16 = to_bf16;
  LaunchDecode(params, StreamOf(backend));
}

}  // namespace stillhouse::cuda
