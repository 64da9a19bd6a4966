// The door through which every request for a tenant's share passes: how many streams at once, how large a body, how
// many bytes in all, how many requests and tokens a minute.
//
// Limits are the server's, the same for every tenant, each of which has its own count.
#ifndef STILLHOUSE_SERVER_TENANCY_QUOTA_H_
#define STILLHOUSE_SERVER_TENANCY_QUOTA_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/tenancy/rate_bucket.h"

namespace stillhouse {

class Store;

struct QuotaLimits {
  int streams_per_tenant = 256;            // queries, uploads and exports at once
  uint64_t corpus_bytes = 1ull << 30;      // largest document
  uint64_t artifact_bytes = 16ull << 30;   // largest imported file
  uint64_t evaluation_bytes = 8ull << 20;  // questions and answers that come with a build
  // Of all of a tenant's documents, those whose upload has begun with them, and of all its caches' files; 0: what the
  // disk holds.
  uint64_t stored_corpora_bytes = 0;
  uint64_t stored_caches_bytes = 0;
  int64_t requests_per_minute = 0;  // queries and scores; 0: any number
  int64_t tokens_per_minute = 0;    // that these compute, of prompts and answers; 0: any number
};

enum class Stored : uint8_t { kCorpora, kCaches };

// Thread-safe. Must outlive its leases.
class Quota {
  using Counts = absl::flat_hash_map<std::string, uint64_t>;

 public:
  explicit Quota(QuotaLimits limits, std::function<absl::Time()> now = absl::Now)
      : limits_(limits), now_(std::move(now)) {}

  // What was admitted, a stream's place or bytes on their way into the store; given back when it is destroyed.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();

   private:
    friend class Quota;
    Lease(Quota* quota, Counts Quota::*counts, std::string tenant, uint64_t amount)
        : quota_(quota), counts_(counts), tenant_(std::move(tenant)), amount_(amount) {}
    Quota* quota_ = nullptr;
    Counts Quota::*counts_ = nullptr;
    std::string tenant_;
    uint64_t amount_ = 0;
  };

  const QuotaLimits& limits() const { return limits_; }

  // RESOURCE_EXHAUSTED with a retry hint when the tenant has all its streams.
  absl::StatusOr<Lease> AdmitStream(std::string_view tenant) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes one of the minute's requests. RESOURCE_EXHAUSTED, and nothing is taken, when they are used up or tokens are
  // owed, with the time until that has passed.
  absl::Status AdmitRequest(std::string_view tenant) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes tokens that were computed, however many are left: what is owed delays the next request. Cheap.
  void ChargeTokens(std::string_view tenant, int64_t tokens) ABSL_LOCKS_EXCLUDED(mutex_);
  // Room for `bytes` more, in place of `freed` that the store has: RESOURCE_EXHAUSTED when what the store says that the
  // tenant uses and what is on its way leave less. Hold the lease until the store counts them, or they are given up.
  absl::StatusOr<Lease> AdmitBytes(Store* store, std::string_view tenant, Stored kind, uint64_t bytes,
                                   uint64_t freed = 0) ABSL_LOCKS_EXCLUDED(admission_, mutex_);
  // INVALID_ARGUMENT when the declared size is 0 or above the limit, before a byte is read.
  absl::Status AdmitCorpus(std::string_view tenant, uint64_t bytes) const;
  absl::Status AdmitArtifact(std::string_view tenant, uint64_t bytes) const;
  absl::Status AdmitEvaluation(std::string_view tenant, uint64_t bytes) const;

 private:
  using Buckets = absl::flat_hash_map<std::string, RateBucket>;

  // The tenant's bucket, full where it is new; nullptr where nothing limits it.
  RateBucket* BucketOf(Buckets* buckets, std::string_view tenant, int64_t per_minute, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const QuotaLimits limits_;
  const std::function<absl::Time()> now_;
  absl::Mutex admission_ ABSL_ACQUIRED_BEFORE(mutex_);  // one admission of bytes at a time
  absl::Mutex mutex_;
  Counts streams_ ABSL_GUARDED_BY(mutex_);
  Counts corpora_bytes_ ABSL_GUARDED_BY(mutex_);  // on their way into the store
  Counts caches_bytes_ ABSL_GUARDED_BY(mutex_);
  Buckets requests_ ABSL_GUARDED_BY(mutex_);  // by tenant, as many as have keys
  Buckets tokens_ ABSL_GUARDED_BY(mutex_);
};

// Whether a refusal with this reason is one of a tenant's quota.
bool IsQuotaReason(std::string_view reason);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_QUOTA_H_
