#include "server/tenancy/quota.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_store/store.h"
#include "kernels/base/status.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

constexpr char kTooManyStreams[] = "TOO_MANY_STREAMS";
constexpr char kRequestsPerMinute[] = "REQUESTS_PER_MINUTE";
constexpr char kTokensPerMinute[] = "TOKENS_PER_MINUTE";
constexpr char kTooManyCorporaBytes[] = "TOO_MANY_CORPORA_BYTES";
constexpr char kTooManyCacheBytes[] = "TOO_MANY_CACHE_BYTES";
constexpr std::array<std::string_view, 5> kQuotaReasons = {kTooManyStreams, kRequestsPerMinute, kTokensPerMinute,
                                                           kTooManyCorporaBytes, kTooManyCacheBytes};

absl::Status RateRefusal(const char* what, const char* reason, int64_t limit, absl::Duration wait) {
  return WithRetryAfter(
      WithReason(absl::ResourceExhaustedError(absl::StrCat("your tenant has used its ", limit, " ", what,
                                                           " a minute; retry in ", absl::FormatDuration(wait))),
                 reason, {{"limit", absl::StrCat(limit)}}),
      wait);
}

absl::Status CheckSize(const char* what, const char* reason, uint64_t bytes, uint64_t limit) {
  if (bytes == 0) {
    return WithReason(absl::InvalidArgumentError(absl::StrCat(what, " is empty; size_bytes must be at least 1")),
                      reason);
  }
  if (bytes <= limit) return absl::OkStatus();
  return WithReason(
      absl::InvalidArgumentError(absl::StrCat(what, " has ", bytes, " bytes; this server takes at most ", limit)),
      reason, {{"limit_bytes", absl::StrCat(limit)}});
}

}  // namespace

Quota::Lease::Lease(Lease&& other) noexcept
    : quota_(std::exchange(other.quota_, nullptr)),
      counts_(other.counts_),
      tenant_(std::move(other.tenant_)),
      amount_(other.amount_) {}

Quota::Lease& Quota::Lease::operator=(Lease&& other) noexcept {
  std::swap(quota_, other.quota_);
  std::swap(counts_, other.counts_);
  std::swap(tenant_, other.tenant_);
  std::swap(amount_, other.amount_);
  return *this;
}

Quota::Lease::~Lease() {
  if (quota_ == nullptr) return;
  absl::MutexLock lock(&quota_->mutex_);
  Counts& counts = quota_->*counts_;
  const auto it = counts.find(tenant_);
  if ((it->second -= amount_) == 0) counts.erase(it);
}

absl::StatusOr<Quota::Lease> Quota::AdmitStream(std::string_view tenant) {
  std::string key(tenant);
  absl::MutexLock lock(&mutex_);
  uint64_t& streams = streams_[key];
  if (streams >= static_cast<uint64_t>(limits_.streams_per_tenant)) {
    return WithRetryAfter(
        WithReason(absl::ResourceExhaustedError(absl::StrCat("your tenant has ", streams,
                                                             " streams open, the most it may; end one or retry later")),
                   kTooManyStreams, {{"limit", absl::StrCat(limits_.streams_per_tenant)}}),
        absl::Seconds(1));
  }
  ++streams;
  return Lease(this, &Quota::streams_, std::move(key), 1);
}

RateBucket* Quota::BucketOf(Buckets* buckets, std::string_view tenant, int64_t per_minute, absl::Time now) {
  if (per_minute <= 0) return nullptr;
  return &buckets->try_emplace(std::string(tenant), static_cast<double>(per_minute), now).first->second;
}

absl::Status Quota::AdmitRequest(std::string_view tenant) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  RateBucket* const requests = BucketOf(&requests_, tenant, limits_.requests_per_minute, now);
  RateBucket* const tokens = BucketOf(&tokens_, tenant, limits_.tokens_per_minute, now);
  const absl::Duration for_request = requests == nullptr ? absl::ZeroDuration() : requests->UntilOne(now);
  const absl::Duration for_tokens = tokens == nullptr ? absl::ZeroDuration() : tokens->UntilOne(now);
  if (for_tokens > for_request) {
    return RateRefusal("tokens", kTokensPerMinute, limits_.tokens_per_minute, for_tokens);
  }
  if (for_request > absl::ZeroDuration()) {
    return RateRefusal("requests", kRequestsPerMinute, limits_.requests_per_minute, for_request);
  }
  if (requests != nullptr) requests->Take(1, now);
  return absl::OkStatus();
}

void Quota::ChargeTokens(std::string_view tenant, int64_t count) {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  RateBucket* const tokens = BucketOf(&tokens_, tenant, limits_.tokens_per_minute, now);
  if (tokens != nullptr) tokens->Take(static_cast<double>(count), now);
}

absl::StatusOr<Quota::Lease> Quota::AdmitBytes(Store* store, std::string_view tenant, Stored kind, uint64_t bytes,
                                               uint64_t freed) {
  const bool corpora = kind == Stored::kCorpora;
  const uint64_t limit = corpora ? limits_.stored_corpora_bytes : limits_.stored_caches_bytes;
  if (limit == 0 || bytes == 0) return Lease();
  Counts Quota::*const counts = corpora ? &Quota::corpora_bytes_ : &Quota::caches_bytes_;
  std::string key(tenant);
  absl::MutexLock admission(&admission_);
  uint64_t used = 0;
  {
    // Before the store is asked: what arrives there meanwhile counts twice for a moment, never not at all.
    absl::MutexLock lock(&mutex_);
    const auto it = (this->*counts).find(key);
    if (it != (this->*counts).end()) used = it->second;
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const TenantUsage usage, store->GetUsage(tenant));
  used += corpora ? usage.corpus_bytes + usage.upload_bytes : usage.cache_bytes;
  used -= std::min(used, freed);
  if (bytes > limit || used > limit - bytes) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "your tenant's ", corpora ? "documents" : "caches", " may have ", limit, " bytes in all and have ", used,
            " with what is on its way: there is no room for ", bytes, " more; delete ",
            corpora ? "documents, or abort uploads, that are not needed" : "caches that are not needed")),
        corpora ? kTooManyCorporaBytes : kTooManyCacheBytes,
        {{"limit_bytes", absl::StrCat(limit)}, {"used_bytes", absl::StrCat(used)}});
  }
  absl::MutexLock lock(&mutex_);
  (this->*counts)[key] += bytes;
  return Lease(this, counts, std::move(key), bytes);
}

absl::Status Quota::AdmitCorpus(std::string_view tenant, uint64_t bytes) const {
  return CheckSize("the document", "INVALID_SIZE", bytes, limits_.corpus_bytes);
}

absl::Status Quota::AdmitArtifact(std::string_view tenant, uint64_t bytes) const {
  return CheckSize("the file", "INVALID_SIZE", bytes, limits_.artifact_bytes);
}

absl::Status Quota::AdmitEvaluation(std::string_view tenant, uint64_t bytes) const {
  if (bytes == 0) return absl::OkStatus();
  return CheckSize("the list of questions and answers", "INVALID_SIZE", bytes, limits_.evaluation_bytes);
}

bool IsQuotaReason(std::string_view reason) {
  return std::find(kQuotaReasons.begin(), kQuotaReasons.end(), reason) != kQuotaReasons.end();
}

}  // namespace stillhouse
