#include "server/service/live_requests.h"

#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/service/validation.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"

namespace stillhouse {

absl::StatusOr<LiveRequests::Lease> LiveRequests::Add(std::string_view tenant, std::string_view id) {
  STILLHOUSE_RETURN_IF_ERROR(CheckRequestId(id));
  std::string own = id.empty() ? MakeUuid() : std::string(id);
  std::string key = StrCat(tenant, "/", own);
  absl::MutexLock lock(&mutex_);
  if (!ids_.insert(key).second) {
    return WithReason(
        absl::AlreadyExistsError(StrCat("a request with id ", own, " is in flight; wait for it or use a new id")),
        "REQUEST_IN_FLIGHT", {{"request_id", own}});
  }
  return Lease(this, std::move(key), std::move(own));
}

void LiveRequests::Remove(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  ids_.erase(key);
}

}  // namespace stillhouse
