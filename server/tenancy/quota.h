// The door through which every request for a tenant's share passes: how many streams at once, how large a body.
//
// Limits are the server's, the same for every tenant. This is where per-tenant quotas belong: each Admit call already
// says which tenant asks and for how much.
#ifndef STILLHOUSE_SERVER_TENANCY_QUOTA_H_
#define STILLHOUSE_SERVER_TENANCY_QUOTA_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace stillhouse {

struct QuotaLimits {
  int streams_per_tenant = 256;            // queries, uploads and exports at once
  uint64_t corpus_bytes = 1ull << 30;      // largest document
  uint64_t artifact_bytes = 16ull << 30;   // largest imported file
  uint64_t evaluation_bytes = 8ull << 20;  // questions and answers that come with a build
};

// Thread-safe. Must outlive its leases.
class Quota {
 public:
  explicit Quota(QuotaLimits limits) : limits_(limits) {}

  // One stream's place, given back when it is destroyed.
  class StreamLease {
   public:
    StreamLease() = default;
    StreamLease(StreamLease&& other) noexcept;
    StreamLease& operator=(StreamLease&& other) noexcept;
    ~StreamLease();

   private:
    friend class Quota;
    StreamLease(Quota* quota, std::string tenant) : quota_(quota), tenant_(std::move(tenant)) {}
    Quota* quota_ = nullptr;
    std::string tenant_;
  };

  const QuotaLimits& limits() const { return limits_; }

  // RESOURCE_EXHAUSTED with a retry hint when the tenant has all its streams.
  absl::StatusOr<StreamLease> AdmitStream(std::string_view tenant) ABSL_LOCKS_EXCLUDED(mutex_);
  // INVALID_ARGUMENT when the declared size is 0 or above the limit, before a byte is read.
  absl::Status AdmitCorpus(std::string_view tenant, uint64_t bytes) const;
  absl::Status AdmitArtifact(std::string_view tenant, uint64_t bytes) const;
  absl::Status AdmitEvaluation(std::string_view tenant, uint64_t bytes) const;

 private:
  const QuotaLimits limits_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, int> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_QUOTA_H_
