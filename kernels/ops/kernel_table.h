// The kernels of one backend, one pointer per op of op_list.inc. A null pointer is an op that the backend lacks: models
// that need it fail at load, naming it.
#ifndef STILLHOUSE_KERNELS_OPS_KERNEL_TABLE_H_
#define STILLHOUSE_KERNELS_OPS_KERNEL_TABLE_H_

#include <string>
#include <vector>

#include "kernels/ops/context.h"

namespace stillhouse {

#define STILLHOUSE_OP(Name) struct Name##Args;
#define STILLHOUSE_OP_GRAD(Name) \
  struct Name##Args;             \
  struct Name##GradArgs;
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD

struct KernelTable {
#define STILLHOUSE_OP(Name) void (*Name)(Backend&, const Name##Args&) = nullptr;
#define STILLHOUSE_OP_GRAD(Name)                       \
  void (*Name)(Backend&, const Name##Args&) = nullptr; \
  void (*Name##Grad)(Backend&, const Name##GradArgs&) = nullptr;
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
};

// Names of the ops (and gradients, as "NameGrad") that the table lacks, in the order of the list.
std::vector<std::string> MissingOps(const KernelTable& table);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_KERNEL_TABLE_H_
