#include "kernels/ops/context.h"

#include <utility>

namespace stillhouse {

Tensor Context::Ints(absl::Span<const int32_t> values, Shape shape) const {
  Tensor t = Empty(DType::kI32, std::move(shape));
  STILLHOUSE_CHECK_EQ(t.elements(), static_cast<int64_t>(values.size()));
  if (!values.empty()) backend->Upload(values.data(), t);
  return t;
}

Tensor Context::Floats(absl::Span<const float> values, Shape shape) const {
  Tensor t = EmptyF32(std::move(shape));
  STILLHOUSE_CHECK_EQ(t.elements(), static_cast<int64_t>(values.size()));
  if (!values.empty()) backend->Upload(values.data(), t);
  return t;
}

std::vector<float> Context::ToFloats(const Tensor& t) const {
  STILLHOUSE_CHECK(t.dtype() == DType::kF32) << t.DebugString();
  std::vector<float> values(static_cast<size_t>(t.elements()));
  if (values.empty()) return values;
  if (t.contiguous()) {
    backend->Download(t, values.data());
    return values;
  }
  // The stretch of memory that the view spans comes over in one piece; its elements are picked out on the host.
  int64_t span = 1;
  for (int i = 0; i < t.rank(); ++i) span += (t.dim(i) - 1) * t.stride(i);
  const Tensor flat = Tensor::Wrap(nullptr, DType::kF32, {t.offset() + span}).WithBuffer(t.buffer(), DType::kF32);
  std::vector<float> stretch(static_cast<size_t>(span));
  backend->Download(flat.Slice(0, t.offset(), t.offset() + span), stretch.data());
  Shape index(t.rank(), 0);
  for (float& value : values) {
    int64_t offset = 0;
    for (int i = 0; i < t.rank(); ++i) offset += index[i] * t.stride(i);
    value = stretch[static_cast<size_t>(offset)];
    for (int d = t.rank() - 1; d >= 0 && ++index[d] == t.dim(d); --d) index[d] = 0;
  }
  return values;
}

std::vector<int32_t> Context::ToInts(const Tensor& t) const {
  STILLHOUSE_CHECK(t.dtype() == DType::kI32 && t.contiguous()) << t.DebugString();
  std::vector<int32_t> values(static_cast<size_t>(t.elements()));
  if (!values.empty()) backend->Download(t, values.data());
  return values;
}

std::vector<Tensor> Checkpoint(const Context& ctx, const CheckpointFn& fn, const std::vector<Tensor>& inputs,
                               const std::vector<Tensor>& also) {
  bool wanted = false;
  for (const Tensor& t : inputs) wanted = wanted || ctx.Wants(t);
  for (const Tensor& t : also) wanted = wanted || ctx.Wants(t);
  if (!wanted) return fn(ctx, inputs);
  std::vector<Tensor> outputs;
  {
    // The tape stays in the context, so that nothing is done in place that the second run needs unchanged.
    Tape::Pause pause(ctx.tape);
    outputs = fn(ctx, inputs);
  }
  for (const Tensor& output : outputs) {
    for (const Tensor& input : inputs) {
      STILLHOUSE_CHECK(!output.defined() || !input.defined() || output.buffer() != input.buffer())
          << "a checkpointed function must not return a view of its input";
    }
  }
  ctx.tape->Record("Checkpoint", outputs, [ctx, fn, inputs, outputs](Tape& tape) {
    std::unique_ptr<Tape> nested = tape.Nested();
    Context inner = ctx;
    inner.tape = nested.get();
    const std::vector<Tensor> again = fn(inner, inputs);
    std::vector<Tensor> grads;
    for (const Tensor& output : outputs) grads.push_back(tape.HasGrad(output) ? tape.Grad(output) : Tensor());
    nested->BackwardFrom(again, grads);
  });
  return outputs;
}

}  // namespace stillhouse
