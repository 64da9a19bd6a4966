// Which memories are in memory: the only way from a cache's name to its keys and values.
#ifndef STILLHOUSE_SERVER_CORPUS_DIRECTORY_H_
#define STILLHOUSE_SERVER_CORPUS_DIRECTORY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cache_store/artifact.h"
#include "cache_store/store.h"
#include "server/model/weights.h"
#include "server/state/memory.h"

namespace stillhouse {

// A resident memory, held: it stays as long as a copy of this does, also after its cache was deleted or replaced.
struct PinnedMemory {
  std::string tenant, corpus_id, cache_id;
  std::string method;     // "CARTRIDGE", …
  ArtifactHeader header;  // fingerprints, slots, quality report
  std::shared_ptr<const Memory> memory;
  // The same behind another memory in one query: without its BOS column, which a sequence sees once. `memory` itself
  // where it has none.
  std::shared_ptr<const Memory> behind_another;
  bool was_resident = false;  // false: this call loaded it, from the host or from the store
  absl::Duration load_time;   // zero if it was resident
};

struct ResidentStats {
  int64_t memories = 0;
  int64_t canonical_bytes = 0;
  int64_t allocated_bytes = 0;  // of the device: resident ones, and those that are not gone yet
  int64_t waiting = 0;          // callers whose memory is being loaded
  int64_t host_memories = 0;    // with a copy in the host tier
  int64_t host_bytes = 0;       // that the host tier took
  struct ByMethod {
    std::string method;
    int64_t memories = 0;
    int64_t canonical_bytes = 0;
  };
  std::vector<ByMethod> by_method;
};

// Called from any thread.
class DirectoryObserver {
 public:
  virtual ~DirectoryObserver() = default;
  // outcome: hot (resident), warm (from the host tier), cold (from the store), failed.
  virtual void OnRoute(std::string_view method, std::string_view outcome) {}
  virtual void OnLoad(std::string_view tier, absl::Duration duration) {}  // tier: host, disk
  virtual void OnResident(const ArtifactHeader& header) {}                // a memory was loaded, or published
  virtual void OnChecksumFailure() {}
};

struct DirectoryOptions {
  int64_t budget_bytes = int64_t{2} << 30;  // resident memories; least recently used unpinned ones go first
  int64_t host_budget_bytes = 0;            // copies of those that went, in host memory; 0: none are kept
  DType dtype = DType::kF32;                // of resident memories; bf16 on CUDA only
  DirectoryObserver* observer = nullptr;
};

// Loads on the caller's thread (never the engine's), once per cache however many callers wait, and answers when the
// bytes are there. What goes for want of room is copied to the host tier (host_tier.h) beside the device's work, and
// takes its room until it was copied: callers who need the room wait for that, nobody else. From the host tier it comes
// back by one copy; without one (no budget, no host memory) it is read, verified and unpacked again. Bytes count as
// the device's pool hands them out, and are promised before they are asked for. A corrupt artifact is quarantined in
// the store and answered with DATA_LOSS; one of another model, tokenizer, RoPE or template with FAILED_PRECONDITION
// naming what differs. Thread-safe.
class Directory {
 public:
  Directory(const Context& ctx, std::shared_ptr<const Weights> weights, ArtifactFingerprints fingerprints, Store* store,
            const DirectoryOptions& options);
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  // cache_id empty: the corpus's newest cache. NOT_FOUND if there is none; RESOURCE_EXHAUSTED if pinned memories leave
  // no room, or the budget is too small for it.
  absl::StatusOr<PinnedMemory> Pin(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id);

  // Makes a freshly stored artifact the resident one, atomically; holders of the old version keep it. Called after the
  // store's commit; where `row` is not the store's any more, the cache is forgotten.
  void Publish(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id, const ArtifactRow& row,
               const ArtifactHeader& header, std::shared_ptr<const Memory> memory);
  // Forgets a deleted cache (or, with cache_id empty, all of a corpus's). Holders keep theirs.
  void Forget(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id);
  // Last resort of work that was admitted and finds no memory on the device: drops resident memories that nobody holds,
  // without copies, until `bytes` were given back, or else waits for a copy on its way to the host. False if there is
  // nothing to give up. For BufferPool::SetReclaimer; not called from this class's own work under its lock.
  bool GiveUp(int64_t bytes);

  bool IsResident(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id) const;
  ResidentStats stats() const;

  const ArtifactFingerprints& fingerprints() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The header of a stored memory: `header` with its shape fields filled in from the memory.
ArtifactHeader DescribeMemory(const ModelConfig& config, const Memory& memory, ArtifactHeader header,
                              bool has_positions);

// A memory as artifact sections and back. The header's shape fields are filled from the memory. `positions`, if given,
// are those of the keys, per layer [kv_heads, slots]; without them slot i sits at position i.
// A loaded memory lies as PackMemory would lay it, in `dtype`.
absl::StatusOr<std::shared_ptr<const Memory>> LoadMemory(const Context& ctx, const ModelConfig& config,
                                                         const Artifact& artifact, DType dtype = DType::kF32);
// What LoadMemory will take of the device.
int64_t LoadedBytes(const Context& ctx, const ArtifactHeader& header, DType dtype);
absl::Status StoreMemory(const Context& ctx, const ModelConfig& config, const Memory& memory, ArtifactHeader header,
                         BlobWriter* blob, absl::Span<const std::vector<int32_t>> positions = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_DIRECTORY_H_
