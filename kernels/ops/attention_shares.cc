#include "kernels/ops/attention_shares.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

void AttentionShares(const Context& ctx, const AttentionSharesArgs& args) {
  STILLHOUSE_CHECK(args.z.dtype() == DType::kF32 && args.z.rank() == 2 && (args.z.dim(1) <= 1 || args.z.stride(1) == 1))
      << args.z.DebugString();
  STILLHOUSE_CHECK(args.power == 1 || args.power == 2) << "power " << args.power;
  auto vector = [](const Tensor& t, int64_t size) {
    return !t.defined() || (t.dtype() == DType::kF32 && t.rank() == 1 && t.contiguous() && t.dim(0) == size);
  };
  STILLHOUSE_CHECK(vector(args.column_bias, args.z.dim(1)) && vector(args.columns, args.z.dim(1)))
      << args.column_bias.DebugString() << " and " << args.columns.DebugString() << " for " << args.z.DebugString();
  STILLHOUSE_CHECK(vector(args.reference, args.z.dim(0)) && vector(args.own, args.z.dim(0)))
      << args.reference.DebugString() << " and " << args.own.DebugString() << " for " << args.z.DebugString();
  ctx.kernels().AttentionShares(*ctx.backend, args);
}

}  // namespace stillhouse
