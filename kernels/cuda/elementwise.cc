#include "kernels/ops/elementwise.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elementwise_launch.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {
namespace {

Matrix MatrixOf(const Tensor& t, int64_t rows, int64_t width) {
  if (!t) return {};
  CheckMatrix(t, rows, width);
  return {t.f32(), t.stride(0)};
}

}  // namespace

void SwiGlu(Backend& backend, const SwiGluArgs& args) {
  SwiGluParams params;
  params.rows = args.out.dim(0);
  params.width = args.out.dim(1);
  params.gate = MatrixOf(args.gate, params.rows, params.width);
  params.up = MatrixOf(args.up, params.rows, params.width);
  params.out = MatrixOf(args.out, params.rows, params.width);
  LaunchSwiGlu(params, StreamOf(backend));
}

void SwiGluGrad(Backend& backend, const SwiGluGradArgs& args) {
  SwiGluGradParams params;
  params.rows = args.dout.dim(0);
  params.width = args.dout.dim(1);
  params.gate = MatrixOf(args.gate, params.rows, params.width);
  params.up = MatrixOf(args.up, params.rows, params.width);
  params.dout = MatrixOf(args.dout, params.rows, params.width);
  params.dgate = MatrixOf(args.dgate, params.rows, params.width);
  params.dup = MatrixOf(args.dup, params.rows, params.width);
  LaunchSwiGluGrad(params, StreamOf(backend));
}

void Add(Backend& backend, const AddArgs& args) {
  STILLHOUSE_CHECK(args.a.shape() == args.b.shape() && args.a.shape() == args.out.shape())
      << args.a.DebugString() << " + " << args.b.DebugString();
  STILLHOUSE_CHECK(args.a.contiguous() && args.b.contiguous() && args.out.contiguous());
  LaunchAdd(args.a.f32(), args.b.f32(), args.out.f32(), args.out.elements(), StreamOf(backend));
}

void AddGrad(Backend& backend, const AddGradArgs& args) {
  for (const Tensor* grad : {&args.da, &args.db}) {
    if (!*grad) continue;
    STILLHOUSE_CHECK(grad->contiguous() && args.dout.contiguous() && grad->elements() == args.dout.elements());
    LaunchAdd(grad->f32(), args.dout.f32(), grad->f32(), args.dout.elements(), StreamOf(backend));
  }
}

void CopyRows(Backend& backend, const CopyRowsArgs& args) {
  CopyRowsParams params;
  params.rows = args.row_count;
  params.heads = args.from.dim(1);
  params.width = args.from.dim(2);
  STILLHOUSE_CHECK(args.to.dim(0) == params.heads && args.to.dim(2) == params.width);
  STILLHOUSE_CHECK(0 <= args.row_begin && args.row_begin + args.row_count <= args.from.dim(0));
  STILLHOUSE_CHECK(0 <= args.slot_begin && args.slot_begin + args.row_count <= args.to.dim(1));
  STILLHOUSE_CHECK(params.width <= 1 || (args.from.stride(2) == 1 && args.to.stride(2) == 1));
  for (const Tensor* t : {&args.from, &args.to}) {
    STILLHOUSE_CHECK(t->dtype() == DType::kF32 || t->dtype() == DType::kBF16) << t->DebugString();
  }
  params.from_bf16 = args.from.dtype() == DType::kBF16;
  params.to_bf16 = args.to.dtype() == DType::kBF16;
  params.from =
      static_cast<const char*>(args.from.raw()) + args.row_begin * args.from.stride(0) * BlockBytes(args.from.dtype());
  params.to = static_cast<char*>(args.to.raw()) + args.slot_begin * args.to.stride(1) * BlockBytes(args.to.dtype());
  params.from_row = args.from.stride(0);
  params.from_head = args.from.stride(1);
  params.to_head = args.to.stride(0);
  params.to_slot = args.to.stride(1);
  LaunchCopyRows(params, StreamOf(backend));
}

}  // namespace stillhouse::cuda
