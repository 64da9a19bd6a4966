#include "server/corpus/directory.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

using Key = std::tuple<std::string, std::string, std::string>;  // tenant, corpus, cache

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
};

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
  }

  absl::StatusOr<PinnedMemory> Pin(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) {
    Key key{tenant, corpus_id, cache_id};
    if (cache_id.empty()) {
      STILLHOUSE_ASSIGN_OR_RETURN(std::get<2>(key), Newest(tenant, corpus_id));
    }
    while (true) {
      std::shared_ptr<Load> load;
      {
        std::unique_lock<std::mutex> lock(mutex_);
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
      ArtifactRow row;
      absl::StatusOr<Resident> resident = LoadResident(key, &row);
      const absl::Duration took = absl::Now() - begin;
      std::unique_lock<std::mutex> lock(mutex_);
      if (resident.ok() && !load->stale) {
        Resident& kept = residents_[key];
        kept = *std::move(resident);
        kept.last_use = ++clock_;
        load->pinned = MakePin(key, kept);
        load->pinned.load_time = took;
      } else if (!resident.ok()) {
        load->status = resident.status();
      }
      promised_bytes_ -= std::exchange(promised_[key], 0);
      promised_.erase(key);
      loads_.erase(key);
      load->done = true;
      loaded_.notify_all();
      if (load->stale) continue;
      lock.unlock();
      const std::string& method = load->status.ok() ? load->pinned.method : row.method;
      if (load->status.ok()) observer_->OnLoad(took);
      observer_->OnRoute(method.empty() ? "UNKNOWN" : method, load->status.ok() ? "cold" : "failed");
      if (!load->status.ok()) return load->status;
      return load->pinned;
    }
  }

  void Publish(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id, const ArtifactRow& row,
               const ArtifactHeader& header, std::shared_ptr<const Memory> memory) {
    Key key{tenant, corpus_id, cache_id};
    // As queries read it, where that is not as it lies: else each would make a copy of its own.
    if (ctx_.backend->fused().has_steps() && !IsPacked(*memory, options_.dtype)) {
      memory = PackMemory(ctx_, *memory, options_.dtype);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    RemoveLocked(key);
    Resident resident(row.method, header, std::move(memory));
    resident.last_use = ++clock_;
    // Without room it stays in the store, and the first query loads it or is told why it cannot.
    if (MakeRoomLocked(resident.bytes)) residents_.emplace(std::move(key), std::move(resident));
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
    for (const auto& [key, load] : loads_) {
      if (matches(key)) keys.push_back(key);
    }
    for (const Key& key : keys) RemoveLocked(key);
  }

  bool IsResident(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return residents_.contains(Key{tenant, corpus_id, cache_id});
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
    for (const Departed& departed : departed_) {
      if (!departed.memory.expired()) stats.allocated_bytes += departed.bytes;
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

  absl::StatusOr<std::string> Newest(std::string_view tenant, std::string_view corpus_id) {
    STILLHOUSE_RETURN_IF_ERROR(store_->GetCorpus(tenant, corpus_id).status());
    std::string newest;
    absl::Time time = absl::InfinitePast();
    PageRequest page;
    page.page_size = 1000;
    do {
      STILLHOUSE_ASSIGN_OR_RETURN(const Page<ArtifactRow> rows, store_->ListArtifacts(tenant, corpus_id, page));
      for (const ArtifactRow& row : rows.rows) {
        if (!row.quarantined && row.create_time >= time) {
          newest = row.cache_id;
          time = row.create_time;
        }
      }
      page.page_token = rows.next_page_token;
    } while (!page.page_token.empty());
    if (newest.empty()) return absl::NotFoundError("the corpus has no cache yet: build one first");
    return newest;
  }

  // Forgets a resident and tells a load in progress that it is out of date.
  void RemoveLocked(const Key& key) {
    if (auto found = residents_.find(key); found != residents_.end()) {
      if (found->second.memory.use_count() > 1) departed_.push_back({found->second.memory, found->second.bytes});
      residents_.erase(found);
    }
    if (auto found = loads_.find(key); found != loads_.end()) found->second->stale = true;
  }

  // Drops least recently used memories that nobody holds until `bytes` fit. False if pinned ones leave no room.
  bool MakeRoomLocked(int64_t bytes) {
    std::erase_if(departed_, [](const Departed& d) { return d.memory.expired(); });
    int64_t used = promised_bytes_;
    for (const auto& [key, resident] : residents_) used += resident.bytes;
    for (const Departed& departed : departed_) used += departed.bytes;
    while (used + bytes > options_.budget_bytes) {
      auto oldest = residents_.end();
      for (auto it = residents_.begin(); it != residents_.end(); ++it) {
        // Copies are made under the lock or from copies: a count of one cannot grow meanwhile.
        if (it->second.memory.use_count() > 1) continue;
        if (oldest == residents_.end() || it->second.last_use < oldest->second.last_use) oldest = it;
      }
      if (oldest == residents_.end()) return false;
      used -= oldest->second.bytes;
      residents_.erase(oldest);
    }
    return true;
  }

  absl::StatusOr<Resident> LoadResident(const Key& key, ArtifactRow* row) {
    const auto& [tenant, corpus_id, cache_id] = key;
    absl::StatusOr<StoredArtifact> stored = store_->OpenArtifactFile(tenant, corpus_id, cache_id);
    if (!stored.ok() && stored.status().code() != absl::StatusCode::kDataLoss) return stored.status();
    absl::Status status = stored.status();
    if (status.ok()) {
      *row = stored->row;
      absl::StatusOr<Artifact> artifact = OpenArtifact(stored->file);
      if (artifact.ok()) {
        STILLHOUSE_RETURN_IF_ERROR(CheckFingerprints(artifact->header().fingerprints, Expected(artifact->header())));
        const ArtifactHeader& header = artifact->header();
        const int64_t bytes =
            2 * int64_t{header.layers} * header.kv_heads * header.head_dim * header.slots * BlockBytes(options_.dtype) +
            (header.has_beta ? int64_t{header.layers} * header.kv_heads * header.slots * 4 : 0);
        {
          std::lock_guard<std::mutex> lock(mutex_);
          if (!MakeRoomLocked(bytes)) {
            return absl::ResourceExhaustedError(
                absl::StrCat("the memory needs ", bytes, " bytes, and memories in use leave no room in the budget of ",
                             options_.budget_bytes, " bytes: try again when other queries have ended"));
          }
          promised_[key] = bytes;
          promised_bytes_ += bytes;
        }
        absl::StatusOr<std::shared_ptr<const Memory>> memory =
            LoadMemory(ctx_, weights_->config, *artifact, options_.dtype);
        if (memory.ok()) {
          return Resident(row->method, header, *std::move(memory));
        }
        status = memory.status();
      } else {
        status = artifact.status();
      }
    }
    if (status.code() != absl::StatusCode::kDataLoss) return status;
    // Damaged: kept from every later query, and out of the way for an operator to look at.
    observer_->OnChecksumFailure();
    const absl::Status quarantined =
        store_->QuarantineArtifact(tenant, corpus_id, cache_id, ToStd(status.message()), row->sha256);
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
  std::atomic<int64_t> waiting_{0};
  std::map<Key, Resident> residents_;
  std::map<Key, std::shared_ptr<Load>> loads_;
  std::map<Key, int64_t> promised_;  // of loads in progress
  int64_t promised_bytes_ = 0;
  std::vector<Departed> departed_;
  uint64_t clock_ = 0;
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
ResidentStats Directory::stats() const { return impl_->stats(); }
const ArtifactFingerprints& Directory::fingerprints() const { return impl_->fingerprints(); }

}  // namespace stillhouse
