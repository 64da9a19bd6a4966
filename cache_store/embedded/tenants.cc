#include "cache_store/embedded/embedded_store.h"
#include "cache_store/embedded/page_token.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr char kTenantColumns[] =
    "SELECT tenant, display_name, quotas_json, create_time, etag FROM tenants WHERE tenant = ?1";

TenantRow ReadTenant(const Statement& s) {
  return {s.Text(0), s.Text(1), s.Text(2), absl::FromUnixMicros(s.Int(3)), s.Text(4)};
}
ApiKeyRow ReadKey(const Statement& s) {
  return {s.Text(0),
          s.Text(1),
          s.Text(2),
          s.Text(3),
          absl::FromUnixMicros(s.Int(4)),
          s.IsNull(5) ? absl::InfiniteFuture() : absl::FromUnixMicros(s.Int(5))};
}
absl::Status CheckTenantTexts(const TenantRow& row) {
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the display name", row.display_name, 1024));
  return CheckText("the quotas", row.quotas_json, kMaxJsonText);
}
absl::Status NoSuchTenant(std::string_view tenant) { return absl::NotFoundError(StrCat("no tenant '", tenant, "'")); }
absl::Status NoSuchKey() { return absl::NotFoundError("no such API key"); }

}  // namespace

absl::StatusOr<TenantRow> EmbeddedStore::FindTenant(std::string_view tenant) {
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  STILLHOUSE_RETURN_IF_ERROR(CheckId("tenant", tenant));
  Statement find = db_->Prepare(kTenantColumns);
  find.Bind(tenant);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return NoSuchTenant(tenant);
  return ReadTenant(find);
}

absl::Status EmbeddedStore::RequireTenant(std::string_view tenant) { return FindTenant(tenant).status(); }

absl::StatusOr<TenantRow> EmbeddedStore::CreateTenant(const TenantRow& row, std::string_view request_id) {
  STILLHOUSE_RETURN_IF_ERROR(CheckId("tenant", row.tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckTenantTexts(row));
  if (!request_id.empty()) STILLHOUSE_RETURN_IF_ERROR(CheckToken("request", request_id));
  const std::string fingerprint =
      Sha256Hex(StrCat(row.tenant, "/", row.display_name.size(), "/", row.display_name, row.quotas_json));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  // Requests that make tenants belong to no tenant.
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string made, FindRequest("", request_id, "tenant", fingerprint));
  if (!made.empty()) return FindTenant(made);
  absl::StatusOr<TenantRow> existing = FindTenant(row.tenant);
  if (existing.ok()) return absl::AlreadyExistsError(StrCat("there is a tenant '", row.tenant, "' already"));
  if (!absl::IsNotFound(existing.status())) return existing.status();
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("INSERT INTO tenants VALUES (?1, ?2, ?3, ?4, ?5)")
                                   .Bind(row.tenant, row.display_name, row.quotas_json, NowMicros(), RandomHex(8))
                                   .Run());
    return RecordRequest("", request_id, "tenant", row.tenant, fingerprint);
  }));
  return FindTenant(row.tenant);
}

absl::StatusOr<TenantRow> EmbeddedStore::EnsureTenant(std::string_view tenant) {
  absl::StatusOr<TenantRow> row = GetTenant(tenant);
  if (!absl::IsNotFound(row.status())) return row;
  TenantRow fresh;
  fresh.tenant = std::string(tenant);
  fresh.quotas_json = "{}";
  row = CreateTenant(fresh, {});
  return absl::IsAlreadyExists(row.status()) ? GetTenant(tenant) : row;
}

absl::StatusOr<TenantRow> EmbeddedStore::GetTenant(std::string_view tenant) {
  absl::MutexLock lock(&mu_);
  return FindTenant(tenant);
}

absl::StatusOr<Page<TenantRow>> EmbeddedStore::ListTenants(const PageRequest& request) {
  STILLHOUSE_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size));
  STILLHOUSE_ASSIGN_OR_RETURN(const auto after, ReadPageToken("tenants", request.page_token, 1));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  Statement list = db_->Prepare(
      "SELECT tenant, display_name, quotas_json, create_time, etag FROM tenants WHERE tenant > ?1 ORDER BY tenant "
      "LIMIT ?2");
  list.Bind(after[0], size + 1);
  Page<TenantRow> page;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return page;
    if (page.rows.size() == static_cast<size_t>(size)) {
      page.next_page_token = MakePageToken("tenants", {page.rows.back().tenant});
      return page;
    }
    page.rows.push_back(ReadTenant(list));
  }
}

absl::StatusOr<TenantRow> EmbeddedStore::UpdateTenant(const TenantRow& row) {
  STILLHOUSE_RETURN_IF_ERROR(CheckTenantTexts(row));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const TenantRow current, FindTenant(row.tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckEtag(row.etag, current.etag));
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return db_->Prepare("UPDATE tenants SET display_name = ?2, quotas_json = ?3, etag = ?4 WHERE tenant = ?1")
        .Bind(row.tenant, row.display_name, row.quotas_json, RandomHex(8))
        .Run();
  }));
  return FindTenant(row.tenant);
}

absl::Status EmbeddedStore::DeleteTenant(std::string_view tenant, std::string_view expected_etag) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const TenantRow current, FindTenant(tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckEtag(expected_etag, current.etag));
  {
    Statement used = db_->Prepare(
        "SELECT EXISTS (SELECT 1 FROM corpora WHERE tenant = ?1) OR EXISTS (SELECT 1 FROM uploads WHERE tenant = ?1) "
        "OR "
        "EXISTS (SELECT 1 FROM operations WHERE tenant = ?1 AND end_time IS NULL)");
    used.Bind(tenant);
    STILLHOUSE_RETURN_IF_ERROR(used.Step().status());
    if (used.Int(0) != 0) {
      return absl::FailedPreconditionError(
          "the tenant still has corpora, uploads or running operations: delete or cancel them first");
    }
  }
  return Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("DELETE FROM operations WHERE tenant = ?1").Bind(tenant).Run());
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("DELETE FROM requests WHERE tenant = ?1").Bind(tenant).Run());
    STILLHOUSE_RETURN_IF_ERROR(ForgetRequests("", "tenant", tenant));
    return db_->Prepare("DELETE FROM tenants WHERE tenant = ?1").Bind(tenant).Run();
  });
}

absl::StatusOr<ApiKeyRow> EmbeddedStore::FindApiKey(std::string_view key_id) {
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  Statement find = db_->Prepare(
      "SELECT key_id, tenant, key_sha256, label, create_time, revoke_time FROM api_keys WHERE key_id = ?1");
  find.Bind(key_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return NoSuchKey();
  return ReadKey(find);
}

absl::StatusOr<ApiKeyRow> EmbeddedStore::InsertApiKey(const ApiKeyRow& row) {
  STILLHOUSE_RETURN_IF_ERROR(CheckToken("key", row.key_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the label", row.label, 1024));
  if (!IsSha256Hex(row.key_sha256)) return absl::InvalidArgumentError("the key's hash is not 64 lower-case hex digits");
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(row.tenant));
  absl::StatusOr<ApiKeyRow> existing = FindApiKey(row.key_id);
  if (existing.ok()) return absl::AlreadyExistsError("there is an API key with this id already");
  if (!absl::IsNotFound(existing.status())) return existing.status();
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return db_->Prepare("INSERT INTO api_keys VALUES (?1, ?2, ?3, ?4, ?5, NULL)")
        .Bind(row.key_id, row.tenant, row.key_sha256, row.label, NowMicros())
        .Run();
  }));
  return FindApiKey(row.key_id);
}

absl::StatusOr<ApiKeyRow> EmbeddedStore::GetApiKey(std::string_view key_id) {
  absl::MutexLock lock(&mu_);
  return FindApiKey(key_id);
}

absl::StatusOr<std::vector<ApiKeyRow>> EmbeddedStore::ListApiKeys(std::string_view tenant) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  Statement list = db_->Prepare(
      "SELECT key_id, tenant, key_sha256, label, create_time, revoke_time FROM api_keys WHERE tenant = ?1 ORDER BY "
      "key_id");
  list.Bind(tenant);
  std::vector<ApiKeyRow> keys;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return keys;
    keys.push_back(ReadKey(list));
  }
}

absl::StatusOr<ApiKeyRow> EmbeddedStore::RevokeApiKey(std::string_view tenant, std::string_view key_id) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  STILLHOUSE_ASSIGN_OR_RETURN(ApiKeyRow key, FindApiKey(key_id));
  if (key.tenant != tenant) return NoSuchKey();
  if (key.revoke_time != absl::InfiniteFuture()) return key;
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return db_->Prepare("UPDATE api_keys SET revoke_time = ?2 WHERE key_id = ?1").Bind(key_id, NowMicros()).Run();
  }));
  return FindApiKey(key_id);
}

}  // namespace stillhouse
