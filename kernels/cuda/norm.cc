#include "kernels/ops/norm.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/norm_launch.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {

void RmsNorm(Backend& backend, const RmsNormArgs& args) {
  RmsNormParams params;
  params.x = MakeRows(args.x);
  params.out = MakeRows(args.out);
  params.rows = RowsOf(args.x);
  params.width = WidthOf(args.x);
  params.weight = VectorOf(args.weight, params.width);
  params.eps = args.eps;
  LaunchRmsNorm(params, StreamOf(backend));
}

void RmsNormGrad(Backend& backend, const RmsNormGradArgs& args) {
  if (!args.dx && !args.dweight) return;
  RmsNormGradParams params;
  params.x = MakeRows(args.x);
  params.dout = MakeRows(args.dout);
  params.dx = MakeRows(args.dx);
  params.rows = RowsOf(args.x);
  params.width = WidthOf(args.x);
  params.weight = VectorOf(args.weight, params.width);
  params.eps = args.eps;
  Tensor rstd, partials;
  if (args.dweight) {
    rstd = Tensor::Empty(backend.pool(), DType::kF32, {params.rows});
    partials = Tensor::Empty(backend.pool(), DType::kF32, {RmsNormGradChunks(params.rows), params.width});
    params.rstd = rstd.f32();
  }
  const cudaStream_t stream = StreamOf(backend);
  LaunchRmsNormGrad(params, stream);
  if (args.dweight) {
    LaunchRmsNormWeightGrad(params, partials.f32(), VectorOf(args.dweight, params.width), stream);
  }
}

}  // namespace stillhouse::cuda
