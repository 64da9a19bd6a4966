#include "cache_store/embedded/database.h"

#include <sqlite3.h>

#include <cerrno>
#include <utility>

#include "cache_store/embedded/schema.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {

absl::Status SqliteStatus(sqlite3* db, int code) {
  if (code == SQLITE_OK || code == SQLITE_ROW || code == SQLITE_DONE) return absl::OkStatus();
  const std::string message = StrCat("catalog: ", sqlite3_errstr(code));
  switch (code & 0xff) {
    case SQLITE_FULL:
    case SQLITE_NOMEM:
      return absl::ResourceExhaustedError(message);
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(message);
    case SQLITE_TOOBIG:
      return absl::InvalidArgumentError(message);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::FailedPreconditionError("another process has the store's catalog open: stop it first");
    case SQLITE_PERM:
    case SQLITE_READONLY:
      return absl::PermissionDeniedError(message);
    case SQLITE_IOERR:
    case SQLITE_CANTOPEN:
      if (db != nullptr && sqlite3_system_errno(db) == ENOSPC) return absl::ResourceExhaustedError(message);
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(StrCat(message, " (", code, ")"));
  }
}

Statement::Statement(const Database* database, sqlite3_stmt* statement, absl::Status status)
    : database_(database), connection_(database->connection_), statement_(statement), status_(std::move(status)) {}
Statement::Statement(Statement&& other) noexcept
    : database_(other.database_),
      connection_(other.connection_),
      statement_(std::exchange(other.statement_, nullptr)),
      status_(std::move(other.status_)),
      next_(other.next_) {}
Statement::~Statement() {
  if (!live()) return;
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
}

bool Statement::live() const { return statement_ != nullptr && connection_ == database_->connection_; }
void Statement::Note(int code) {
  if (status_.ok() && code != SQLITE_OK) status_ = SqliteStatus(database_->db_, code);
}
void Statement::BindOne(std::string_view value) {
  if (!live()) return;
  // A null pointer would bind NULL instead of the empty text.
  Note(sqlite3_bind_text64(statement_, next_++, value.data() == nullptr ? "" : value.data(), value.size(),
                           SQLITE_TRANSIENT, SQLITE_UTF8));
}
void Statement::BindOne(const std::optional<std::string>& value) {
  value.has_value() ? BindOne(std::string_view(*value)) : BindOne(nullptr);
}
void Statement::BindOne(int64_t value) {
  if (live()) Note(sqlite3_bind_int64(statement_, next_++, value));
}
void Statement::BindOne(std::nullptr_t) {
  if (live()) Note(sqlite3_bind_null(statement_, next_++));
}

absl::StatusOr<bool> Statement::Step() {
  STILLHOUSE_RETURN_IF_ERROR(status_);
  if (!live()) return absl::UnavailableError("catalog: the connection was lost");
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  status_ = SqliteStatus(database_->db_, sqlite3_extended_errcode(database_->db_));
  return status_;
}
absl::Status Statement::Run() {
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, Step());
  STILLHOUSE_CHECK(!row) << "the statement returns rows";
  return absl::OkStatus();
}

std::string Statement::Text(int column) const {
  const auto* text = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  return text == nullptr ? std::string()
                         : std::string(text, static_cast<size_t>(sqlite3_column_bytes(statement_, column)));
}
int64_t Statement::Int(int column) const { return sqlite3_column_int64(statement_, column); }
bool Statement::IsNull(int column) const { return sqlite3_column_type(statement_, column) == SQLITE_NULL; }

absl::StatusOr<std::unique_ptr<Database>> Database::Open(const std::string& path, const char* vfs) {
  std::unique_ptr<Database> database(new Database(path, vfs));
  STILLHOUSE_RETURN_IF_ERROR(database->Connect());
  return database;
}

Database::~Database() { Disconnect(); }

void Database::Disconnect() {
  for (auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  statements_.clear();
  ++connection_;
  if (db_ != nullptr) STILLHOUSE_CHECK(sqlite3_close(db_) == SQLITE_OK) << "a statement is still open";
  db_ = nullptr;
}

absl::Status Database::Connect() {
  STILLHOUSE_CHECK(db_ == nullptr);
  int code =
      sqlite3_open_v2(path_.c_str(), &db_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, vfs_);
  absl::Status status = SqliteStatus(db_, code);
  if (status.ok()) {
    sqlite3_extended_result_codes(db_, 1);
    // Exclusive locking comes first: then WAL keeps its index in this process's memory, and no other process can look
    // in.
    status = Execute(
        "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;"
        "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON; PRAGMA journal_size_limit=67108864;");
  }
  if (status.ok()) status = BringUpToDate(*this);
  if (status.ok()) {
    Statement read = Prepare("SELECT value FROM counters WHERE name = 'sequence'");
    absl::StatusOr<bool> row = read.Step();
    status = row.ok() ? (*row ? absl::OkStatus() : absl::DataLossError("catalog: no sequence number")) : row.status();
    if (status.ok()) sequence_ = read.Int(0);
  }
  if (!status.ok()) Disconnect();
  return status;
}

absl::Status Database::EnsureOpen() { return db_ != nullptr ? absl::OkStatus() : Connect(); }

Statement Database::Prepare(const char* sql) {
  if (db_ == nullptr) return Statement(this, nullptr, absl::UnavailableError("catalog: not open"));
  sqlite3_stmt*& statement = statements_[sql];
  if (statement == nullptr) {
    const int code = sqlite3_prepare_v3(db_, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    if (code != SQLITE_OK) {
      absl::Status status = SqliteStatus(db_, code);
      if (status.code() == absl::StatusCode::kInternal)
        status = absl::InternalError(StrCat(sqlite3_errmsg(db_), ": ", sql));
      return Statement(this, nullptr, status);
    }
  }
  return Statement(this, statement, absl::OkStatus());
}

absl::Status Database::Execute(const char* sql) {
  if (db_ == nullptr) return absl::UnavailableError("catalog: not open");
  const int code = sqlite3_exec(db_, sql, nullptr, nullptr, nullptr);
  return SqliteStatus(db_, code);
}

absl::Status Database::Begin() {
  STILLHOUSE_RETURN_IF_ERROR(EnsureOpen());
  return Execute("BEGIN IMMEDIATE");
}

void Database::Rollback() {
  if (db_ == nullptr || sqlite3_get_autocommit(db_) != 0) return;
  if (absl::Status status = Execute("ROLLBACK"); !status.ok()) {
    STILLHOUSE_LOG(WARNING) << "rolling back: " << status;
    Disconnect();  // the log is replayed when the connection is opened again, without the open transaction
  }
}

absl::Status Database::Commit(Outcome* outcome) {
  absl::Status status = Prepare("UPDATE counters SET value = ?1 WHERE name = 'sequence'").Bind(sequence_ + 1).Run();
  if (!status.ok()) {
    Rollback();
    *outcome = Outcome::kRolledBack;
    return status;
  }
  status = Execute("COMMIT");
  if (status.ok()) {
    ++sequence_;
    *outcome = Outcome::kCommitted;
    return status;
  }
  STILLHOUSE_LOG(WARNING) << "committing: " << status << "; opening the catalog again";
  const int64_t before = sequence_;
  *outcome = Outcome::kUnknown;
  if (sqlite3_get_autocommit(db_) == 0) Rollback();
  Disconnect();
  if (!Connect().ok()) return status;
  // What the log holds now is what counts; but only a checkpoint makes sure that it reached the disk.
  const absl::Status checkpoint = Execute("PRAGMA wal_checkpoint(TRUNCATE)");
  if (sequence_ == before) {
    *outcome = Outcome::kRolledBack;
    return status;
  }
  if (!checkpoint.ok()) return status;
  *outcome = Outcome::kCommitted;
  return absl::OkStatus();
}

}  // namespace stillhouse
