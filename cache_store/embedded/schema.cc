#include "cache_store/embedded/schema.h"

#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr int64_t kApplicationId = 0x53544C48;  // "STLH"

// Migration i takes a catalog from version i to i + 1. Never edit one that was released: append.
constexpr const char* kMigrations[kCatalogVersion] = {
    R"sql(
PRAGMA application_id = 1398033480;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO counters VALUES ('sequence', 0);
CREATE TABLE tenants (
  tenant TEXT PRIMARY KEY, display_name TEXT NOT NULL, quotas_json TEXT NOT NULL, create_time INTEGER NOT NULL,
  etag TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE api_keys (
  key_id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants ON DELETE CASCADE, key_sha256 TEXT NOT NULL,
  label TEXT NOT NULL, create_time INTEGER NOT NULL, revoke_time INTEGER) STRICT, WITHOUT ROWID;
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, key_id);
CREATE TABLE blobs (sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, create_time INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE uploads (
  tenant TEXT NOT NULL REFERENCES tenants, upload_id TEXT NOT NULL, file_id TEXT NOT NULL UNIQUE, corpus_id TEXT NOT NULL,
  display_name TEXT NOT NULL, media_type TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
  request_id TEXT NOT NULL, fingerprint TEXT NOT NULL, create_time INTEGER NOT NULL, touch_time INTEGER NOT NULL,
  PRIMARY KEY (tenant, upload_id)) STRICT, WITHOUT ROWID;
CREATE TABLE corpora (
  tenant TEXT NOT NULL REFERENCES tenants, corpus_id TEXT NOT NULL, display_name TEXT NOT NULL, media_type TEXT NOT NULL,
  size INTEGER NOT NULL, sha256 TEXT NOT NULL REFERENCES blobs, upload_id TEXT NOT NULL, fingerprint TEXT NOT NULL,
  create_time INTEGER NOT NULL, etag TEXT NOT NULL, PRIMARY KEY (tenant, corpus_id)) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX corpora_by_upload ON corpora (tenant, upload_id);
CREATE INDEX corpora_by_blob ON corpora (sha256);
CREATE TABLE artifacts (
  tenant TEXT NOT NULL, corpus_id TEXT NOT NULL, cache_id TEXT NOT NULL, method TEXT NOT NULL, summary_json TEXT NOT NULL,
  size INTEGER NOT NULL, sha256 TEXT NOT NULL, blob TEXT REFERENCES blobs, quarantine_reason TEXT,
  create_time INTEGER NOT NULL, etag TEXT NOT NULL, PRIMARY KEY (tenant, corpus_id, cache_id),
  FOREIGN KEY (tenant, corpus_id) REFERENCES corpora,
  CHECK ((blob IS NULL) = (quarantine_reason IS NOT NULL))) STRICT, WITHOUT ROWID;
CREATE INDEX artifacts_by_blob ON artifacts (blob);
CREATE INDEX artifacts_by_sha256 ON artifacts (sha256);
CREATE TABLE operations (
  tenant TEXT NOT NULL REFERENCES tenants, operation_id TEXT NOT NULL, kind TEXT NOT NULL, target TEXT NOT NULL,
  request_json TEXT NOT NULL, state INTEGER NOT NULL, cancel_requested INTEGER NOT NULL, progress_json TEXT NOT NULL,
  checkpoint TEXT REFERENCES blobs, result_json TEXT NOT NULL, error_code INTEGER NOT NULL, error_message TEXT NOT NULL,
  create_time INTEGER NOT NULL, update_time INTEGER NOT NULL, end_time INTEGER, etag TEXT NOT NULL,
  PRIMARY KEY (tenant, operation_id)) STRICT, WITHOUT ROWID;
CREATE INDEX operations_by_time ON operations (tenant, create_time, operation_id);
CREATE INDEX operations_unfinished ON operations (create_time) WHERE end_time IS NULL;
CREATE INDEX operations_by_checkpoint ON operations (checkpoint) WHERE checkpoint IS NOT NULL;
CREATE TABLE requests (
  tenant TEXT NOT NULL, request_id TEXT NOT NULL, kind TEXT NOT NULL, resource TEXT NOT NULL, fingerprint TEXT NOT NULL,
  create_time INTEGER NOT NULL, PRIMARY KEY (tenant, request_id)) STRICT, WITHOUT ROWID;
CREATE INDEX requests_by_resource ON requests (tenant, kind, resource);
)sql",
};

absl::StatusOr<int64_t> Pragma(Database& database, const char* sql) {
  Statement statement = database.Prepare(sql);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, statement.Step());
  return row ? statement.Int(0) : 0;
}

}  // namespace

absl::Status BringUpToDate(Database& database) {
  STILLHOUSE_ASSIGN_OR_RETURN(int64_t version, Pragma(database, "PRAGMA user_version"));
  STILLHOUSE_ASSIGN_OR_RETURN(const int64_t application, Pragma(database, "PRAGMA application_id"));
  STILLHOUSE_ASSIGN_OR_RETURN(const int64_t tables, Pragma(database, "SELECT count(*) FROM sqlite_schema"));
  if (tables > 0 && application != kApplicationId) {
    return absl::FailedPreconditionError(
        "the store's catalog is a database of another program: give the server another folder");
  }
  if (version > kCatalogVersion) {
    return absl::FailedPreconditionError(StrCat("the store was written by a newer server (catalog version ", version,
                                                "; this one knows ", kCatalogVersion, "): start that one"));
  }
  if (tables > 0) {
    Statement check = database.Prepare("PRAGMA quick_check(1)");
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, check.Step());
    if (!row || check.Text(0) != "ok")
      return absl::DataLossError("the store's catalog is damaged: restore it from a backup");
  }
  for (; version < kCatalogVersion; ++version) {
    const std::string script =
        StrCat("BEGIN IMMEDIATE;", kMigrations[version], "PRAGMA user_version = ", version + 1, "; COMMIT;");
    if (absl::Status status = database.Execute(script.c_str()); !status.ok()) {
      database.Rollback();
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace stillhouse
