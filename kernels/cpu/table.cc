#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

const KernelTable& Kernels() {
  static const KernelTable table = [] {
    KernelTable t;
#define STILLHOUSE_OP(Name) t.Name = Name;
#define STILLHOUSE_OP_GRAD(Name) \
  t.Name = Name;                 \
  t.Name##Grad = Name##Grad;
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
    return t;
  }();
  return table;
}

}  // namespace stillhouse::cpu
