// The memories that a request names, held.
#ifndef STILLHOUSE_SERVER_SERVICE_PINNED_CACHES_H_
#define STILLHOUSE_SERVER_SERVICE_PINNED_CACHES_H_

#include <google/protobuf/repeated_ptr_field.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/service/service_context.h"
#include "server/tenancy/authenticator.h"
#include "stillhouse/v1/inference.pb.h"

namespace stillhouse {

struct PinnedCaches {
  std::vector<std::shared_ptr<const Memory>> memories;  // in the request's order
  std::vector<v1::CacheUse> uses;
  std::vector<std::string> warnings;  // sentences for people
  absl::Duration load_time;
  int64_t slots = 0;
};

// Resolves and pins each name. May load from the disk: for the work pool. NOT_FOUND for what is not the caller's.
absl::StatusOr<PinnedCaches> PinCaches(const ServiceContext& service, const Caller& caller,
                                       const google::protobuf::RepeatedPtrField<std::string>& names);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_PINNED_CACHES_H_
