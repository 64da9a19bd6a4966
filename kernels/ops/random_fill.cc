#include "kernels/ops/random_fill.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

void RandomFill(const Context& ctx, const RandomFillArgs& args) {
  STILLHOUSE_CHECK(args.out.contiguous() && (args.out.dtype() == DType::kF32 || args.out.dtype() == DType::kBF16))
      << args.out.DebugString();
  ctx.kernels().RandomFill(*ctx.backend, args);
}

}  // namespace stillhouse
