#include "server/corpus/host_tier.h"

#include <algorithm>
#include <utility>

#include "kernels/base/logging.h"

namespace stillhouse {

HostTier::HostTier(const Context& ctx, int64_t budget_bytes)
    : ctx_(ctx),
      budget_(budget_bytes),
      bound_(std::make_shared<BoundedMemory>(ctx.backend->copy_memory(), budget_bytes)),
      // Locking host memory is slow: a block that was locked once is lent again, until another size needs its room.
      pool_(bound_, SIZE_MAX) {
  thread_ = std::thread([this] { Loop(); });
}

HostTier::~HostTier() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void HostTier::Keep(const CacheKey& key, std::string method, const ArtifactHeader& header,
                    std::shared_ptr<const Memory> memory, std::function<void()> left) {
  auto job = std::make_shared<Job>();
  job->key = key;
  job->held = {std::move(method), header, std::move(memory)};
  job->left = std::move(left);
  Forget(key);
  std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back(std::move(job));
  wake_.notify_all();
}

std::optional<HostCopy> HostTier::Find(const CacheKey& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end()) return std::nullopt;
  found->second.last_use = ++clock_;
  return found->second.held;
}

bool HostTier::Has(const CacheKey& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.contains(key);
}

void HostTier::Forget(const CacheKey& key) {
  std::shared_ptr<const Memory> gone;  // freed without the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = entries_.find(key); found != entries_.end()) {
    gone = std::move(found->second.held.memory);
    entries_.erase(found);
  }
  if (current_ && current_->key == key) current_->forgotten = true;
  for (const auto& job : jobs_) {
    if (job->key == key) job->forgotten = true;
  }
}

std::vector<CacheKey> HostTier::Keys() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<CacheKey> keys;
  for (const auto& [key, entry] : entries_) keys.push_back(key);
  for (const auto& job : jobs_) keys.push_back(job->key);
  if (current_) keys.push_back(current_->key);
  return keys;
}

HostTier::Stats HostTier::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats stats;
  stats.memories = static_cast<int64_t>(entries_.size());
  for (const auto& [key, entry] : entries_) stats.bytes += entry.bytes;
  stats.taken = bound_->taken();
  stats.copied = copied_;
  stats.dropped = dropped_;
  return stats;
}

bool HostTier::DropOldest() {
  std::shared_ptr<const Memory> gone;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto oldest = std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return a.second.last_use < b.second.last_use;
  });
  if (oldest == entries_.end()) return false;
  gone = std::move(oldest->second.held.memory);
  entries_.erase(oldest);
  return true;
}

std::optional<MemoryCopy> HostTier::StartCopyDown(const Memory& memory) {
  // One that can never fit drives nothing out.
  int64_t bytes = 0;
  for (const BufferExtent& extent : Extents(memory)) bytes += static_cast<int64_t>(pool_.BlockBytes(extent.bytes));
  if (bytes > budget_) return std::nullopt;
  while (true) {
    std::optional<MemoryCopy> copy = StartCopy(ctx_, memory, pool_);
    if (copy || !DropOldest()) return copy;
  }
}

void HostTier::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    current_ = std::move(jobs_.front());
    jobs_.pop_front();
    const bool wanted = !stop_ && !current_->forgotten;
    lock.unlock();
    std::optional<MemoryCopy> copy;
    if (wanted) {
      copy = StartCopyDown(*current_->held.memory);
      if (copy) copy->Wait();
      if (!copy) {
        STILLHOUSE_LOG(DEBUG) << "no host memory for " << current_->held.memory->allocated_bytes()
                              << " bytes: the memory will be read from the store";
      }
    }
    // The device's memory goes back before `left` says so.
    current_->held.memory.reset();
    lock.lock();
    if (copy && !current_->forgotten) {
      Entry& entry = entries_[current_->key];
      entry.bytes = copy->memory->allocated_bytes();
      entry.held = {std::move(current_->held.method), std::move(current_->held.header), std::move(copy->memory)};
      entry.last_use = ++clock_;
      ++copied_;
    } else if (wanted && !copy) {
      ++dropped_;
    }
    const std::shared_ptr<Job> done = std::move(current_);
    current_ = nullptr;
    lock.unlock();
    copy.reset();
    if (done->left) done->left();
    lock.lock();
  }
}

}  // namespace stillhouse
