#include "server/tenancy/tenant_registry.h"

#include "kernels/base/status.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"

namespace stillhouse {
namespace {

absl::Status CheckLabel(std::string_view text) {
  if (text.size() <= 256) return absl::OkStatus();
  return WithReason(absl::InvalidArgumentError("display_name is longer than 256 bytes"), "INVALID_ARGUMENT",
                    {{"field", "display_name"}});
}

}  // namespace

absl::StatusOr<TenantRow> TenantRegistry::Create(std::string_view tenant, std::string_view display_name,
                                                 std::string_view request_id) {
  STILLHOUSE_RETURN_IF_ERROR(CheckResourceId(tenant, "tenant_id"));
  STILLHOUSE_RETURN_IF_ERROR(CheckLabel(display_name));
  TenantRow row;
  row.tenant = std::string(tenant);
  row.display_name = std::string(display_name);
  return store_->CreateTenant(row, request_id);
}

absl::StatusOr<TenantRow> TenantRegistry::Get(std::string_view tenant) { return store_->GetTenant(tenant); }
absl::StatusOr<TenantUsage> TenantRegistry::Usage(std::string_view tenant) { return store_->GetUsage(tenant); }
absl::StatusOr<Page<TenantRow>> TenantRegistry::List(const PageRequest& page) { return store_->ListTenants(page); }

absl::StatusOr<TenantRow> TenantRegistry::SetDisplayName(std::string_view tenant, std::string_view display_name,
                                                         std::string_view etag) {
  STILLHOUSE_RETURN_IF_ERROR(CheckLabel(display_name));
  STILLHOUSE_ASSIGN_OR_RETURN(TenantRow row, store_->GetTenant(tenant));
  row.display_name = std::string(display_name);
  // Without an etag from the caller, the one just read: quotas written meanwhile must not be undone.
  if (!etag.empty()) row.etag = std::string(etag);
  return store_->UpdateTenant(row);
}

absl::Status TenantRegistry::Delete(std::string_view tenant, std::string_view etag) {
  return store_->DeleteTenant(tenant, etag);
}

absl::StatusOr<NewKey> TenantRegistry::CreateKey(std::string_view tenant, std::string_view label) {
  STILLHOUSE_RETURN_IF_ERROR(CheckLabel(label));
  STILLHOUSE_RETURN_IF_ERROR(store_->GetTenant(tenant).status());
  const ApiKey key = MakeApiKey();
  ApiKeyRow row;
  row.key_id = key.id;
  row.tenant = std::string(tenant);
  row.key_sha256 = HashApiKey(key);
  row.label = std::string(label);
  STILLHOUSE_ASSIGN_OR_RETURN(row, store_->InsertApiKey(row));
  return NewKey{row, key.ToString()};
}

absl::StatusOr<std::vector<ApiKeyRow>> TenantRegistry::ListKeys(std::string_view tenant) {
  return store_->ListApiKeys(tenant);
}

absl::Status TenantRegistry::RevokeKey(std::string_view tenant, std::string_view key_id) {
  return store_->RevokeApiKey(tenant, key_id).status();
}

}  // namespace stillhouse
