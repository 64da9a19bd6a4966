#include "kernels/autograd/tape.h"

#include "kernels/base/logging.h"

namespace stillhouse {

std::unique_ptr<Tape> Tape::Nested() {
  auto nested = std::make_unique<Tape>(*device_);
  nested->outer_ = this;
  return nested;
}

Tape::Slot* Tape::Find(const Tensor& tensor) {
  auto found = slots_.find(tensor.buffer().get());
  if (found != slots_.end()) return &found->second;
  return outer_ ? outer_->Find(tensor) : nullptr;
}

const Tape::Slot* Tape::Find(const Tensor& tensor) const { return const_cast<Tape*>(this)->Find(tensor); }

void Tape::Watch(const Tensor& leaf) {
  Slot& slot = slots_[leaf.buffer().get()];
  slot.storage = leaf.buffer();
  slot.leaf = true;
}

bool Tape::Wants(const Tensor& tensor) const { return paused_ == 0 && tensor.defined() && Find(tensor) != nullptr; }

bool Tape::HasGrad(const Tensor& tensor) const {
  const Slot* slot = tensor.defined() ? Find(tensor) : nullptr;
  return slot && slot->grad;
}

Tensor Tape::Grad(const Tensor& tensor) {
  Slot* slot = tensor.defined() ? Find(tensor) : nullptr;
  if (!slot) return Tensor();
  if (!slot->grad) {
    const size_t elements = tensor.buffer()->bytes() / static_cast<size_t>(BlockBytes(tensor.dtype()));
    Tensor grad = Tensor::Empty(device_->pool(), DType::kF32, {static_cast<int64_t>(elements)});
    device_->Zero(grad);
    slot->grad = grad.buffer();
  }
  return tensor.WithBuffer(slot->grad, DType::kF32);
}

void Tape::Record(const char* op, std::vector<Tensor> outputs, std::function<void(Tape&)> backward) {
  STILLHOUSE_CHECK_EQ(paused_, 0);
  for (const Tensor& output : outputs) {
    if (!output.defined()) continue;
    slots_[output.buffer().get()].storage = output.buffer();
  }
  entries_.push_back({op, std::move(outputs), std::move(backward)});
}

void Tape::Run() {
  while (!entries_.empty()) {
    Entry entry = std::move(entries_.back());
    entries_.pop_back();
    bool reached = false;
    for (const Tensor& output : entry.outputs) reached = reached || (output.defined() && HasGrad(output));
    if (reached) entry.backward(*this);
    // The producer ran: nothing adds to these gradients any more.
    for (const Tensor& output : entry.outputs) {
      if (!output.defined()) continue;
      auto found = slots_.find(output.buffer().get());
      if (found != slots_.end() && !found->second.leaf) slots_.erase(found);
    }
  }
}

void Tape::Backward(const Tensor& loss, float seed) {
  STILLHOUSE_CHECK_EQ(loss.elements(), 1);
  STILLHOUSE_CHECK(Wants(loss)) << "the loss does not depend on a watched tensor";
  device_->Upload(&seed, Grad(loss).Reshape({1}));
  Run();
}

void Tape::BackwardFrom(const std::vector<Tensor>& outputs, const std::vector<Tensor>& grads) {
  STILLHOUSE_CHECK_EQ(outputs.size(), grads.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || !grads[i].defined() || !Wants(outputs[i])) continue;
    device_->Copy(grads[i], Grad(outputs[i]));
  }
  Run();
}

}  // namespace stillhouse
