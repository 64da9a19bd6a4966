#include "kernels/ops/loss.h"

#include "kernels/ops/kernel_table.h"
#include "kernels/ops/matmul.h"

namespace stillhouse {
namespace {

void CheckMatrix(const Tensor& z) {
  STILLHOUSE_CHECK(z.dtype() == DType::kF32 && z.rank() == 2 && (z.dim(1) <= 1 || z.stride(1) == 1)) << z.DebugString();
}

void CheckIds(const Tensor& ids, int64_t rows) {
  STILLHOUSE_CHECK(ids.dtype() == DType::kI32 && ids.rank() == 1 && ids.contiguous() && ids.dim(0) == rows)
      << ids.DebugString() << " for " << rows << " rows";
}

void CheckProjection(const Tensor& x, const Tensor& weight) {
  CheckMatrix(x);
  STILLHOUSE_CHECK(weight.defined() && weight.rank() >= 2 && weight.dim(1) == x.dim(1) && weight.dim(0) > 0)
      << x.DebugString() << " on " << weight.DebugString();
}

// dx += dloss · saved, as a product of a one-element matrix: the factor stays on the device.
void AddScaled(Backend& backend, const Tensor& dloss, const Tensor& saved, const Tensor& dx) {
  const int64_t rows = saved.dim(0), width = saved.dim(1);
  MatMulArgs args;
  args.a = dloss.Reshape({1, 1});
  args.accumulate = true;
  if (dx.contiguous()) {
    args.b = saved.Reshape({1, rows * width});
    args.out = dx.Reshape({1, rows * width});
    backend.kernels().MatMul(backend, args);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    args.b = saved.Slice(0, r, r + 1);
    args.out = dx.Slice(0, r, r + 1);
    backend.kernels().MatMul(backend, args);
  }
}

void RecordFused(const Context& ctx, const char* op, const Tensor& loss, const Tensor& x, const Tensor& dx) {
  ctx.tape->Record(op, {loss}, [backend = ctx.backend, loss, x, dx](Tape& tape) {
    AddScaled(*backend, tape.Grad(loss), dx, tape.Grad(x));
  });
}

Tensor CrossEntropyOf(const Context& ctx, CrossEntropyArgs args) {
  const bool per_row = args.options.reduction == Reduction::kNone;
  args.loss = ctx.EmptyF32({per_row ? args.z.dim(0) : 1});
  ctx.kernels().CrossEntropy(*ctx.backend, args);
  if (ctx.Wants(args.z)) {
    ctx.tape->Record("CrossEntropy", {args.loss}, [backend = ctx.backend, args](Tape& tape) {
      backend->kernels().CrossEntropyGrad(*backend, {args.z, args.targets, args.soft_targets, args.class_weights,
                                                     args.options, tape.Grad(args.loss), tape.Grad(args.z)});
    });
  }
  return args.loss;
}

}  // namespace

Tensor Softmax(const Context& ctx, const Tensor& z) {
  CheckMatrix(z);
  Tensor out = ctx.EmptyF32(z.shape());
  ctx.kernels().Softmax(*ctx.backend, {z, out});
  if (ctx.Wants(z)) {
    ctx.tape->Record("Softmax", {out}, [backend = ctx.backend, z, out](Tape& tape) {
      backend->kernels().SoftmaxGrad(*backend, {out, tape.Grad(out), tape.Grad(z)});
    });
  }
  return out;
}

Tensor LogSoftmax(const Context& ctx, const Tensor& z) {
  CheckMatrix(z);
  Tensor out = ctx.EmptyF32(z.shape());
  ctx.kernels().LogSoftmax(*ctx.backend, {z, out});
  if (ctx.Wants(z)) {
    ctx.tape->Record("LogSoftmax", {out}, [backend = ctx.backend, z, out](Tape& tape) {
      backend->kernels().LogSoftmaxGrad(*backend, {out, tape.Grad(out), tape.Grad(z)});
    });
  }
  return out;
}

Tensor CrossEntropy(const Context& ctx, const Tensor& z, const Tensor& targets, const CrossEntropyOptions& options,
                    const Tensor& class_weights) {
  CheckMatrix(z);
  CheckIds(targets, z.dim(0));
  if (class_weights) {
    STILLHOUSE_CHECK(class_weights.dtype() == DType::kF32 && class_weights.rank() == 1 && class_weights.contiguous());
    STILLHOUSE_CHECK_EQ(class_weights.dim(0), z.dim(1));
  }
  return CrossEntropyOf(ctx, {z, targets, Tensor(), class_weights, options, Tensor()});
}

Tensor CrossEntropySoft(const Context& ctx, const Tensor& z, const Tensor& soft_targets,
                        const CrossEntropyOptions& options) {
  CheckMatrix(z);
  CheckMatrix(soft_targets);
  STILLHOUSE_CHECK(soft_targets.shape() == z.shape()) << soft_targets.DebugString() << " for " << z.DebugString();
  return CrossEntropyOf(ctx, {z, Tensor(), soft_targets, Tensor(), options, Tensor()});
}

Tensor LinearCrossEntropy(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& targets,
                          const CrossEntropyOptions& options) {
  CheckProjection(x, weight);
  CheckIds(targets, x.dim(0));
  STILLHOUSE_CHECK(options.reduction != Reduction::kNone) << "the fused loss is a sum or a mean";
  LinearCrossEntropyArgs args{x, weight, targets, options};
  args.loss = ctx.EmptyF32({1});
  if (ctx.Wants(x)) args.dx = ctx.EmptyF32(x.shape());
  ctx.kernels().LinearCrossEntropy(*ctx.backend, args);
  if (args.dx) RecordFused(ctx, "LinearCrossEntropy", args.loss, x, args.dx);
  return args.loss;
}

Tensor LinearDistill(const Context& ctx, const Tensor& x, const Tensor& weight, const Tensor& ids,
                     const Tensor& logprobs, DistillMode mode, const Tensor& row_weights) {
  CheckProjection(x, weight);
  STILLHOUSE_CHECK(ids.dtype() == DType::kI32 && ids.rank() == 2 && ids.contiguous() && ids.dim(0) == x.dim(0))
      << ids.DebugString();
  STILLHOUSE_CHECK(logprobs.dtype() == DType::kF32 && logprobs.shape() == ids.shape() && logprobs.contiguous())
      << logprobs.DebugString();
  if (row_weights) {
    STILLHOUSE_CHECK(row_weights.dtype() == DType::kF32 && row_weights.rank() == 1 && row_weights.contiguous());
    STILLHOUSE_CHECK_EQ(row_weights.dim(0), x.dim(0));
  }
  LinearDistillArgs args{x, weight, ids, logprobs, row_weights, mode};
  args.loss = ctx.EmptyF32({1});
  if (ctx.Wants(x)) args.dx = ctx.EmptyF32(x.shape());
  ctx.kernels().LinearDistill(*ctx.backend, args);
  if (args.dx) RecordFused(ctx, "LinearDistill", args.loss, x, args.dx);
  return args.loss;
}

void TopLogprobs(const Context& ctx, const TopLogprobsArgs& args) {
  CheckProjection(args.x, args.weight);
  const int64_t rows = args.x.dim(0);
  STILLHOUSE_CHECK(args.k >= 0 && args.k <= args.weight.dim(0)) << args.k;
  if (args.k > 0) {
    for (const Tensor& t : {args.top_ids, args.top_logprobs}) {
      STILLHOUSE_CHECK(t.defined() && t.contiguous() && t.rank() == 2 && t.dim(0) == rows && t.dim(1) == args.k);
    }
    STILLHOUSE_CHECK(args.top_ids.dtype() == DType::kI32 && args.top_logprobs.dtype() == DType::kF32);
  }
  if (args.tokens) {
    CheckIds(args.tokens, rows);
    STILLHOUSE_CHECK(args.token_logprobs.defined() && args.token_logprobs.dtype() == DType::kF32 &&
                     args.token_logprobs.contiguous() && args.token_logprobs.elements() == rows);
  }
  ctx.kernels().TopLogprobs(*ctx.backend, args);
}

}  // namespace stillhouse
