#include "kernels/ops/optimizer.h"

#include <cmath>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/optimizer_launch.h"
#include "kernels/cuda/rows.h"

namespace stillhouse::cuda {

void AdamW(Backend& backend, const AdamWArgs& args) {
  const AdamWOptions& o = args.options;
  for (const Tensor* t : {&args.grad, &args.m, &args.v}) {
    STILLHOUSE_CHECK(t->shape() == args.param.shape()) << t->DebugString() << " for " << args.param.DebugString();
  }
  STILLHOUSE_CHECK_GE(args.step, 1);
  AdamWParams params;
  params.param = MakeRows(args.param);
  params.grad = MakeRows(args.grad);
  params.m = MakeRows(args.m);
  params.v = MakeRows(args.v);
  params.rows = RowsOf(args.param);
  params.width = WidthOf(args.param);
  params.beta1 = o.beta1;
  params.beta2 = o.beta2;
  params.eps = o.eps;
  params.grad_scale = args.grad_scale;
  // Bias corrections in fp64; the update itself in fp32.
  const double correction1 = 1.0 - std::pow(static_cast<double>(o.beta1), static_cast<double>(args.step));
  const double correction2 = 1.0 - std::pow(static_cast<double>(o.beta2), static_cast<double>(args.step));
  params.step_size = static_cast<float>(o.lr / correction1);
  params.inverse_root = static_cast<float>(1.0 / std::sqrt(correction2));
  params.decay = 1.0f - o.lr * o.weight_decay;
  LaunchAdamW(params, StreamOf(backend));
}

void SumSquares(Backend& backend, const SumSquaresArgs& args) {
  const std::shared_ptr<Buffer> partials = backend.pool().Allocate(kSumSquaresBlocks * sizeof(double));
  LaunchSumSquares(MakeRows(args.x), RowsOf(args.x), WidthOf(args.x), static_cast<double*>(partials->data()),
                   VectorOf(args.out, 1), StreamOf(backend));
}

}  // namespace stillhouse::cuda
