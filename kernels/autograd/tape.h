// Reverse-mode differentiation: ops push closures while they run, Backward runs them in reverse.
#ifndef STILLHOUSE_KERNELS_AUTOGRAD_TAPE_H_
#define STILLHOUSE_KERNELS_AUTOGRAD_TAPE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/tensor/device.h"
#include "kernels/tensor/tensor.h"

namespace stillhouse {

// Gradients belong to storage, not to tensors: a view's gradient is the same view of the storage's gradient, so slices,
// reshapes and selections need no ops of their own. Gradients are fp32, zeroed when first asked for, and every gradient
// kernel adds to them. Storage that is written in place must not be on the tape.
//
// One tape serves one forward and one backward pass; it is owned by whoever trains, sits in the Context, and is used by
// one thread.
class Tape {
 public:
  // The device of the tensors: it lends the gradients and clears them. Outlives the tape.
  explicit Tape(TensorDevice& device) : device_(&device) {}

  // Marks a leaf: Grad(leaf) holds its gradient after Backward, and is kept until the tape dies.
  void Watch(const Tensor& leaf);
  // True if a gradient of this tensor is wanted: it is a leaf or depends on one.
  bool Wants(const Tensor& tensor) const;
  // The gradient buffer of a wanted tensor, zeroed at first use; an empty tensor for an unwanted one.
  Tensor Grad(const Tensor& tensor);
  // True once something was added to the gradient of this tensor's storage.
  bool HasGrad(const Tensor& tensor) const;

  // Called by op wrappers: `outputs` were made from at least one wanted input. `backward` reads Grad(output) and adds
  // to Grad(input). It is skipped if no output received a gradient, and dropped (with what it saved) right after it
  // ran.
  void Record(const char* op, std::vector<Tensor> outputs, std::function<void(Tape&)> backward);

  // Sets Grad(loss) to `seed` (loss has one element) and runs everything in reverse.
  void Backward(const Tensor& loss, float seed = 1.0f);
  // The same from given output gradients (same shapes as the outputs): used by Checkpoint.
  void BackwardFrom(const std::vector<Tensor>& outputs, const std::vector<Tensor>& grads);

  // While paused, Wants is false and nothing is recorded.
  class Pause {
   public:
    explicit Pause(Tape* tape) : tape_(tape) {
      if (tape_) ++tape_->paused_;
    }
    ~Pause() {
      if (tape_) --tape_->paused_;
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    Tape* tape_;
  };

  // A nested tape that adds to this tape's gradients for storage known here, and keeps its own for the rest:
  // Checkpoint.
  std::unique_ptr<Tape> Nested();

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    const char* op;
    std::vector<Tensor> outputs;
    std::function<void(Tape&)> backward;
  };
  struct Slot {
    std::shared_ptr<Buffer> storage;  // keeps the address from being reused
    std::shared_ptr<Buffer> grad;
    bool leaf = false;
  };

  Slot* Find(const Tensor& tensor);
  const Slot* Find(const Tensor& tensor) const;
  void Run();

  TensorDevice* device_;
  Tape* outer_ = nullptr;
  int paused_ = 0;
  absl::flat_hash_map<const Buffer*, Slot> slots_;
  std::vector<Entry> entries_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_AUTOGRAD_TAPE_H_
