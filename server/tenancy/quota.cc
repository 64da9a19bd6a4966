#include "server/tenancy/quota.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

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

Quota::StreamLease::StreamLease(StreamLease&& other) noexcept
    : quota_(std::exchange(other.quota_, nullptr)), tenant_(std::move(other.tenant_)) {}

Quota::StreamLease& Quota::StreamLease::operator=(StreamLease&& other) noexcept {
  std::swap(quota_, other.quota_);
  std::swap(tenant_, other.tenant_);
  return *this;
}

Quota::StreamLease::~StreamLease() {
  if (quota_ == nullptr) return;
  absl::MutexLock lock(&quota_->mutex_);
  const auto it = quota_->streams_.find(tenant_);
  if (--it->second == 0) quota_->streams_.erase(it);
}

absl::StatusOr<Quota::StreamLease> Quota::AdmitStream(std::string_view tenant) {
  std::string key(tenant);
  absl::MutexLock lock(&mutex_);
  int& streams = streams_[key];
  if (streams >= limits_.streams_per_tenant) {
    return WithRetryAfter(
        WithReason(absl::ResourceExhaustedError(absl::StrCat("your tenant has ", streams,
                                                             " streams open, the most it may; end one or retry later")),
                   "TOO_MANY_STREAMS", {{"limit", absl::StrCat(limits_.streams_per_tenant)}}),
        absl::Seconds(1));
  }
  ++streams;
  return StreamLease(this, std::move(key));
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

}  // namespace stillhouse
