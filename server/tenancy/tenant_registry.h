// Tenants and their keys, as an admin manages them.
#ifndef STILLHOUSE_SERVER_TENANCY_TENANT_REGISTRY_H_
#define STILLHOUSE_SERVER_TENANCY_TENANT_REGISTRY_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_store/store.h"

namespace stillhouse {

struct NewKey {
  ApiKeyRow row;
  std::string secret;  // the whole key as a caller sends it; exists only here
};

// Rules over the store's rows; keeps nothing itself. The store must outlive it. Thread-safe. Errors are the store's,
// and INVALID_ARGUMENT for ids and labels that break the rules.
class TenantRegistry {
 public:
  explicit TenantRegistry(Store* store) : store_(store) {}

  absl::StatusOr<TenantRow> Create(std::string_view tenant, std::string_view display_name, std::string_view request_id);
  absl::StatusOr<TenantRow> Get(std::string_view tenant);
  absl::StatusOr<TenantUsage> Usage(std::string_view tenant);
  absl::StatusOr<Page<TenantRow>> List(const PageRequest& page);
  absl::StatusOr<TenantRow> SetDisplayName(std::string_view tenant, std::string_view display_name,
                                           std::string_view etag);
  absl::Status Delete(std::string_view tenant, std::string_view etag);

  absl::StatusOr<NewKey> CreateKey(std::string_view tenant, std::string_view label);
  absl::StatusOr<std::vector<ApiKeyRow>> ListKeys(std::string_view tenant);
  absl::Status RevokeKey(std::string_view tenant, std::string_view key_id);

 private:
  Store* store_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_TENANT_REGISTRY_H_
