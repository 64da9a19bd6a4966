#include "kernels/tensor/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <shared_mutex>
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

  std::shared_ptr<RawMemory> memory, overflow;
  std::atomic<size_t> overflowed{0};
  size_t limit = 0;
  bool keeps = false;
  std::shared_mutex reclaimer_mutex;  // shared while the reclaimer runs
  Reclaimer reclaimer;
  std::mutex mutex;
  std::map<size_t, SizeClassBlocks> free;
  uint64_t clock = 0;
  size_t cached = 0;
  size_t lent = 0;
  size_t peak = 0;
  size_t needed = 0;   // most lent at a time since the last Trim
  size_t freeing = 0;  // neither cached nor the device's yet
  std::condition_variable freed;

  ~State() {
    for (auto& [size, of_size] : free) {
      for (void* block : of_size.blocks) memory->Free(block, size);
    }
  }

  void LendLocked(size_t size) {
    lent += size;
    peak = std::max(peak, lent);
    needed = std::max(needed, lent);
  }

  void* TakeLocked(size_t size) {
    auto found = free.find(size);
    if (found == free.end()) return nullptr;
    found->second.used = ++clock;
    if (found->second.blocks.empty()) return nullptr;
    void* data = found->second.blocks.back();
    found->second.blocks.pop_back();
    cached -= size;
    LendLocked(size);
    return data;
  }

  // Gives blocks, which were counted as `freeing` when they were taken out, back to the device.
  void Free(const std::vector<std::pair<void*, size_t>>& blocks) {
    size_t bytes = 0;
    for (const auto& [block, size] : blocks) {
      memory->Free(block, size);
      bytes += size;
    }
    if (bytes == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    freeing -= bytes;
    freed.notify_all();
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
        freeing += oldest->first;
      }
    }
    Free(surplus);
  }
};

BufferPool::BufferPool(std::shared_ptr<RawMemory> memory, size_t limit_bytes, bool keeps,
                       std::shared_ptr<RawMemory> overflow)
    : state_(std::make_shared<State>()) {
  state_->memory = std::move(memory);
  state_->overflow = std::move(overflow);
  state_->limit = keeps ? SIZE_MAX : limit_bytes;
  state_->keeps = keeps;
}

size_t BufferPool::BlockBytes(size_t bytes) const { return state_->memory->Granted(SizeClass(bytes)); }

std::shared_ptr<Buffer> BufferPool::TryAllocate(size_t bytes) {
  const size_t size = BlockBytes(bytes);
  void* data = nullptr;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    data = state_->TakeLocked(size);
  }
  if (!data) {
    do {
      data = state_->memory->Allocate(size);
    } while (!data && Reclaim(size));
    if (!data) return nullptr;
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->LendLocked(size);
  }
  return std::make_shared<Buffer>(data, size, state_->memory->device(),
                                  [state = state_](void* block, size_t n) { state->Return(block, n); });
}

std::shared_ptr<Buffer> BufferPool::Allocate(size_t bytes) {
  if (std::shared_ptr<Buffer> buffer = TryAllocate(bytes)) return buffer;
  const size_t size = BlockBytes(bytes);
  void* data = state_->overflow ? state_->overflow->Allocate(size) : nullptr;
  STILLHOUSE_CHECK(data != nullptr) << "out of memory: " << size << " bytes asked for, " << lent_bytes() << " lent"
                                    << (state_->overflow ? ", and the host has none left either" : "");
  state_->overflowed += size;
  // Never kept for reuse: what comes next may find the device's own.
  return std::make_shared<Buffer>(data, size, state_->memory->device(),
                                  [overflow = state_->overflow](void* block, size_t n) { overflow->Free(block, n); });
}

void BufferPool::SetReclaimer(Reclaimer reclaimer) {
  std::unique_lock<std::shared_mutex> lock(state_->reclaimer_mutex);
  state_->reclaimer = std::move(reclaimer);
}

bool BufferPool::Reclaim(size_t bytes) {
  if (!state_->keeps && Trim() > 0) return true;
  {
    // What others are giving back is not missing.
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (state_->freeing > 0) {
      state_->freed.wait(lock, [this] { return state_->freeing == 0; });
      return true;
    }
  }
  std::shared_lock<std::shared_mutex> lock(state_->reclaimer_mutex);
  if (!state_->reclaimer || !state_->reclaimer(bytes)) return false;
  // What was given up came back to this pool.
  if (!state_->keeps) Trim();
  return true;
}

size_t BufferPool::Trim() {
  std::vector<std::pair<void*, size_t>> blocks;
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    for (auto& [size, of_size] : state_->free) {
      for (void* block : of_size.blocks) blocks.emplace_back(block, size);
    }
    state_->free.clear();
    bytes = std::exchange(state_->cached, 0);
    state_->freeing += bytes;
    state_->needed = state_->lent;
  }
  state_->Free(blocks);
  return bytes;
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

size_t BufferPool::overflowed_bytes() const { return state_->overflowed; }

size_t BufferPool::peak_bytes() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->peak;
}

}  // namespace stillhouse
