#include "kernels/ops/gather.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/gather_launch.h"
#include "kernels/cuda/quant_launch.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {

void Embedding(Backend& backend, const EmbeddingArgs& args) {
  const int64_t count = args.ids.elements(), width = args.table.dim(1);
  STILLHOUSE_CHECK(args.table.contiguous() && args.ids.contiguous());
  CheckMatrix(args.out, count, width);
  DecodeParams params;
  params.dtype = args.table.dtype();
  params.in = args.table.raw();
  params.in_rows = args.table.dim(0);
  params.ids = args.ids.i32();
  params.rows = count;
  params.width = width;
  params.out = args.out.f32();
  params.out_stride = args.out.stride(0);
  LaunchDecode(params, StreamOf(backend));
}

void EmbeddingGrad(Backend& backend, const EmbeddingGradArgs& args) {
  ScatterParams params;
  params.count = args.ids.elements();
  params.width = args.dout.dim(1);
  CheckMatrix(args.dout, params.count, params.width);
  STILLHOUSE_CHECK(args.dtable.dim(1) == params.width && args.ids.contiguous());
  params.ids = args.ids.i32();
  params.dout = args.dout.f32();
  params.dout_stride = args.dout.stride(0);
  params.to = args.dtable.f32();
  params.to_stride = args.dtable.stride(0);
  LaunchScatterAdd(params, StreamOf(backend));
}

void GatherRows(Backend& backend, const GatherRowsArgs& args) {
  GatherParams params;
  params.count = args.rows.elements();
  params.width = args.x.dim(1);
  CheckMatrix(args.x, args.x.dim(0), params.width);
  CheckMatrix(args.out, params.count, params.width);
  STILLHOUSE_CHECK(args.rows.contiguous());
  params.table = args.x.f32();
  params.table_rows = args.x.dim(0);
  params.table_stride = args.x.stride(0);
  params.ids = args.rows.i32();
  params.out = args.out.f32();
  params.out_stride = args.out.stride(0);
  LaunchGather(params, StreamOf(backend));
}

void GatherRowsGrad(Backend& backend, const GatherRowsGradArgs& args) {
  ScatterParams params;
  params.count = args.rows.elements();
  params.width = args.dx.dim(1);
  CheckMatrix(args.dout, params.count, params.width);
  CheckMatrix(args.dx, args.dx.dim(0), params.width);
  params.ids = args.rows.i32();
  params.dout = args.dout.f32();
  params.dout_stride = args.dout.stride(0);
  params.to = args.dx.f32();
  params.to_stride = args.dx.stride(0);
  LaunchScatterAdd(params, StreamOf(backend));
}

}  // namespace stillhouse::cuda
