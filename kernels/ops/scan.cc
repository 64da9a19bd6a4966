#include "kernels/ops/scan.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

Tensor Scan(const Context& ctx, const Tensor& in, const ScanOptions& options, const Tensor& heads) {
  STILLHOUSE_CHECK(in.dtype() == DType::kF32 || in.dtype() == DType::kI32 || in.dtype() == DType::kI64)
      << in.DebugString();
  STILLHOUSE_CHECK((in.rank() == 1 || in.rank() == 2) && (in.dim(-1) <= 1 || in.stride(-1) == 1)) << in.DebugString();
  if (heads) {
    STILLHOUSE_CHECK(heads.dtype() == DType::kU8 && heads.shape() == in.shape() && heads.contiguous())
        << heads.DebugString() << " for " << in.DebugString();
  }
  const bool look_back =
      options.algorithm == ScanAlgorithm::kLookBack || options.algorithm == ScanAlgorithm::kLookBackWindow;
  STILLHOUSE_CHECK(!look_back || !options.deterministic || in.dtype() != DType::kF32)
      << "a look-back scan of floats does not repeat its bits";
  Tensor out = ctx.Empty(in.dtype(), in.shape());
  if (in.elements() > 0) ctx.kernels().Scan(*ctx.backend, {in, heads, out, options});
  return out;
}

}  // namespace stillhouse
