// The CUDA kernels of the ops, as named in ops/op_list.inc: cuda::RmsNorm(Backend&, const RmsNormArgs&), … one .cc per
// ops header. They check shapes (a wrong one is our bug), put their work on the backend's stream and return before it
// is done, unless the contract returns host values. What the table lacks, MissingOps names, and a model that needs it
// does not load on this backend.
#ifndef STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_
#define STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/ops/fused.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/plan/plan_book.h"

namespace stillhouse::cuda {

#define STILLHOUSE_OP(Name) void Name(Backend& backend, const Name##Args& args);
#define STILLHOUSE_OP_GRAD(Name)                       \
  void Name(Backend& backend, const Name##Args& args); \
  void Name##Grad(Backend& backend, const Name##GradArgs& args);
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD

const KernelTable& Kernels();
const FusedKernels& Fused();

// The fused ops (ops/fused.h).
void NormLinear(Backend& backend, const NormLinearArgs& args);
void LinearAdd(Backend& backend, const LinearAddArgs& args);
void NormSwiGlu(Backend& backend, const NormSwiGluArgs& args);
void RopeAngles(Backend& backend, const RopeAnglesArgs& args);
void QkvRope(Backend& backend, const QkvRopeArgs& args);
void PlanAttentionStep(Backend& backend, const PlanAttentionStepArgs& args);
void AttentionStepTables(Backend& backend, const AttentionStepTablesArgs& args);
void AttentionOfStep(Backend& backend, const AttentionOfStepArgs& args);
void PackDraws(const PackDrawsArgs& args);
void Draw(Backend& backend, const DrawArgs& args);
void UnpackDraws(const UnpackDrawsArgs& args);

// The body of Linear, for kernels that work on chunks of an output projection (fused losses): out = x · weightᵀ + bias;
// with `add` (and no bias) out += …. x is f32, or bf16 where IsBf16Product; so is out, where neither is added.
// `ending`: what follows, by launches of its own.
void LinearInto(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out,
                bool add = false, PlanEpilogue ending = PlanEpilogue::kNone);
// The product of rows (bf16) with such a weight, as WayOfLinear takes it; where it goes is left to be said.
DecomposeKShape LinearShape(const Tensor& x, const Tensor& weight);
// Whether products with this weight take bf16 operands: weights stored so, where the backend stores weights so.
bool IsBf16Product(Backend& backend, const Tensor& weight);
// dx += dout · weight, likewise.
void LinearGradInto(Backend& backend, const Tensor& dout, const Tensor& weight, const Tensor& dx);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_CUDA_KERNELS_H_
