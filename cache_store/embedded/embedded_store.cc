#include "cache_store/embedded/embedded_store.h"

#include <openssl/rand.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {

std::string RandomHex(int bytes) {
  std::string raw(static_cast<size_t>(bytes), '\0');
  STILLHOUSE_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(raw.data()), bytes) == 1);
  return absl::BytesToHexString(raw);
}

bool IsToken(std::string_view id) {
  if (id.empty() || id.size() > 64) return false;
  return std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

absl::Status CheckId(std::string_view what, std::string_view id) {
  if (IsResourceId(id)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      StrCat("bad ", what, " id: 1 to 63 lower-case letters, digits and hyphens, a letter first, no hyphen last"));
}
absl::Status CheckToken(std::string_view what, std::string_view id) {
  if (IsToken(id)) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat("bad ", what, " id: 1 to 64 letters, digits, hyphens and underscores"));
}
absl::Status CheckText(std::string_view what, std::string_view text, size_t limit) {
  if (text.size() <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat(what, " has ", text.size(), " bytes; at most ", limit));
}
absl::Status CheckEtag(std::string_view expected, const std::string& current) {
  if (expected.empty() || expected == current) return absl::OkStatus();
  return absl::AbortedError("the resource changed since it was read (its etag differs): read it and try again");
}

absl::StatusOr<std::string> ReadVerified(const ReadableFile& file, std::string_view sha256, std::string_view what) {
  std::string bytes(file.size(), '\0');
  STILLHOUSE_RETURN_IF_ERROR(file.Read(0, bytes.size(), bytes.data()));
  if (Sha256Hex(bytes) != sha256)
    return absl::DataLossError(StrCat(what, " does not match its SHA-256: it was damaged on disk"));
  return bytes;
}

absl::StatusOr<std::unique_ptr<Store>> OpenEmbeddedStore(const StoreOptions& options) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<EmbeddedStore> store, EmbeddedStore::Open(options));
  return store;
}

EmbeddedStore::EmbeddedStore(const StoreOptions& options)
    : options_(options), env_(options.env != nullptr ? options.env : PosixEnv()) {}

EmbeddedStore::~EmbeddedStore() = default;

absl::StatusOr<std::unique_ptr<EmbeddedStore>> EmbeddedStore::Open(const StoreOptions& options) {
  if (options.directory.empty()) return absl::InvalidArgumentError("no store folder given");
  std::unique_ptr<EmbeddedStore> store(new EmbeddedStore(options));
  STILLHOUSE_RETURN_IF_ERROR(store->Prepare());
  return store;
}

absl::Status EmbeddedStore::Prepare() {
  const std::string& root = options_.directory;
  STILLHOUSE_RETURN_IF_ERROR(env_->CreateDirectory(root));
  STILLHOUSE_ASSIGN_OR_RETURN(lock_, env_->Lock(root + "/LOCK"));
  for (const char* folder : {"/blobs", "/uploads", "/tmp", "/quarantine"}) {
    STILLHOUSE_RETURN_IF_ERROR(env_->CreateDirectory(root + folder));
  }
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_ASSIGN_OR_RETURN(db_, Database::Open(root + "/catalog.db", env_->SqliteVfs()));
  }
  STILLHOUSE_RETURN_IF_ERROR(env_->SyncDirectory(root));
  // A full disk must not keep the server from opening: garbage waits for the next time.
  if (absl::Status status = CollectGarbage(); !status.ok()) STILLHOUSE_LOG(WARNING) << "collecting garbage: " << status;
  return absl::OkStatus();
}

absl::Status EmbeddedStore::Write(absl::FunctionRef<absl::Status(FileChanges&)> body) {
  STILLHOUSE_RETURN_IF_ERROR(db_->Begin());
  FileChanges files;
  absl::Status status = body(files);
  Database::Outcome outcome = Database::Outcome::kRolledBack;
  if (status.ok()) {
    status = db_->Commit(&outcome);
  } else {
    db_->Rollback();
  }
  if (outcome == Database::Outcome::kRolledBack) {
    for (auto it = files.undo.rbegin(); it != files.undo.rend(); ++it) {
      env_->Rename(it->first, it->second).IgnoreError();  // else it is garbage for the next collection
    }
  } else if (outcome == Database::Outcome::kCommitted) {
    for (const std::string& sha256 : files.unlink) env_->Unlink(BlobPath(sha256)).IgnoreError();  // the same
  }
  return status;
}

absl::Status EmbeddedStore::WriteFreeing(absl::FunctionRef<absl::Status(FileChanges&)> body) {
  absl::Status status = Write(body);
  if (absl::IsResourceExhausted(status) && env_->Unlink(ReservePath()).ok()) status = Write(body);
  return status;
}

void EmbeddedStore::KeepReserve() {
  const std::string path = ReservePath();
  if (env_->FileSize(path).value_or(0) == kReserveBytes) return;
  env_->Unlink(path).IgnoreError();
  absl::StatusOr<std::unique_ptr<WritableFile>> file = env_->Create(path);
  // Synced, so that the blocks are really taken.
  absl::Status status = file.ok() ? (*file)->WriteAt(0, std::string(kReserveBytes, '\x55')) : file.status();
  if (status.ok()) status = (*file)->Sync();
  if (!status.ok()) env_->Unlink(path).IgnoreError();
}

absl::Status EmbeddedStore::AdoptBlob(const std::string& temp, const std::string& sha256, uint64_t size,
                                      FileChanges& files) {
  Statement known = db_->Prepare("SELECT size FROM blobs WHERE sha256 = ?1");
  known.Bind(sha256);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool exists, known.Step());
  // Renaming over an existing blob is right too: the bytes are the same, and a damaged file is healed.
  absl::Status renamed = env_->Rename(temp, BlobPath(sha256));
  if (absl::IsNotFound(renamed)) {
    return absl::UnavailableError("the written bytes were lost with an earlier failure: write them again");
  }
  STILLHOUSE_RETURN_IF_ERROR(renamed);
  if (!exists) files.undo.emplace_back(BlobPath(sha256), temp);
  STILLHOUSE_RETURN_IF_ERROR(env_->SyncDirectory(options_.directory + "/blobs"));
  return db_->Prepare("INSERT INTO blobs (sha256, size, create_time) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING")
      .Bind(sha256, size, NowMicros())
      .Run();
}

absl::Status EmbeddedStore::ReleaseBlob(const std::string& sha256, FileChanges& files) {
  Statement used = db_->Prepare(
      "SELECT EXISTS (SELECT 1 FROM corpora WHERE sha256 = ?1) OR EXISTS (SELECT 1 FROM artifacts WHERE blob = ?1) OR "
      "EXISTS (SELECT 1 FROM operations WHERE checkpoint = ?1)");
  used.Bind(sha256);
  STILLHOUSE_RETURN_IF_ERROR(used.Step().status());
  if (used.Int(0) != 0) return absl::OkStatus();
  files.unlink.push_back(sha256);
  return db_->Prepare("DELETE FROM blobs WHERE sha256 = ?1").Bind(sha256).Run();
}

absl::StatusOr<std::shared_ptr<ReadableFile>> EmbeddedStore::OpenBlob(const std::string& sha256, uint64_t size) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> file = env_->OpenForReading(BlobPath(sha256));
  if (absl::IsNotFound(file.status())) return absl::DataLossError("the stored file is missing");
  STILLHOUSE_RETURN_IF_ERROR(file.status());
  if ((*file)->size() != size) return absl::DataLossError("the stored file has not the size that it was stored with");
  return std::shared_ptr<ReadableFile>(*std::move(file));
}

absl::StatusOr<std::string> EmbeddedStore::FindRequest(std::string_view tenant, std::string_view request_id,
                                                       std::string_view kind, std::string_view fingerprint) {
  if (request_id.empty()) return std::string();
  Statement find =
      db_->Prepare("SELECT kind, resource, fingerprint FROM requests WHERE tenant = ?1 AND request_id = ?2");
  find.Bind(tenant, request_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return std::string();
  if (find.Text(0) != kind || find.Text(2) != fingerprint) {
    return absl::AlreadyExistsError(
        "this request_id was used for another request: make a new UUID for every new request");
  }
  return find.Text(1);
}

absl::Status EmbeddedStore::RecordRequest(std::string_view tenant, std::string_view request_id, std::string_view kind,
                                          std::string_view resource, std::string_view fingerprint) {
  if (request_id.empty()) return absl::OkStatus();
  return db_->Prepare("INSERT INTO requests VALUES (?1, ?2, ?3, ?4, ?5, ?6)")
      .Bind(tenant, request_id, kind, resource, fingerprint, NowMicros())
      .Run();
}

absl::Status EmbeddedStore::ForgetRequests(std::string_view tenant, std::string_view kind, std::string_view resource) {
  return db_->Prepare("DELETE FROM requests WHERE tenant = ?1 AND kind = ?2 AND resource = ?3")
      .Bind(tenant, kind, resource)
      .Run();
}

absl::StatusOr<TenantUsage> EmbeddedStore::GetUsage(std::string_view tenant) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  Statement read = db_->Prepare(
      "SELECT (SELECT count(*) FROM corpora WHERE tenant = ?1), (SELECT ifnull(sum(size), 0) FROM corpora WHERE tenant "
      "= ?1),"
      "(SELECT count(*) FROM artifacts WHERE tenant = ?1 AND blob IS NOT NULL),"
      "(SELECT ifnull(sum(size), 0) FROM artifacts WHERE tenant = ?1 AND blob IS NOT NULL),"
      "(SELECT count(*) FROM uploads WHERE tenant = ?1), (SELECT ifnull(sum(size), 0) FROM uploads WHERE tenant = ?1),"
      "(SELECT ifnull(sum(b.size), 0) FROM operations o JOIN blobs b ON b.sha256 = o.checkpoint WHERE o.tenant = ?1)");
  read.Bind(tenant);
  STILLHOUSE_RETURN_IF_ERROR(read.Step().status());
  auto at = [&](int column) { return static_cast<uint64_t>(read.Int(column)); };
  return TenantUsage{at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

absl::StatusOr<uint64_t> EmbeddedStore::FolderBytes(const std::string& name) {
  const std::string folder = options_.directory + "/" + name;
  STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<std::string> files, env_->ListDirectory(folder));
  uint64_t bytes = 0;
  for (const std::string& file : files) bytes += env_->FileSize(folder + "/" + file).value_or(0);  // 0: gone meanwhile
  return bytes;
}

absl::StatusOr<StoreBytes> EmbeddedStore::GetStoreBytes() {
  StoreBytes bytes;
  STILLHOUSE_ASSIGN_OR_RETURN(bytes.uploads, FolderBytes("uploads"));
  STILLHOUSE_ASSIGN_OR_RETURN(bytes.quarantine, FolderBytes("quarantine"));
  for (const char* name : {"/catalog.db", "/catalog.db-wal"}) {
    bytes.catalog += env_->FileSize(options_.directory + name).value_or(0);
  }
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
  Statement read = db_->Prepare(
      "SELECT kind, sum(size) FROM (SELECT size, CASE WHEN EXISTS (SELECT 1 FROM corpora c WHERE c.sha256 = b.sha256) "
      "THEN 0 "
      "WHEN EXISTS (SELECT 1 FROM artifacts a WHERE a.blob = b.sha256) THEN 1 ELSE 2 END AS kind FROM blobs b) GROUP "
      "BY kind");
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, read.Step());
    if (!row) return bytes;
    (read.Int(0) == 0   ? bytes.corpora
     : read.Int(0) == 1 ? bytes.caches
                        : bytes.checkpoints) = static_cast<uint64_t>(read.Int(1));
  }
}

absl::Status EmbeddedStore::CollectGarbage() {
  std::vector<UploadRow> idle;
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_RETURN_IF_ERROR(db_->EnsureOpen());
    SweepFolders();
    KeepReserve();
    const int64_t uploads_before = absl::ToUnixMicros(options_.now() - options_.upload_ttl);
    Statement uploads = db_->Prepare("SELECT tenant, upload_id, file_id FROM uploads WHERE touch_time < ?1");
    uploads.Bind(uploads_before);
    while (true) {
      STILLHOUSE_ASSIGN_OR_RETURN(const bool row, uploads.Step());
      if (!row) break;
      UploadRow upload;
      upload.spec.tenant = uploads.Text(0);
      upload.spec.upload_id = uploads.Text(1);
      upload.file_id = uploads.Text(2);
      idle.push_back(std::move(upload));
    }
    const int64_t finished_before = absl::ToUnixMicros(options_.now() - options_.finished_operation_ttl);
    Statement old = db_->Prepare("SELECT EXISTS (SELECT 1 FROM operations WHERE end_time < ?1)");
    old.Bind(finished_before);
    STILLHOUSE_RETURN_IF_ERROR(old.Step().status());
    if (old.Int(0) != 0) {
      STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        STILLHOUSE_RETURN_IF_ERROR(
            db_->Prepare("DELETE FROM requests WHERE kind = 'operation' AND (tenant, resource) IN "
                         "(SELECT tenant, operation_id FROM operations WHERE end_time < ?1)")
                .Bind(finished_before)
                .Run());
        return db_->Prepare("DELETE FROM operations WHERE end_time < ?1").Bind(finished_before).Run();
      }));
    }
  }
  for (const UploadRow& upload : idle) {
    if (absl::Status status = AbortUpload(upload.spec.tenant, upload.spec.upload_id);
        !status.ok() && !absl::IsNotFound(status)) {
      return status;
    }
  }
  return absl::OkStatus();
}

// Removes files that no row names. Under the mutex, so that no rename or row is half done; failures are left for next
// time.
void EmbeddedStore::SweepFolders() {
  auto exists = [&](const char* sql, const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Statement find = db_->Prepare(sql);
    find.Bind(key);
    return find.Step();  // an error keeps the file
  };
  auto list = [&](const char* folder) {
    return env_->ListDirectory(options_.directory + folder).value_or(std::vector<std::string>());
  };
  for (const std::string& name : list("/blobs")) {
    absl::StatusOr<bool> known = exists("SELECT 1 FROM blobs WHERE sha256 = ?1", name);
    if (!known.ok() || *known) continue;
    absl::StatusOr<bool> bad =
        exists("SELECT 1 FROM artifacts WHERE sha256 = ?1 AND quarantine_reason IS NOT NULL", name);
    if (!bad.ok()) continue;
    // A crash came between the mark and the move.
    if (*bad) {
      env_->Rename(BlobPath(name), options_.directory + "/quarantine/" + name).IgnoreError();
    } else {
      env_->Unlink(BlobPath(name)).IgnoreError();
    }
  }
  for (const std::string& name : list("/uploads")) {
    absl::StatusOr<bool> known = exists("SELECT 1 FROM uploads WHERE file_id = ?1", name.substr(0, name.find('.')));
    if (known.ok() && !*known) env_->Unlink(options_.directory + "/uploads/" + name).IgnoreError();
  }
  absl::MutexLock lock(&temporaries_mu_);
  for (const std::string& name : list("/tmp")) {
    if (!temporaries_.contains(name)) env_->Unlink(options_.directory + "/tmp/" + name).IgnoreError();
  }
}

TemporaryBlob::TemporaryBlob(EmbeddedStore* store, std::string name)
    : store_(store), name_(std::move(name)), path_(store->options_.directory + "/tmp/" + name_) {}

absl::StatusOr<std::unique_ptr<TemporaryBlob>> TemporaryBlob::Create(EmbeddedStore* store) {
  std::unique_ptr<TemporaryBlob> blob(new TemporaryBlob(store, RandomHex(16)));
  {
    absl::MutexLock lock(&store->temporaries_mu_);
    store->temporaries_.insert(blob->name_);
  }
  STILLHOUSE_ASSIGN_OR_RETURN(blob->file_, store->env_->Create(blob->path_));
  return blob;
}

TemporaryBlob::~TemporaryBlob() {
  file_.reset();
  if (!consumed_) store_->env_->Unlink(path_).IgnoreError();
  absl::MutexLock lock(&store_->temporaries_mu_);
  store_->temporaries_.erase(name_);
}

absl::Status TemporaryBlob::Append(std::string_view bytes) {
  STILLHOUSE_RETURN_IF_ERROR(failed_);
  if (file_ == nullptr) return absl::FailedPreconditionError("the blob was put already");
  failed_ = file_->WriteAt(size_, bytes);
  if (failed_.ok()) {
    hash_.Update(bytes);
    size_ += bytes.size();
  }
  return failed_;
}

absl::Status TemporaryBlob::Finish() {
  STILLHOUSE_RETURN_IF_ERROR(failed_);
  if (consumed_) return absl::FailedPreconditionError("the blob was put already");
  if (file_ == nullptr) return absl::OkStatus();
  failed_ = file_->Sync();
  STILLHOUSE_RETURN_IF_ERROR(failed_);
  file_.reset();
  sha256_ = hash_.FinishHex();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ReadableFile>> TemporaryBlob::OpenForReading() {
  STILLHOUSE_RETURN_IF_ERROR(failed_);
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, store_->env_->OpenForReading(path_));
  return std::shared_ptr<ReadableFile>(std::move(file));
}

}  // namespace stillhouse
