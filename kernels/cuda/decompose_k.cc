#include "kernels/ops/decompose_k.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/skinny_launch.h"

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

DecomposeKCut CutOf(DecomposeKDesign design) {
  switch (design) {
    case DecomposeKDesign::kAuto:
      return DecomposeKCut::kAny;
    case DecomposeKDesign::kTwoLaunches:
      return DecomposeKCut::kTwoLaunches;
    case DecomposeKDesign::kCluster:
      return DecomposeKCut::kCluster;
    case DecomposeKDesign::kExchange:
      return DecomposeKCut::kOneLaunch;
  }
  return DecomposeKCut::kAny;
}

// cuBLAS sees row-major matrices as transposed ones. The slices of K, which are equal, are a batch.
void SlicesByLibrary(Backend& backend, const DecomposeKShape& s, const DecomposeKPlan& plan, float* to) {
  const bool b_rows = s.b.stride_outer == 1 && s.b.stride_k >= s.n;
  const int64_t k = s.k / plan.splits;
  Product product{.m = s.n,
                  .n = s.m,
                  .k = k,
                  .a = {s.b.data, b_rows ? s.b.stride_k : s.b.stride_outer, !b_rows, k * s.b.stride_k},
                  .b = {s.a.data, s.a.stride_outer, false, k},
                  .c = to,
                  .ldc = s.n,
                  .c_batch_stride = s.m * s.n,
                  .batch = plan.splits,
                  .bf16 = true};
  product.AskFor(plan);
  RunProduct(backend, product);
}

}  // namespace

DecomposeKKey KeyOf(const DecomposeKShape& s, PlanEpilogue epilogue) {
  DecomposeKKey key;
  key.dtype = s.a.bf16 != s.b.bf16 ? PlanDType::kMixed : s.a.bf16 ? PlanDType::kBf16 : PlanDType::kF32;
  key.m = BucketOf(s.m);
  key.n = s.n;
  key.k = s.k;
  key.layout = s.a.stride_k != 1       ? PlanLayout::kOther
               : s.b.stride_outer == 1 ? PlanLayout::kBRows
               : s.b.stride_k == 1     ? PlanLayout::kBColumns
                                       : PlanLayout::kOther;
  key.epilogue = epilogue;
  return key;
}

namespace {

// The kept plan where there is one that can run it, else the one that its shape suggests.
DecomposeKPlan PlanFor(Backend& backend, const DecomposeKShape& s, bool rows) {
  Device& device = DeviceOf(backend);
  const DecomposeKPlan* const kept = device.plans().Find(KeyOf(s, rows ? PlanEpilogue::kRow : PlanEpilogue::kElement));
  if (kept && CanRun(s, *kept, rows, device.multiprocessors())) return *kept;
  return ChooseDecomposeKPlan(s, device.multiprocessors(), rows, 0, DecomposeKCut::kAny);
}

// cuBLAS by the shape. Sums of few rows take K as a whole, which is faster than what it does when all is left to it;
// or, of a weight with few tiles, in slices, which the norm adds up.
DecomposeKPlan LibraryPlan(const DecomposeKShape& s, PlanEpilogue ending, int multiprocessors) {
  constexpr int64_t kMostRows = 128, kTile = 32, kShortest = 1024;
  if (ending != PlanEpilogue::kScaledRows || s.m > kMostRows) return {DecomposeKWay::kLibrary};
  DecomposeKPlan plan{DecomposeKWay::kLibrary, 32, 64, 1};
  while (2 * plan.splits * s.n <= multiprocessors * kTile && s.k % (16 * plan.splits) == 0 &&
         s.k / (2 * plan.splits) >= kShortest) {
    plan.splits *= 2;
  }
  return plan;
}

}  // namespace

bool LeavesSlices(const DecomposeKPlan& plan) {
  return plan.splits > 1 && (plan.way == DecomposeKWay::kLibrary || SlicesLaunch(plan.way) != nullptr);
}

DecomposeKPlan WayOfLinear(Backend& backend, const DecomposeKShape& s, PlanEpilogue ending) {
  Device& device = DeviceOf(backend);
  const bool few = s.m <= kSkinnyRows;
  const auto find = [&](PlanEpilogue epilogue) -> const DecomposeKPlan* {
    DecomposeKKey key = KeyOf(s, epilogue);
    const DecomposeKPlan* kept = device.plans().Find(key);
    if (kept && kept->way == DecomposeKWay::kSkinny && !few) {
      // The upper part of a bucket that begins with few rows goes as the next one.
      key.m = RowBucket::k33;
      kept = device.plans().Find(key);
    }
    if (!kept) return nullptr;
    const bool runs = kept->way == DecomposeKWay::kSkinny ? few : CanRun(s, *kept, false, device.multiprocessors());
    return runs ? kept : nullptr;
  };
  const DecomposeKPlan* kept = find(ending);
  if (!kept && !few) kept = find(PlanEpilogue::kNone);
  if (kept) return *kept;
  if (few) return {DecomposeKWay::kSkinny};
  const bool slices = ending == PlanEpilogue::kScaledRows;
  DecomposeKPlan wide;
  if ((slices || ending == PlanEpilogue::kGlu) && ChooseWide(s, device.multiprocessors(), slices, &wide)) return wide;
  return LibraryPlan(s, ending, device.multiprocessors());
}

Tensor RunSlices(Backend& backend, const DecomposeKShape& s, const DecomposeKPlan& plan) {
  STILLHOUSE_CHECK(LeavesSlices(plan));
  const Tensor partials = Tensor::Empty(backend.pool(), DType::kF32, {plan.splits, s.m, s.n});
  if (plan.way == DecomposeKWay::kLibrary) {
    SlicesByLibrary(backend, s, plan, partials.f32());
  } else {
    SlicesLaunch(plan.way)(s, plan, partials.f32(), StreamOf(backend));
  }
  return partials;
}

void RunDecomposeK(Backend& backend, const DecomposeKShape& s, const DecomposeKPlan& plan, const DecomposeKRows* rows) {
  const Tensor partials = Tensor::Empty(backend.pool(), DType::kF32, {DecomposeKScratch(s, plan)});
  const bool exchange = plan.way == DecomposeKWay::kExchange;
  if (plan.way == DecomposeKWay::kLibrary) SlicesByLibrary(backend, s, plan, partials.f32());
  LaunchDecomposeK(s, plan, rows, exchange ? static_cast<float*>(DeviceOf(backend).exchange()) : partials.f32(),
                   StreamOf(backend));
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
  shape.out_stride = shape.n;
  shape.constant_b = options.constant_b;
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
  const DecomposeKPlan plan = options.design == DecomposeKDesign::kAuto && options.splits == 0
                                  ? PlanFor(backend, shape, over_rows)
                                  : ChooseDecomposeKPlan(shape, DeviceOf(backend).multiprocessors(), over_rows,
                                                         options.splits, CutOf(options.design));
  RunDecomposeK(backend, shape, plan, over_rows ? &rows : nullptr);
}

}  // namespace stillhouse::cuda
