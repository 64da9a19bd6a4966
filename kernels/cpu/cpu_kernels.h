// The CPU kernels of every op, as named in ops/op_list.inc: cpu::RmsNorm(Backend&, const RmsNormArgs&), … one .cc per
// ops header. They check shapes (a wrong one is our bug), run on the backend's threads, and return when done.
#ifndef STILLHOUSE_KERNELS_CPU_CPU_KERNELS_H_
#define STILLHOUSE_KERNELS_CPU_CPU_KERNELS_H_

#include "kernels/cpu/packed_weight.h"
#include "kernels/cpu/simd.h"
#include "kernels/ops/kernel_table.h"

namespace stillhouse::cpu {

#define STILLHOUSE_OP(Name) void Name(Backend& backend, const Name##Args& args);
#define STILLHOUSE_OP_GRAD(Name)                       \
  void Name(Backend& backend, const Name##Args& args); \
  void Name##Grad(Backend& backend, const Name##GradArgs& args);
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD

const KernelTable& Kernels();

// Where a CPU backend keeps prepared weights.
WeightArena& WeightsOf(Backend& backend);

// The body of Linear, for kernels that work on chunks of an output projection (fused losses): out = x · weightᵀ + bias.
// Starts a parallel loop of its own, so not to be called inside one.
void LinearInto(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& out);
// dx += dout · weight, likewise.
void LinearGradInto(Backend& backend, const Tensor& dout, const Tensor& weight, const Tensor& dx);

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_CPU_KERNELS_H_
