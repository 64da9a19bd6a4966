// The tier below the device: memories that left it, in host memory, a copy away from being read again.
#ifndef STILLHOUSE_SERVER_CORPUS_HOST_TIER_H_
#define STILLHOUSE_SERVER_CORPUS_HOST_TIER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cache_store/artifact.h"
#include "kernels/tensor/bounded_memory.h"
#include "server/state/memory.h"

namespace stillhouse {

using CacheKey = std::tuple<std::string, std::string, std::string>;  // tenant, corpus, cache

// A memory that lies in host memory exactly as it lay on the device. Whoever holds it keeps its bytes.
struct HostCopy {
  std::string method;
  ArtifactHeader header;
  std::shared_ptr<const Memory> memory;  // not for kernels
};

// Under a budget of bytes that covers everything it took of the host, also what it keeps for reuse; the least recently
// used go first. A copy stays while its memory is on the device again (it never changes), so that a memory which comes
// and goes is copied down once. Owned by the directory; the backend outlives it. Thread-safe.
class HostTier {
 public:
  HostTier(const Context& ctx, int64_t budget_bytes);
  ~HostTier();  // ends after the copy in progress; those that wait are dropped
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // Copies `memory` down, on a thread of this and beside the device's work, then lets go of it and calls `left` (on
  // that thread, without a lock): also if it found no room in the budget or the host, or was forgotten meanwhile. What
  // the key named before is forgotten.
  void Keep(const CacheKey& key, std::string method, const ArtifactHeader& header, std::shared_ptr<const Memory> memory,
            std::function<void()> left);
  // A copy that is complete. Counts as a use.
  std::optional<HostCopy> Find(const CacheKey& key);
  bool Has(const CacheKey& key) const;
  void Forget(const CacheKey& key);
  std::vector<CacheKey> Keys() const;  // complete or on the way

  struct Stats {
    int64_t memories = 0;
    int64_t bytes = 0;    // of them, as allocated
    int64_t taken = 0;    // of the host: those, copies in progress, and what is kept for reuse
    int64_t copied = 0;   // so far
    int64_t dropped = 0;  // that found no room
  };
  Stats stats() const;

 private:
  struct Entry {
    HostCopy held;
    int64_t bytes = 0;
    uint64_t last_use = 0;
  };
  struct Job {
    CacheKey key;
    HostCopy held;  // of the device
    std::function<void()> left;
    bool forgotten = false;
  };

  void Loop();
  std::optional<MemoryCopy> StartCopyDown(const Memory& memory);
  bool DropOldest();

  const Context ctx_;
  const int64_t budget_;
  const std::shared_ptr<BoundedMemory> bound_;
  BufferPool pool_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::map<CacheKey, Entry> entries_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::shared_ptr<Job> current_;
  uint64_t clock_ = 0;
  int64_t copied_ = 0, dropped_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_HOST_TIER_H_
