#include "kernels/ops/decompose_k.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

constexpr int64_t kMaxRowEpilogue = 1024;
constexpr int32_t kMaxTopK = 64;

void Check(const DecomposeKArgs& args) {
  for (const Tensor& t : {args.a, args.b}) {
    STILLHOUSE_CHECK(t.rank() == 2 && (t.dtype() == DType::kF32 || t.dtype() == DType::kBF16)) << t.DebugString();
  }
  STILLHOUSE_CHECK_EQ(args.a.dim(1), args.b.dim(0));
  const DecomposeKOptions& options = args.options;
  const int64_t n = args.b.dim(1);
  if (OverRows(options.epilogue)) {
    STILLHOUSE_CHECK(n <= kMaxRowEpilogue) << n << " columns";
    const bool one_launch =
        options.design == DecomposeKDesign::kCluster || options.design == DecomposeKDesign::kExchange;
    STILLHOUSE_CHECK(!one_launch) << "an epilogue over rows takes two launches";
  }
  if (options.epilogue == Epilogue::kTopK) {
    STILLHOUSE_CHECK(options.top_k > 0 && options.top_k <= kMaxTopK && options.top_k <= n) << options.top_k;
  }
  if (options.epilogue == Epilogue::kSinkhorn) {
    const int64_t size = options.sinkhorn_n;
    STILLHOUSE_CHECK(size > 0 && size * size <= n && options.sinkhorn_rounds >= 0) << size << " in " << n;
  }
  if (args.bias) {
    STILLHOUSE_CHECK(args.bias.dtype() == DType::kF32 && args.bias.rank() == 1 && args.bias.contiguous() &&
                     args.bias.dim(0) == n)
        << args.bias.DebugString();
  }
  STILLHOUSE_CHECK(options.epilogue == Epilogue::kScaleBias || !args.bias) << "a bias goes with kScaleBias";
}

}  // namespace

Tensor DecomposeK(const Context& ctx, const Tensor& a, const Tensor& b, const DecomposeKOptions& options,
                  const Tensor& bias) {
  STILLHOUSE_CHECK(options.epilogue != Epilogue::kTopK) << "DecomposeKTopK gives a row's best";
  DecomposeKArgs args{a, b, bias, Tensor(), Tensor(), Tensor(), options};
  Check(args);
  args.out = ctx.EmptyF32({a.dim(0), b.dim(1)});
  if (args.out.elements() > 0) ctx.kernels().DecomposeK(*ctx.backend, args);
  return args.out;
}

TopKOfRows DecomposeKTopK(const Context& ctx, const Tensor& a, const Tensor& b, int32_t k) {
  DecomposeKArgs args{a, b};
  args.options.epilogue = Epilogue::kTopK;
  args.options.top_k = k;
  Check(args);
  args.top_values = ctx.EmptyF32({a.dim(0), k});
  args.top_ids = ctx.Empty(DType::kI32, {a.dim(0), k});
  if (a.dim(0) > 0) ctx.kernels().DecomposeK(*ctx.backend, args);
  return {args.top_values, args.top_ids};
}

}  // namespace stillhouse
