#include "kernels/ops/decompose_k.h"

#include <map>
#include <mutex>
#include <string>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/plan/plans_in_use.h"

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

// As the driver names it. Asked for once: the answer takes longer than a small product.
const std::string& GpuName(int ordinal) {
  static std::mutex mutex;
  static auto* const names = new std::map<int, std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  auto [it, fresh] = names->try_emplace(ordinal);
  if (fresh) {
    cudaDeviceProp properties;
    STILLHOUSE_CUDA_CHECK(cudaGetDeviceProperties(&properties, ordinal));
    it->second = properties.name;
  }
  return it->second;
}

}  // namespace

// cuBLAS sees row-major matrices as transposed ones.
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

DecomposeKKey KeyOf(Backend& backend, const DecomposeKShape& s, bool rows) {
  DecomposeKKey key;
  key.gpu = GpuName(DeviceOf(backend).ordinal());
  key.dtype = s.a.bf16 != s.b.bf16 ? PlanDType::kMixed : s.a.bf16 ? PlanDType::kBf16 : PlanDType::kF32;
  key.m = BucketOf(s.m);
  key.n = s.n;
  key.k = s.k;
  key.layout = s.a.stride_k != 1       ? PlanLayout::kOther
               : s.b.stride_outer == 1 ? PlanLayout::kBRows
               : s.b.stride_k == 1     ? PlanLayout::kBColumns
                                       : PlanLayout::kOther;
  key.epilogue = rows ? PlanEpilogue::kRow : PlanEpilogue::kElement;
  return key;
}

DecomposeKPlan PlanFor(Backend& backend, const DecomposeKShape& s, bool rows) {
  const auto kept = PlansInUse().Find(KeyOf(backend, s, rows));
  if (kept && CanRun(s, *kept, rows)) return *kept;
  return ChooseDecomposeKPlan(s, DeviceOf(backend).multiprocessors(), rows, 0, 0);
}

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
  const int design = options.design == DecomposeKDesign::kAuto          ? 0
                     : options.design == DecomposeKDesign::kTwoLaunches ? 1
                                                                        : 2;
  const DecomposeKPlan plan =
      design == 0 && options.splits == 0
          ? PlanFor(backend, shape, over_rows)
          : ChooseDecomposeKPlan(shape, DeviceOf(backend).multiprocessors(), over_rows, options.splits, design);
  const Tensor partials = Tensor::Empty(backend.pool(), DType::kF32, {DecomposeKScratch(shape, plan)});
  if (plan.way == DecomposeKWay::kLibrary) ProductByLibrary(backend, shape, partials.f32());
  LaunchDecomposeK(shape, plan, over_rows ? &rows : nullptr, partials.f32(), StreamOf(backend));
}

}  // namespace stillhouse::cuda
