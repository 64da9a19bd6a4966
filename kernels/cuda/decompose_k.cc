#include "kernels/ops/decompose_k.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_launch.h"

namespace stillhouse::cuda {
namespace {

Operand OperandOf(const Tensor& t, int outer, int k) {
  Operand operand;
  operand.data = t.raw();
  operand.bf16 = t.dtype() == DType::kBF16;
  operand.stride_outer = t.stride(outer);
  operand.stride_k = t.stride(k);
  return operand;
}

ElementOp ElementOpOf(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kRelu:
      return ElementOp::kRelu;
    case Epilogue::kSilu:
      return ElementOp::kSilu;
    case Epilogue::kSigmoid:
      return ElementOp::kSigmoid;
    case Epilogue::kScaleBias:
      return ElementOp::kScaleBias;
    default:
      return ElementOp::kNone;
  }
}

// The product of bf16 operands with fp32 sums. cuBLAS sees row-major matrices as transposed ones.
void ProductByLibrary(Backend& backend, const DecomposeKShape& s, float* to) {
  const bool b_rows = s.b.stride_outer == 1 && s.b.stride_k >= s.n;
  DeviceOf(backend).WithCublas([&](cublasHandle_t handle) {
    const float one = 1.0f, zero = 0.0f;
    STILLHOUSE_CUBLAS_CHECK(cublasGemmEx_64(handle, b_rows ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, s.n, s.m, s.k,
                                            &one, s.b.data, CUDA_R_16BF, b_rows ? s.b.stride_k : s.b.stride_outer,
                                            s.a.data, CUDA_R_16BF, s.a.stride_outer, &zero, to, CUDA_R_32F, s.n,
                                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  });
}

}  // namespace

void DecomposeK(Backend& backend, const DecomposeKArgs& args) {
  const DecomposeKOptions& options = args.options;
  DecomposeKShape shape;
  shape.a = OperandOf(args.a, 0, 1);
  shape.b = OperandOf(args.b, 1, 0);
  shape.m = args.a.dim(0);
  shape.k = args.a.dim(1);
  shape.n = args.b.dim(1);
  shape.op = ElementOpOf(options.epilogue);
  shape.scale = options.scale;
  if (args.bias) shape.bias = args.bias.f32();
  if (args.out) shape.out = args.out.f32();
  DecomposeKRows rows;
  if (OverRows(options.epilogue)) {
    rows.op = options.epilogue == Epilogue::kSoftmax ? RowOp::kSoftmax
              : options.epilogue == Epilogue::kTopK  ? RowOp::kTopK
                                                     : RowOp::kSinkhorn;
    rows.sinkhorn_n = options.sinkhorn_n;
    rows.sinkhorn_rounds = options.sinkhorn_rounds;
    rows.sinkhorn_eps = options.sinkhorn_eps;
    if (options.epilogue == Epilogue::kTopK) {
      rows.top_k = options.top_k;
      rows.top_values = args.top_values.f32();
      rows.top_ids = args.top_ids.i32();
    }
  }
  const bool over_rows = OverRows(options.epilogue);
  const DecomposeKPlan plan =
      ChooseDecomposeKPlan(shape, DeviceOf(backend).multiprocessors(), over_rows, options.splits,
                           options.design == DecomposeKDesign::kAuto          ? 0
                           : options.design == DecomposeKDesign::kTwoLaunches ? 1
                                                                              : 2);
  const Tensor partials = Tensor::Empty(backend.pool(), DType::kF32, {DecomposeKScratch(shape, plan)});
  if (plan.library) ProductByLibrary(backend, shape, partials.f32());
  LaunchDecomposeK(shape, plan, over_rows ? &rows : nullptr, partials.f32(), StreamOf(backend));
}

}  // namespace stillhouse::cuda
