#ifndef STILLHOUSE_CACHE_STORE_EMBEDDED_DATABASE_H_
#define STILLHOUSE_CACHE_STORE_EMBEDDED_DATABASE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct sqlite3;
struct sqlite3_stmt;

namespace stillhouse {

class Database;

// One use of a prepared statement. Values are bound in order; then Step until it says false. Binding and stepping
// errors are kept and come out of Step. Reset when it dies; must not outlive its Database, but may outlive the
// connection (Step then says UNAVAILABLE).
class Statement {
 public:
  ~Statement();
  Statement(Statement&& other) noexcept;
  Statement(const Statement&) = delete;

  template <typename... Values>
  Statement& Bind(const Values&... values) {
    (BindOne(values), ...);
    return *this;
  }
  // True: a row is there to read.
  absl::StatusOr<bool> Step();
  // For statements that return no rows.
  absl::Status Run();

  std::string Text(int column) const;
  int64_t Int(int column) const;
  bool IsNull(int column) const;

 private:
  friend class Database;
  Statement(const Database* database, sqlite3_stmt* statement, absl::Status status);
  bool live() const;
  void BindOne(std::string_view value);
  void BindOne(const std::optional<std::string>& value);
  void BindOne(const std::string& value) { BindOne(std::string_view(value)); }
  void BindOne(const char* value) { BindOne(std::string_view(value)); }
  void BindOne(int64_t value);
  void BindOne(uint64_t value) { BindOne(static_cast<int64_t>(value)); }
  void BindOne(int value) { BindOne(static_cast<int64_t>(value)); }
  void BindOne(bool value) { BindOne(static_cast<int64_t>(value)); }
  void BindOne(std::nullptr_t);
  void Note(int code);

  const Database* database_;
  int64_t connection_;
  sqlite3_stmt* statement_;
  absl::Status status_;
  int next_ = 1;
};

// The catalog's only connection: WAL, synchronous=FULL, foreign keys, exclusive locking (no shared-memory file). The
// caller serialises all use.
//
// A commit that fails is in doubt: its frames may be in the log, whole, though their sync failed. So after such a
// failure the connection is closed and opened again, which replays the log, and the sequence number that every
// transaction advances tells which way it went.
class Database {
 public:
  // Opens or makes the file and brings the schema up to date. DATA_LOSS if it is damaged.
  static absl::StatusOr<std::unique_ptr<Database>> Open(const std::string& path, const char* vfs);
  ~Database();

  // `sql` must be a string literal: it is the cache's key.
  Statement Prepare(const char* sql);
  absl::Status Execute(const char* sql);

  // Opens the connection again if an earlier failure left it closed.
  absl::Status EnsureOpen();
  absl::Status Begin();
  // Which way a commit went. kUnknown: it may appear after a restart, or not; nothing that it names may be undone.
  enum class Outcome { kCommitted, kRolledBack, kUnknown };
  absl::Status Commit(Outcome* outcome);
  void Rollback();

 private:
  friend class Statement;
  Database(std::string path, const char* vfs) : path_(std::move(path)), vfs_(vfs) {}
  absl::Status Connect();
  void Disconnect();

  const std::string path_;
  const char* const vfs_;
  sqlite3* db_ = nullptr;
  std::map<const char*, sqlite3_stmt*> statements_;
  int64_t connection_ = 0;  // how many there were before this one
  int64_t sequence_ = 0;    // of the last committed transaction
};

// The status for a SQLite result code of `db` (which may be null).
absl::Status SqliteStatus(sqlite3* db, int code);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_EMBEDDED_DATABASE_H_
