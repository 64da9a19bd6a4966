#include "kernels/ops/kernel_table.h"

namespace stillhouse {

std::vector<std::string> MissingOps(const KernelTable& table) {
  std::vector<std::string> missing;
#define STILLHOUSE_OP(Name) \
  if (!table.Name) missing.emplace_back(#Name);
#define STILLHOUSE_OP_GRAD(Name)                \
  if (!table.Name) missing.emplace_back(#Name); \
  if (!table.Name##Grad) missing.emplace_back(#Name "Grad");
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
  return missing;
}

}  // namespace stillhouse
