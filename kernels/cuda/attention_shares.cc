#include "kernels/ops/attention_shares.h"

#include "kernels/cuda/attention_shares_launch.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {

void AttentionShares(Backend& backend, const AttentionSharesArgs& args) {
  SharesParams params;
  params.rows = args.z.dim(0);
  params.n = args.z.dim(1);
  if (params.rows == 0 || params.n == 0) return;
  CheckMatrix(args.z, params.rows, params.n);
  params.z = args.z.f32();
  params.stride = args.z.stride(0);
  params.column_bias = VectorOf(args.column_bias, params.n);
  params.reference = VectorOf(args.reference, params.rows);
  params.most = kMostAttentionShare;
  params.own = VectorOf(args.own, params.rows);
  params.columns = VectorOf(args.columns, params.n);
  params.power = args.power;
  Tensor partial;
  if (params.columns) {
    partial = Tensor::Empty(backend.pool(), DType::kF32, {ColumnRuns(params.rows), params.n});
    params.partial = partial.f32();
  }
  LaunchShares(params, StreamOf(backend));
}

}  // namespace stillhouse::cuda
