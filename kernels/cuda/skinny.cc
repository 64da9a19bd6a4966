#include "kernels/cuda/skinny.h"

#include <algorithm>

#include "kernels/cuda/cuda_device.h"

namespace stillhouse::cuda {

SkinnyParams SkinnyOf(Backend& backend, const Tensor& x, const Tensor& weight) {
  STILLHOUSE_CHECK(x.dtype() == DType::kBF16 && x.dim(1) == weight.dim(1)) << x.DebugString() << weight.DebugString();
  const Device& device = DeviceOf(backend);
  SkinnyParams p;
  p.multiprocessors = device.multiprocessors();
  p.partials = device.exchange();
  p.weight = weight.raw();
  p.n = weight.dim(0);
  p.k = weight.dim(1);
  p.x = x.raw();
  p.x_stride = x.stride(0);
  p.m = static_cast<int>(std::min<int64_t>(x.dim(0), kSkinnyRows + 1));
  return p;
}

SkinnyParams SkinnyOf(Backend& backend, const ScaledRows& x, float eps, const Tensor& weight) {
  SkinnyParams p = SkinnyOf(backend, x.values, weight);
  STILLHOUSE_CHECK(x.squares.dim(0) == x.values.dim(0) && x.squares.contiguous()) << x.squares.DebugString();
  p.squares = x.squares.f32();
  p.parts = static_cast<int>(x.squares.dim(1));
  p.eps = eps;
  return p;
}

bool RunSkinny(Backend& backend, const SkinnyParams& p) {
  if (!CanSkinny(p)) return false;
  LaunchSkinny(p, ScheduleSkinny(p), StreamOf(backend));
  return true;
}

}  // namespace stillhouse::cuda
