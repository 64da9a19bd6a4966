#include "kernels/ops/rope.h"

#include <algorithm>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/rope_launch.h"

namespace stillhouse::cuda {
namespace {

void Turn(Backend& backend, const Tensor& from, const Tensor& positions, const RopeConfig& config, float sign,
          bool inverse, bool add, const Tensor& to) {
  STILLHOUSE_CHECK(from.shape() == to.shape() && from.rank() == 3) << from.DebugString() << to.DebugString();
  STILLHOUSE_CHECK(from.dim(2) <= 1 || (from.stride(2) == 1 && to.stride(2) == 1));
  STILLHOUSE_CHECK(positions.contiguous() && positions.elements() == from.dim(0));
  STILLHOUSE_CHECK(config.inv_freq.size() <= kMaxRopePairs) << "rotary pairs: " << config.inv_freq.size();
  RopeParams params;
  params.from = from.f32();
  params.from_row = from.stride(0);
  params.from_head = from.stride(1);
  params.to = to.f32();
  params.to_row = to.stride(0);
  params.to_head = to.stride(1);
  params.positions = positions.i32();
  params.rows = from.dim(0);
  params.heads = from.dim(1);
  params.width = from.dim(2);
  params.pairs = static_cast<int>(config.inv_freq.size());
  params.interleaved = config.layout == RopeLayout::kInterleaved;
  params.add = add;
  params.sign = sign;
  // Turning back undoes the length too, so that the inverse is one under YaRN's scale as well.
  params.scale = inverse ? 1.0f / config.attention_scale : config.attention_scale;
  std::copy(config.inv_freq.begin(), config.inv_freq.end(), params.inv_freq);
  LaunchRope(params, StreamOf(backend));
}

}  // namespace

void Rope(Backend& backend, const RopeArgs& args) {
  Turn(backend, args.x, args.positions, *args.config, args.inverse ? -1.0f : 1.0f, args.inverse, false, args.out);
}

// The transpose of a rotation: the angle changes its sign, the length scale stays.
void RopeGrad(Backend& backend, const RopeGradArgs& args) {
  Turn(backend, args.dout, args.positions, *args.config, args.inverse ? 1.0f : -1.0f, args.inverse, true, args.dx);
}

}  // namespace stillhouse::cuda
