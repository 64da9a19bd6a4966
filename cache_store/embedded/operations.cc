#include "absl/strings/numbers.h"
#include "cache_store/embedded/embedded_store.h"
#include "cache_store/embedded/page_token.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

#define STILLHOUSE_OPERATION_COLUMNS                                                                              \
  "SELECT tenant, operation_id, kind, target, request_json, state, cancel_requested, progress_json, checkpoint, " \
  "result_json, error_code, error_message, create_time, update_time, end_time, etag FROM operations "

OperationRow ReadRow(const Statement& s) {
  OperationRow row;
  row.tenant = s.Text(0);
  row.operation_id = s.Text(1);
  row.kind = s.Text(2);
  row.target = s.Text(3);
  row.request_json = s.Text(4);
  row.state = static_cast<OperationState>(s.Int(5));
  row.cancel_requested = s.Int(6) != 0;
  row.progress_json = s.Text(7);
  row.has_checkpoint = !s.IsNull(8);
  row.result_json = s.Text(9);
  row.error_code = static_cast<int>(s.Int(10));
  row.error_message = s.Text(11);
  row.create_time = absl::FromUnixMicros(s.Int(12));
  row.update_time = absl::FromUnixMicros(s.Int(13));
  if (!s.IsNull(14)) row.end_time = absl::FromUnixMicros(s.Int(14));
  row.etag = s.Text(15);
  return row;
}

absl::Status CheckTexts(const OperationRow& row) {
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the operation's kind", row.kind, 64));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the operation's target", row.target, 1024));
  for (const std::string* text : {&row.request_json, &row.progress_json, &row.result_json, &row.error_message}) {
    STILLHOUSE_RETURN_IF_ERROR(CheckText("a text of the operation", *text, kMaxJsonText));
  }
  return absl::OkStatus();
}

absl::Status Finished() {
  return absl::FailedPreconditionError("the operation has finished already and cannot change any more");
}

}  // namespace

absl::StatusOr<OperationRow> EmbeddedStore::FindOperation(std::string_view tenant, std::string_view operation_id) {
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckId("operation", operation_id));
  Statement find = db_->Prepare(STILLHOUSE_OPERATION_COLUMNS "WHERE tenant = ?1 AND operation_id = ?2");
  find.Bind(tenant, operation_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return absl::NotFoundError(StrCat("no operation '", operation_id, "'"));
  return ReadRow(find);
}

absl::StatusOr<OperationRow> EmbeddedStore::InsertOperation(const OperationRow& row, std::string_view request_id,
                                                            std::string_view fingerprint) {
  STILLHOUSE_RETURN_IF_ERROR(CheckTexts(row));
  if (!request_id.empty()) STILLHOUSE_RETURN_IF_ERROR(CheckToken("request", request_id));
  const std::string digest = Sha256Hex(fingerprint);
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(row.tenant));
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string made, FindRequest(row.tenant, request_id, "operation", digest));
  if (!made.empty()) return FindOperation(row.tenant, made);
  absl::StatusOr<OperationRow> existing = FindOperation(row.tenant, row.operation_id);
  if (existing.ok()) return absl::AlreadyExistsError(StrCat("there is an operation '", row.operation_id, "' already"));
  if (!absl::IsNotFound(existing.status())) return existing.status();
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const int64_t now = NowMicros();
    Statement insert = db_->Prepare(
        "INSERT INTO operations VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, NULL, ?9, ?10, ?11, ?12, ?12, CASE WHEN ?13 "
        "THEN ?12 END, ?14)");
    STILLHOUSE_RETURN_IF_ERROR(insert
                                   .Bind(row.tenant, row.operation_id, row.kind, row.target, row.request_json,
                                         static_cast<int>(row.state), row.cancel_requested, row.progress_json,
                                         row.result_json, row.error_code, row.error_message, now, IsDone(row.state),
                                         RandomHex(8))
                                   .Run());
    return RecordRequest(row.tenant, request_id, "operation", row.operation_id, digest);
  }));
  return FindOperation(row.tenant, row.operation_id);
}

absl::StatusOr<OperationRow> EmbeddedStore::UpdateOperation(std::string_view tenant, std::string_view operation_id,
                                                            const OperationUpdate& update) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(OperationRow row, FindOperation(tenant, operation_id));
  if (IsDone(row.state)) return Finished();
  row.state = update.state.value_or(row.state);
  row.cancel_requested = update.cancel_requested.value_or(row.cancel_requested);
  row.progress_json = update.progress_json.value_or(row.progress_json);
  row.result_json = update.result_json.value_or(row.result_json);
  row.error_code = update.error_code.value_or(row.error_code);
  row.error_message = update.error_message.value_or(row.error_message);
  STILLHOUSE_RETURN_IF_ERROR(CheckTexts(row));
  STILLHOUSE_RETURN_IF_ERROR(WriteFreeing([&](FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(
        db_->Prepare("UPDATE operations SET state = ?3, cancel_requested = ?4, progress_json = ?5, result_json = ?6, "
                     "error_code = ?7, error_message = ?8, update_time = ?9, end_time = CASE WHEN ?10 THEN ?9 END, "
                     "etag = ?11 "
                     "WHERE tenant = ?1 AND operation_id = ?2")
            .Bind(tenant, operation_id, static_cast<int>(row.state), row.cancel_requested, row.progress_json,
                  row.result_json, row.error_code, row.error_message, NowMicros(), IsDone(row.state), RandomHex(8))
            .Run());
    return IsDone(row.state) ? SetCheckpoint(tenant, operation_id, "", files) : absl::OkStatus();
  }));
  return FindOperation(tenant, operation_id);
}

absl::StatusOr<OperationRow> EmbeddedStore::GetOperation(std::string_view tenant, std::string_view operation_id) {
  absl::MutexLock lock(&mu_);
  return FindOperation(tenant, operation_id);
}

absl::StatusOr<Page<OperationRow>> EmbeddedStore::ListOperations(std::string_view tenant, const OperationFilter& filter,
                                                                 const PageRequest& request) {
  const int done = filter.done.has_value() ? *filter.done : -1;
  const std::string list_name = StrCat("operations/", tenant, "/", done, "/", filter.kind, "/", filter.target);
  STILLHOUSE_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size));
  STILLHOUSE_ASSIGN_OR_RETURN(const auto after, ReadPageToken(list_name, request.page_token, 2));
  int64_t before = INT64_MAX;
  if (!after[0].empty() && !absl::SimpleAtoi(after[0], &before)) return absl::InvalidArgumentError("bad page token");
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  Statement list =
      db_->Prepare(STILLHOUSE_OPERATION_COLUMNS
                   "WHERE tenant = ?1 AND (?2 = -1 OR (end_time IS NOT NULL) = ?2) AND (?3 = '' OR kind = ?3) "
                   "AND (?4 = '' OR target = ?4) AND (create_time, operation_id) < (?5, ?6) "
                   "ORDER BY create_time DESC, operation_id DESC LIMIT ?7");
  list.Bind(tenant, done, filter.kind, filter.target, before, after[1], size + 1);
  Page<OperationRow> page;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return page;
    if (page.rows.size() == static_cast<size_t>(size)) {
      const OperationRow& last = page.rows.back();
      page.next_page_token =
          MakePageToken(list_name, {StrCat(absl::ToUnixMicros(last.create_time)), last.operation_id});
      return page;
    }
    page.rows.push_back(ReadRow(list));
  }
}

absl::StatusOr<std::vector<OperationRow>> EmbeddedStore::ListUnfinishedOperations() {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  Statement list =
      db_->Prepare(STILLHOUSE_OPERATION_COLUMNS "WHERE end_time IS NULL ORDER BY create_time, tenant, operation_id");
  std::vector<OperationRow> rows;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return rows;
    rows.push_back(ReadRow(list));
  }
}

absl::Status EmbeddedStore::DeleteOperation(std::string_view tenant, std::string_view operation_id) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const OperationRow row, FindOperation(tenant, operation_id));
  if (!IsDone(row.state))
    return absl::FailedPreconditionError("the operation still runs: cancel it and wait, then delete it");
  return WriteFreeing([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(ForgetRequests(tenant, "operation", operation_id));
    return db_->Prepare("DELETE FROM operations WHERE tenant = ?1 AND operation_id = ?2")
        .Bind(tenant, operation_id)
        .Run();
  });
}

absl::Status EmbeddedStore::SetCheckpoint(std::string_view tenant, std::string_view operation_id,
                                          const std::string& sha256, FileChanges& files) {
  std::string old;
  {
    Statement find = db_->Prepare("SELECT checkpoint FROM operations WHERE tenant = ?1 AND operation_id = ?2");
    find.Bind(tenant, operation_id);
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
    if (row) old = find.Text(0);
  }
  if (old == sha256) return absl::OkStatus();
  STILLHOUSE_RETURN_IF_ERROR(
      db_->Prepare("UPDATE operations SET checkpoint = nullif(?3, '') WHERE tenant = ?1 AND operation_id = ?2")
          .Bind(tenant, operation_id, sha256)
          .Run());
  return old.empty() ? absl::OkStatus() : ReleaseBlob(old, files);
}

absl::Status EmbeddedStore::PutCheckpoint(std::string_view tenant, std::string_view operation_id,
                                          std::string_view bytes) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<TemporaryBlob> blob, TemporaryBlob::Create(this));
  STILLHOUSE_RETURN_IF_ERROR(blob->Append(bytes));
  STILLHOUSE_RETURN_IF_ERROR(blob->Finish());
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const OperationRow row, FindOperation(tenant, operation_id));
  if (IsDone(row.state)) return Finished();
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(AdoptBlob(blob->path(), blob->sha256(), blob->size(), files));
    return SetCheckpoint(tenant, operation_id, blob->sha256(), files);
  }));
  blob->MarkConsumed();
  return absl::OkStatus();
}

absl::StatusOr<std::string> EmbeddedStore::GetCheckpoint(std::string_view tenant, std::string_view operation_id) {
  std::string sha256;
  std::shared_ptr<ReadableFile> file;
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_RETURN_IF_ERROR(FindOperation(tenant, operation_id).status());
    Statement find = db_->Prepare(
        "SELECT b.sha256, b.size FROM operations o JOIN blobs b ON b.sha256 = o.checkpoint "
        "WHERE o.tenant = ?1 AND o.operation_id = ?2");
    find.Bind(tenant, operation_id);
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
    if (!row) return absl::NotFoundError("the operation has no checkpoint");
    sha256 = find.Text(0);
    STILLHOUSE_ASSIGN_OR_RETURN(file, OpenBlob(sha256, static_cast<uint64_t>(find.Int(1))));
  }
  return ReadVerified(*file, sha256, "the operation's checkpoint");
}

}  // namespace stillhouse
