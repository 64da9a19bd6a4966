// A device's memory up to a limit.
#ifndef STILLHOUSE_KERNELS_TENSOR_BOUNDED_MEMORY_H_
#define STILLHOUSE_KERNELS_TENSOR_BOUNDED_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "kernels/tensor/buffer.h"

namespace stillhouse {

// Hands out another memory's blocks as long as no more than the limit is out, counted as Granted says. Several pools
// may share one. Any thread.
class BoundedMemory final : public RawMemory {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  explicit BoundedMemory(std::shared_ptr<RawMemory> memory, int64_t limit = kNoLimit)
      : memory_(std::move(memory)), limit_(limit) {}

  DeviceType device() const override { return memory_->device(); }
  size_t Granted(size_t bytes) const override { return memory_->Granted(bytes); }
  void* Allocate(size_t bytes) override;
  void Free(void* data, size_t bytes) override;

  // What is out already stays out.
  void SetLimit(int64_t bytes) { limit_.store(bytes); }
  int64_t limit() const { return limit_.load(); }
  int64_t taken() const { return taken_.load(); }

 private:
  const std::shared_ptr<RawMemory> memory_;
  std::atomic<int64_t> limit_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_BOUNDED_MEMORY_H_
