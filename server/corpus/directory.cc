#include "server/corpus/directory.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/corpus/host_tier.h"

namespace stillhouse {
namespace {

using Key = CacheKey;

// A memory and what is left of it behind another one: both live as long as either is held.
struct Held {
  std::shared_ptr<const Memory> whole;
  Memory without_bos;  // no layers: the whole
};

struct Resident {
  Resident() = default;
  Resident(std::string method_in, const ArtifactHeader& header_in, std::shared_ptr<const Memory> memory_in)
      : method(std::move(method_in)), header(header_in), bytes(memory_in->allocated_bytes()) {
    auto held = std::make_shared<Held>();
    if (header.has_bos && memory_in->slots > 1) held->without_bos = ViewSlots(*memory_in, 1, memory_in->slots);
    held->whole = std::move(memory_in);
    memory = std::shared_ptr<const Memory>(held, held->whole.get());
    behind_another = held->without_bos.layers.empty() ? held->whole.get() : &held->without_bos;
  }

  std::string method;
  ArtifactHeader header;
  std::shared_ptr<const Memory> memory;  // owns a Held
  const Memory* behind_another = nullptr;
  int64_t bytes = 0;  // allocated
  uint64_t last_use = 0;
  uint64_t leaving = 0;  // which copy to the host tier it waits for
};

// What a copy of a memory will take of a pool.
int64_t BytesIn(const BufferPool& pool, const Memory& memory) {
  int64_t bytes = 0;
  for (const BufferExtent& extent : Extents(memory)) bytes += static_cast<int64_t>(pool.BlockBytes(extent.bytes));
  return bytes;
}

// A memory that was forgotten or replaced while somebody held it: it still takes its room.
struct Departed {
  std::weak_ptr<const Memory> memory;
  int64_t bytes = 0;
};

// One load in progress; those who want the same cache wait for it.
struct Load {
  bool done = false;
  absl::Status status;
  PinnedMemory pinned;
  int64_t promised = 0;  // bytes of the budget
  // Published or forgotten meanwhile: what was loaded may be of another version.
  bool stale = false;
};

}  // namespace

class Directory::Impl {
 public:
  Impl(const Context& ctx, std::shared_ptr<const Weights> weights, ArtifactFingerprints fingerprints, Store* store,
       const DirectoryOptions& options)
      : ctx_(ctx),
        weights_(std::move(weights)),
        fingerprints_(std::move(fingerprints)),
        store_(store),
        options_(options),
        observer_(options.observer != nullptr ? options.observer : &silent_) {
    ctx_.tape = nullptr;
    if (options_.host_budget_bytes > 0) tier_ = std::make_unique<HostTier>(ctx_, options_.host_budget_bytes);
  }

  absl::StatusOr<PinnedMemory> Pin(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) {
    Key key{tenant, corpus_id, cache_id};
    if (cache_id.empty()) {
      STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactRow newest, store_->GetNewestArtifact(tenant, corpus_id));
      std::get<2>(key) = newest.cache_id;
    }
    while (true) {
      std::shared_ptr<Load> load;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        StayLocked(key);
        if (auto found = residents_.find(key); found != residents_.end()) {
          found->second.last_use = ++clock_;
          PinnedMemory pinned = MakePin(key, found->second);
          pinned.was_resident = true;
          lock.unlock();
          observer_->OnRoute(pinned.method, "hot");
          return pinned;
        }
        if (auto found = loads_.find(key); found != loads_.end()) {
          load = found->second;
          const Waiting waiting(&waiting_);
          loaded_.wait(lock, [&] { return load->done; });
          if (load->stale) continue;
          if (!load->status.ok()) return load->status;
          return load->pinned;
        }
        load = std::make_shared<Load>();
        loads_.emplace(key, load);
      }
      const Waiting waiting(&waiting_);
      const absl::Time begin = absl::Now();
      std::string method;
      const char* tier = "disk";
      absl::StatusOr<Resident> resident = absl::UnknownError("");
      if (std::optional<HostCopy> copy; tier_ && (copy = tier_->Find(key))) {
        tier = "host";
        method = copy->method;
        resident = Restore(*copy, load.get());
      } else {
        resident = LoadResident(key, load.get(), &method);
      }
      const absl::Duration took = absl::Now() - begin;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (resident.ok() && !load->stale) {
          load->pinned = MakePin(key, KeepLocked(key, *std::move(resident)));
          load->pinned.load_time = took;
        } else if (!resident.ok()) {
          load->status = resident.status();
        } else {
          resident = absl::AbortedError("");  // freed before its promise ends
        }
        EndLoadLocked(key, load);
      }
      if (load->stale) continue;
      const bool warm = tier[0] == 'h';
      if (load->status.ok()) {
        observer_->OnLoad(tier, took);
        observer_->OnResident(load->pinned.header);
      }
      observer_->OnRoute(method.empty() ? "UNKNOWN" : method, !load->status.ok() ? "failed" : warm ? "warm" : "cold");
      if (!load->status.ok()) return load->status;
      return load->pinned;
    }
  }

  void Publish(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id, const ArtifactRow& row,
               const ArtifactHeader& header, std::shared_ptr<const Memory> memory) {
    const Key key{tenant, corpus_id, cache_id};
    // As queries read it, where that is not as it lies: else each would make a copy of its own.
    if (ctx_.backend->fused().has_steps() && !IsPacked(*memory, options_.dtype)) {
      memory = PackMemory(ctx_, *memory, options_.dtype);
    }
    // Without room it stays in the store, and the first query loads it or is told why it cannot.
    if (!memory) {
      std::lock_guard<std::mutex> lock(mutex_);
      return RemoveLocked(key);
    }
    Resident resident(row.method, header, std::move(memory));
    const auto load = std::make_shared<Load>();
    std::unique_lock<std::mutex> lock(mutex_);
    RemoveLocked(key);
    // Queries that come while room is made wait for it like for a load.
    loads_[key] = load;
    if (MakeRoom(&lock, resident.bytes, load.get()).ok() && !load->stale) {
      load->pinned = MakePin(key, KeepLocked(key, std::move(resident)));
      load->pinned.was_resident = true;
    } else {
      load->stale = true;
    }
    EndLoadLocked(key, load);
    lock.unlock();
    if (!load->stale) observer_->OnResident(header);
    // Who deleted or replaced it between the store's commit and here forgot what was not there yet.
    const absl::StatusOr<ArtifactRow> now = store_->GetArtifact(tenant, corpus_id, cache_id);
    if (!now.ok() || now->etag != row.etag) Forget(tenant, corpus_id, cache_id);
  }

  void Forget(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Key> keys;
    auto matches = [&](const Key& key) {
      return std::get<0>(key) == tenant && std::get<1>(key) == corpus_id &&
             (cache_id.empty() || std::get<2>(key) == cache_id);
    };
    for (const auto& [key, resident] : residents_) {
      if (matches(key)) keys.push_back(key);
    }
    for (const auto& [key, resident] : leaving_) {
      if (matches(key)) keys.push_back(key);
    }
    for (const auto& [key, load] : loads_) {
      if (matches(key)) keys.push_back(key);
    }
    if (tier_) {
      for (const Key& key : tier_->Keys()) {
        if (matches(key)) keys.push_back(key);
      }
    }
    for (const Key& key : keys) RemoveLocked(key);
  }

  bool GiveUp(int64_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t given = 0;
    for (int64_t freed = 0; freed < bytes; ++given) {
      const auto victim = OldestUnpinnedLocked();
      if (victim == residents_.end()) break;
      freed += victim->second.bytes;
      residents_.erase(victim);
    }
    if (given > 0) {
      STILLHOUSE_LOG(WARNING) << "the device had no memory left for " << bytes << " bytes: " << given
                              << " resident memories were dropped; lower --resident-memory or --kv-memory";
      return true;
    }
    if (copies_ == 0) return false;
    room_.wait(lock, [this, before = left_] { return left_ != before; });
    return true;
  }

  bool IsResident(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) const {
    const Key key{tenant, corpus_id, cache_id};
    std::lock_guard<std::mutex> lock(mutex_);
    return residents_.contains(key) || leaving_.contains(key);
  }

  ResidentStats stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    ResidentStats stats;
    stats.waiting = waiting_.load();
    std::map<std::string, ResidentStats::ByMethod> by_method;
    for (const auto& [key, resident] : residents_) {
      const int64_t canonical = resident.memory->canonical_bytes();
      ++stats.memories;
      stats.canonical_bytes += canonical;
      stats.allocated_bytes += resident.bytes;
      ResidentStats::ByMethod& method = by_method[resident.method];
      method.method = resident.method;
      ++method.memories;
      method.canonical_bytes += canonical;
    }
    for (const auto& [key, resident] : leaving_) stats.allocated_bytes += resident.bytes;
    for (const Departed& departed : departed_) {
      if (!departed.memory.expired()) stats.allocated_bytes += departed.bytes;
    }
    if (tier_) {
      const HostTier::Stats host = tier_->stats();
      stats.host_memories = host.memories;
      stats.host_bytes = host.taken;
    }
    for (auto& [name, method] : by_method) stats.by_method.push_back(std::move(method));
    return stats;
  }

  const ArtifactFingerprints& fingerprints() const { return fingerprints_; }

 private:
  // One caller that waits for a memory to be loaded, as long as it lives.
  class Waiting {
   public:
    explicit Waiting(std::atomic<int64_t>* count) : count_(count) { count_->fetch_add(1); }
    ~Waiting() { count_->fetch_sub(1); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    std::atomic<int64_t>* count_;
  };

  static PinnedMemory MakePin(const Key& key, const Resident& resident) {
    PinnedMemory pinned;
    std::tie(pinned.tenant, pinned.corpus_id, pinned.cache_id) = key;
    pinned.method = resident.method;
    pinned.header = resident.header;
    pinned.memory = resident.memory;
    pinned.behind_another = std::shared_ptr<const Memory>(resident.memory, resident.behind_another);
    pinned.load_time = absl::ZeroDuration();
    return pinned;
  }

  Resident& KeepLocked(const Key& key, Resident resident) {
    Resident& kept = residents_[key];
    kept = std::move(resident);
    kept.last_use = ++clock_;
    return kept;
  }

  // The load's promise ends: what it brought counts as itself, or was let go.
  void EndLoadLocked(const Key& key, const std::shared_ptr<Load>& load) {
    promised_bytes_ -= std::exchange(load->promised, 0);
    if (auto found = loads_.find(key); found != loads_.end() && found->second == load) loads_.erase(found);
    load->done = true;
    loaded_.notify_all();
    room_.notify_all();
  }

  // Forgets a cache in every tier and tells a load in progress that it is out of date.
  void RemoveLocked(const Key& key) {
    for (auto* held : {&residents_, &leaving_}) {
      if (auto found = held->find(key); found != held->end()) {
        if (found->second.memory.use_count() > 1) departed_.push_back({found->second.memory, found->second.bytes});
        held->erase(found);
      }
    }
    if (auto found = loads_.find(key); found != loads_.end()) found->second->stale = true;
    if (tier_) tier_->Forget(key);
  }

  // One that is wanted again while it is copied to the host tier has not gone.
  void StayLocked(const Key& key) {
    if (auto node = leaving_.extract(key)) residents_.insert(std::move(node));
  }

  std::map<Key, Resident>::iterator OldestUnpinnedLocked() {
    auto oldest = residents_.end();
    for (auto it = residents_.begin(); it != residents_.end(); ++it) {
      // Copies are made under the lock or from copies: a count of one cannot grow meanwhile.
      if (it->second.memory.use_count() > 1) continue;
      if (oldest == residents_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
    }
    return oldest;
  }

  int64_t UsedLocked() {
    std::erase_if(departed_, [](const Departed& d) { return d.memory.expired(); });
    int64_t used = promised_bytes_;
    for (const auto& [key, resident] : residents_) used += resident.bytes;
    for (const auto& [key, resident] : leaving_) used += resident.bytes;
    for (const Departed& departed : departed_) used += departed.bytes;
    return used;
  }

  // Sends one on its way to the host tier; at once where there is none, or where a copy lies there already.
  void LeaveLocked(std::map<Key, Resident>::iterator victim) {
    auto node = residents_.extract(victim);
    const Key& key = node.key();
    Resident& resident = node.mapped();
    if (!tier_ || tier_->Has(key)) return;
    const uint64_t number = ++copies_begun_;
    resident.leaving = number;
    ++copies_;
    tier_->Keep(key, resident.method, resident.header, resident.memory, [this, key, number] {
      std::lock_guard<std::mutex> lock(mutex_);
      // Freed under the lock: who finds the room in the books finds it in the pool.
      if (auto found = leaving_.find(key); found != leaving_.end() && found->second.leaving == number) {
        leaving_.erase(found);
      }
      --copies_;
      ++left_;
      room_.notify_all();
    });
    leaving_.insert(std::move(node));
  }

  // Promises `bytes` of the budget to a load. Least recently used memories that nobody holds go until they fit; waits
  // for those that are being copied. RESOURCE_EXHAUSTED if memories in use leave no room, or the budget never has it.
  absl::Status MakeRoom(std::unique_lock<std::mutex>* lock, int64_t bytes, Load* load) {
    // One that can never fit drives nothing out.
    if (bytes > options_.budget_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the memory needs ", bytes, " bytes, and all memories together have a budget of ", options_.budget_bytes,
          ": build it with fewer slots, or give the server more (--resident-memory)"));
    }
    while (true) {
      const int64_t missing = UsedLocked() + bytes - options_.budget_bytes;
      if (missing <= 0) {
        load->promised = bytes;
        promised_bytes_ += bytes;
        return absl::OkStatus();
      }
      int64_t leaving = 0;
      for (const auto& [key, resident] : leaving_) leaving += resident.bytes;
      if (leaving < missing) {
        if (const auto victim = OldestUnpinnedLocked(); victim != residents_.end()) {
          LeaveLocked(victim);
          continue;
        }
      }
      // Other loads' promises may end too, but as memories in use: they are nothing to wait for.
      if (copies_ > 0) {
        room_.wait(*lock, [this, before = left_] { return left_ != before; });
        continue;
      }
      return absl::ResourceExhaustedError(
          absl::StrCat("the memory needs ", bytes, " bytes, and memories in use leave no room in the budget of ",
                       options_.budget_bytes, " bytes: try again when other queries have ended"));
    }
  }

  static absl::Status NoDeviceMemory(int64_t bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the memory needs ", bytes, " bytes, and the device has none left: try again when other queries have ended"));
  }

  // From the host tier: one copy.
  absl::StatusOr<Resident> Restore(const HostCopy& copy, Load* load) {
    BufferPool& pool = ctx_.pool();
    const int64_t bytes = BytesIn(pool, *copy.memory);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      STILLHOUSE_RETURN_IF_ERROR(MakeRoom(&lock, bytes, load));
    }
    std::optional<MemoryCopy> up = StartCopy(ctx_, *copy.memory, pool);
    if (!up) return NoDeviceMemory(bytes);
    up->Wait();
    return Resident(copy.method, copy.header, std::move(up->memory));
  }

  // From the store: read, verified, unpacked.
  absl::StatusOr<Resident> LoadResident(const Key& key, Load* load, std::string* method) {
    const auto& [tenant, corpus_id, cache_id] = key;
    absl::StatusOr<StoredArtifact> stored = store_->OpenArtifactFile(tenant, corpus_id, cache_id);
    if (!stored.ok() && stored.status().code() != absl::StatusCode::kDataLoss) return stored.status();
    absl::Status status = stored.status();
    std::string sha256;
    if (status.ok()) {
      *method = stored->row.method;
      sha256 = stored->row.sha256;
      absl::StatusOr<Artifact> artifact = OpenArtifact(stored->file);
      if (artifact.ok()) {
        STILLHOUSE_RETURN_IF_ERROR(CheckFingerprints(artifact->header().fingerprints, Expected(artifact->header())));
        {
          std::unique_lock<std::mutex> lock(mutex_);
          STILLHOUSE_RETURN_IF_ERROR(MakeRoom(&lock, LoadedBytes(ctx_, artifact->header(), options_.dtype), load));
        }
        absl::StatusOr<std::shared_ptr<const Memory>> memory =
            LoadMemory(ctx_, weights_->config, *artifact, options_.dtype);
        if (memory.ok()) return Resident(*method, artifact->header(), *std::move(memory));
        status = memory.status();
      } else {
        status = artifact.status();
      }
    }
    if (status.code() != absl::StatusCode::kDataLoss) return status;
    // Damaged: kept from every later query, and out of the way for an operator to look at.
    observer_->OnChecksumFailure();
    const absl::Status quarantined =
        store_->QuarantineArtifact(tenant, corpus_id, cache_id, ToStd(status.message()), sha256);
    STILLHOUSE_LOG(WARNING) << "cache " << corpus_id << "/" << cache_id << " is damaged (" << status.message()
                            << "), quarantine: " << quarantined.ToString();
    return absl::DataLossError("the stored cache is damaged and was set aside: build it again");
  }

  // What an artifact must say: the element type is its own business, every one is read.
  ArtifactFingerprints Expected(const ArtifactHeader& header) const {
    ArtifactFingerprints expected = fingerprints_;
    expected.dtype = header.fingerprints.dtype;
    return expected;
  }

  Context ctx_;
  std::shared_ptr<const Weights> weights_;
  const ArtifactFingerprints fingerprints_;
  Store* store_;
  const DirectoryOptions options_;
  DirectoryObserver silent_;
  DirectoryObserver* observer_;

  mutable std::mutex mutex_;
  std::condition_variable loaded_;
  std::condition_variable room_;  // a copy to the host tier ended
  std::atomic<int64_t> waiting_{0};
  std::map<Key, Resident> residents_;
  std::map<Key, Resident> leaving_;  // being copied to the host tier; nobody holds them
  std::map<Key, std::shared_ptr<Load>> loads_;
  int64_t promised_bytes_ = 0;  // to loads in progress
  std::vector<Departed> departed_;
  uint64_t clock_ = 0;
  uint64_t copies_begun_ = 0;
  int64_t copies_ = 0;              // to the host tier, under way
  int64_t left_ = 0;                // that ended so far
  std::unique_ptr<HostTier> tier_;  // last: its thread calls back
};

Directory::Directory(const Context& ctx, std::shared_ptr<const Weights> weights, ArtifactFingerprints fingerprints,
                     Store* store, const DirectoryOptions& options)
    : impl_(std::make_unique<Impl>(ctx, std::move(weights), std::move(fingerprints), store, options)) {}
Directory::~Directory() = default;
absl::StatusOr<PinnedMemory> Directory::Pin(std::string_view tenant, std::string_view corpus_id,
                                            std::string_view cache_id) {
  return impl_->Pin(tenant, corpus_id, cache_id);
}
void Directory::Publish(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id,
                        const ArtifactRow& row, const ArtifactHeader& header, std::shared_ptr<const Memory> memory) {
  impl_->Publish(tenant, corpus_id, cache_id, row, header, std::move(memory));
}
void Directory::Forget(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) {
  impl_->Forget(tenant, corpus_id, cache_id);
}
bool Directory::IsResident(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) const {
  return impl_->IsResident(tenant, corpus_id, cache_id);
}
bool Directory::GiveUp(int64_t bytes) { return impl_->GiveUp(bytes); }
ResidentStats Directory::stats() const { return impl_->stats(); }
const ArtifactFingerprints& Directory::fingerprints() const { return impl_->fingerprints(); }

}  // namespace stillhouse
