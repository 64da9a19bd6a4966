// What an op runs in: the kernels of one backend, its memory, and (when training) a tape.
#ifndef STILLHOUSE_KERNELS_OPS_CONTEXT_H_
#define STILLHOUSE_KERNELS_OPS_CONTEXT_H_

#include <functional>
#include <memory>
#include <vector>

#include "kernels/autograd/tape.h"
#include "kernels/base/thread_pool.h"
#include "kernels/tensor/device.h"
#include "kernels/tensor/tensor.h"

namespace stillhouse {

struct KernelTable;
struct FusedKernels;

// Launches that were recorded once and are run again as one: the same kernels on the same addresses, whatever those
// hold by then.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  // In order with everything else that is asked of the backend; does not wait.
  virtual void Run() = 0;
};

// A device that runs kernels: its pool, its threads or stream. Owned by main (or a test); outlives every tensor made
// with it.
class Backend : public TensorDevice {
 public:
  virtual const char* name() const = 0;  // "cpu avx2", "cuda NVIDIA H200"
  virtual const KernelTable& kernels() const = 0;
  virtual ThreadPool& threads() = 0;          // host threads
  virtual void* stream() { return nullptr; }  // cudaStream_t of a CUDA backend
  // Ops that do the work of several (ops/fused.h); what is missing is composed of plain ones.
  virtual const FusedKernels& fused() const;
  // Calls `work` twice on this thread, to run and to be recorded: what it asks of the backend must be the same each
  // time and may return nothing to the host. Its buffers come from a pool that all recordings share and nothing else
  // uses: what one leaves there holds until another runs. What it uploads is a constant of the recording. Null on a
  // backend whose launches cost nothing to speak of, and where the device has no memory for it: nothing came of `work`
  // then.
  virtual std::unique_ptr<RecordedWork> Record(const std::function<void()>& work) { return nullptr; }
};

// One per thread of control; cheap to copy. Without a tape nothing is recorded (inference).
struct Context {
  Backend* backend = nullptr;
  Tape* tape = nullptr;

  const KernelTable& kernels() const { return backend->kernels(); }
  BufferPool& pool() const { return backend->pool(); }
  bool Wants(const Tensor& t) const { return tape && tape->Wants(t); }
  Tensor Empty(DType dtype, Shape shape) const { return Tensor::Empty(backend->pool(), dtype, std::move(shape)); }
  Tensor EmptyF32(Shape shape) const { return Empty(DType::kF32, std::move(shape)); }
  // Device copies of host values.
  Tensor Ints(absl::Span<const int32_t> values, Shape shape) const;
  Tensor Floats(absl::Span<const float> values, Shape shape) const;
  std::vector<float> ToFloats(const Tensor& t) const;  // any strides, f32
  std::vector<int32_t> ToInts(const Tensor& t) const;  // contiguous i32
};

// Runs `fn(ctx, inputs) -> outputs` now without recording, and again in the backward pass with recording: a layer's
// activations live only while its own gradient is computed. `inputs` are the tensors that `fn` depends on through its
// argument; other wanted tensors that it reads (weights, cartridge rows) go in `also`, so that their gradients are
// known to be wanted.
using CheckpointFn = std::function<std::vector<Tensor>(const Context&, const std::vector<Tensor>& inputs)>;
std::vector<Tensor> Checkpoint(const Context& ctx, const CheckpointFn& fn, const std::vector<Tensor>& inputs,
                               const std::vector<Tensor>& also = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_CONTEXT_H_
