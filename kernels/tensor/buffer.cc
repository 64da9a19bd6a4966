#include "kernels/tensor/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

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
  struct SizeClassBlocks {
    std::vector<void*> blocks;
    uint64_t used = 0;  // when a block of this size was last lent or given back
  };

  std::shared_ptr<RawMemory> memory;
  size_t limit = 0;
  std::mutex mutex;
  std::map<size_t, SizeClassBlocks> free;
  uint64_t clock = 0;
  size_t cached = 0;
  size_t lent = 0;
  size_t peak = 0;
  size_t needed = 0;  // most lent at a time since the last Trim

  ~State() {
    for (auto& [size, of_size] : free) {
      for (void* block : of_size.blocks) memory->Free(block, size);
    }
  }

  void* TakeLocked(size_t size) {
    lent += size;
    peak = std::max(peak, lent);
    needed = std::max(needed, lent);
    auto found = free.find(size);
    if (found == free.end()) return nullptr;
    found->second.used = ++clock;
    if (found->second.blocks.empty()) return nullptr;
    void* data = found->second.blocks.back();
    found->second.blocks.pop_back();
    cached -= size;
    return data;
  }

  void Return(void* data, size_t size) {
    std::vector<std::pair<void*, size_t>> surplus;
    {
      std::lock_guard<std::mutex> lock(mutex);
      lent -= size;
      SizeClassBlocks& own = free[size];
      own.blocks.push_back(data);
      own.used = ++clock;
      cached += size;
      // What was not asked for in the longest time goes first: work that changed its shapes does not fill the pool for
      // the work that follows.
      while (cached > limit && cached + lent > needed) {
        auto oldest = free.end();
        for (auto it = free.begin(); it != free.end(); ++it) {
          if (it->second.blocks.empty()) continue;
          if (oldest == free.end() || it->second.used < oldest->second.used) oldest = it;
        }
        surplus.emplace_back(oldest->second.blocks.back(), oldest->first);
        oldest->second.blocks.pop_back();
        cached -= oldest->first;
      }
    }
    for (const auto& [block, bytes] : surplus) memory->Free(block, bytes);
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
    data = state_->TakeLocked(size);
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
  std::map<size_t, State::SizeClassBlocks> free;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    free.swap(state_->free);
    state_->cached = 0;
    state_->needed = state_->lent;
  }
  for (auto& [size, of_size] : free) {
    for (void* block : of_size.blocks) state_->memory->Free(block, size);
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
