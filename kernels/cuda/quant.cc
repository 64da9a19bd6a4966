#include "kernels/ops/quant.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/quant_launch.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {

void Dequantize(Backend& backend, const DequantizeArgs& args) {
  STILLHOUSE_CHECK(args.in.contiguous() && args.out.contiguous() && args.in.shape() == args.out.shape())
      << args.in.DebugString() << " -> " << args.out.DebugString();
  STILLHOUSE_CHECK(args.in.device() == DeviceType::kCuda) << args.in.DebugString() << " is not on the GPU";
  DecodeParams params;
  params.dtype = args.in.dtype();
  params.in = args.in.raw();
  params.in_rows = params.rows = RowsOf(args.in);
  params.width = params.out_stride = WidthOf(args.in);
  params.out = args.out.f32();
  LaunchDecode(params, StreamOf(backend));
}

}  // namespace stillhouse::cuda
