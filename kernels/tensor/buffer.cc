#include "kernels/tensor/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

class Host final : public RawMemory {
 public:
  DeviceType device() const override { return DeviceType::kCpu; }

  void* Allocate(size_t bytes) override {
    if (bytes < kHugePage) return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    void* data = std::aligned_alloc(kHugePage, (bytes + kHugePage - 1) / kHugePage * kHugePage);
    if (data) ::madvise(data, bytes, MADV_HUGEPAGE);
    return data;
  }

  void Free(void* data, size_t) override { std::free(data); }
};

// Four classes to each power of two: at most a quarter is wasted.
size_t SizeClass(size_t bytes) {
  if (bytes <= 256) return 256;
  const size_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::shared_ptr<RawMemory> HostMemory() {
  static auto* memory = new std::shared_ptr<RawMemory>(std::make_shared<Host>());
  return *memory;
}

struct BufferPool::State {
  std::shared_ptr<RawMemory> memory;
  size_t limit = 0;
  std::mutex mutex;
  std::map<size_t, std::vector<void*>> free;
  size_t cached = 0;
  size_t lent = 0;
  size_t peak = 0;

  ~State() {
    for (auto& [size, blocks] : free) {
      for (void* block : blocks) memory->Free(block, size);
    }
  }

  void Return(void* data, size_t size) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      lent -= size;
      if (cached + size <= limit) {
        free[size].push_back(data);
        cached += size;
        return;
      }
    }
    memory->Free(data, size);
  }
};

BufferPool::BufferPool(std::shared_ptr<RawMemory> memory, size_t limit_bytes) : state_(std::make_shared<State>()) {
  state_->memory = std::move(memory);
  state_->limit = limit_bytes;
}

std::shared_ptr<Buffer> BufferPool::Allocate(size_t bytes) {
  const size_t size = SizeClass(bytes);
  void* data = nullptr;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    auto found = state_->free.find(size);
    if (found != state_->free.end() && !found->second.empty()) {
      data = found->second.back();
      found->second.pop_back();
      state_->cached -= size;
    }
    state_->lent += size;
    state_->peak = std::max(state_->peak, state_->lent);
  }
  if (!data) data = state_->memory->Allocate(size);
  if (!data) {
    Trim();
    data = state_->memory->Allocate(size);
  }
  STILLHOUSE_CHECK(data != nullptr) << "out of memory: " << size << " bytes asked for, " << lent_bytes() << " lent";
  return std::make_shared<Buffer>(data, size, state_->memory->device(),
                                  [state = state_](void* block, size_t n) { state->Return(block, n); });
}

void BufferPool::Trim() {
  std::map<size_t, std::vector<void*>> free;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    free.swap(state_->free);
    state_->cached = 0;
  }
  for (auto& [size, blocks] : free) {
    for (void* block : blocks) state_->memory->Free(block, size);
  }
}

DeviceType BufferPool::device() const { return state_->memory->device(); }

size_t BufferPool::lent_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lent;
}

size_t BufferPool::cached_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->cached;
}

size_t BufferPool::peak_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->peak;
}

}  // namespace stillhouse
