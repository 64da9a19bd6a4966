#include "kernels/ops/optimizer.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

void AdamW(const Context& ctx, const AdamWArgs& args) { ctx.kernels().AdamW(*ctx.backend, args); }

void SumSquares(const Context& ctx, const SumSquaresArgs& args) { ctx.kernels().SumSquares(*ctx.backend, args); }

}  // namespace stillhouse
