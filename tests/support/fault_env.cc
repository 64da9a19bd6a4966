#include "tests/support/fault_env.h"

#include <sqlite3.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "kernels/base/logging.h"
#include "kernels/base/status.h"

namespace stillhouse {
namespace {

std::string ReadWhole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

absl::Status FaultStatus(FaultEnv::Fault fault) {
  switch (fault) {
    case FaultEnv::Fault::kNone:
      return absl::OkStatus();
    case FaultEnv::Fault::kNoSpace:
    case FaultEnv::Fault::kShortWrite:
      return absl::ResourceExhaustedError("injected ENOSPC");
    default:
      return absl::UnavailableError("injected EIO");
  }
}

class FaultyFile : public WritableFile {
 public:
  FaultyFile(FaultEnv* env, std::unique_ptr<WritableFile> file, std::shared_ptr<FaultEnv::Inode> inode)
      : env_(env), file_(std::move(file)), inode_(std::move(inode)) {}
  absl::Status WriteAt(uint64_t offset, std::string_view bytes) override {
    const FaultEnv::Fault fault = env_->NextStep();
    if (fault == FaultEnv::Fault::kShortWrite) {
      STILLHOUSE_RETURN_IF_ERROR(file_->WriteAt(offset, bytes.substr(0, bytes.size() / 2)));
    }
    STILLHOUSE_RETURN_IF_ERROR(FaultStatus(fault));
    if (!env_->Fits(inode_->path, offset + bytes.size())) return FaultStatus(FaultEnv::Fault::kNoSpace);
    return file_->WriteAt(offset, bytes);
  }
  absl::Status Truncate(uint64_t size) override {
    STILLHOUSE_RETURN_IF_ERROR(FaultStatus(env_->NextStep()));
    return file_->Truncate(size);
  }
  absl::Status Sync() override {
    STILLHOUSE_RETURN_IF_ERROR(FaultStatus(env_->NextStep(/*sync=*/true)));
    env_->Synced(inode_);
    return absl::OkStatus();
  }

 private:
  FaultEnv* env_;
  std::unique_ptr<WritableFile> file_;
  std::shared_ptr<FaultEnv::Inode> inode_;
};

int SqliteCode(FaultEnv::Fault fault, int io_error) {
  switch (fault) {
    case FaultEnv::Fault::kNone:
      return SQLITE_OK;
    case FaultEnv::Fault::kNoSpace:
    case FaultEnv::Fault::kShortWrite:
      return SQLITE_FULL;
    default:
      return io_error;
  }
}

// SQLite's file object: this head, then the default VFS's own object.
struct ShimFile {
  sqlite3_file base;
  FaultEnv* env;
  std::shared_ptr<FaultEnv::Inode>* inode;  // nullptr for SQLite's unnamed temporaries
  bool log;                                 // WAL and journals: SQLite syncs their folder with their first sync
  sqlite3_file* real() { return reinterpret_cast<sqlite3_file*>(this + 1); }
};
ShimFile* Shim(sqlite3_file* file) { return reinterpret_cast<ShimFile*>(file); }

int ShimClose(sqlite3_file* f) {
  delete Shim(f)->inode;
  return Shim(f)->real()->pMethods->xClose(Shim(f)->real());
}
int ShimRead(sqlite3_file* f, void* out, int n, sqlite3_int64 at) {
  return Shim(f)->real()->pMethods->xRead(Shim(f)->real(), out, n, at);
}
int ShimWrite(sqlite3_file* f, const void* bytes, int n, sqlite3_int64 at) {
  const FaultEnv::Fault fault = Shim(f)->env->NextStep();
  if (fault == FaultEnv::Fault::kShortWrite) Shim(f)->real()->pMethods->xWrite(Shim(f)->real(), bytes, n / 2, at);
  if (int code = SqliteCode(fault, SQLITE_IOERR_WRITE); code != SQLITE_OK) return code;
  if (Shim(f)->inode != nullptr && !Shim(f)->env->Fits((*Shim(f)->inode)->path, static_cast<uint64_t>(at + n))) {
    return SQLITE_FULL;
  }
  return Shim(f)->real()->pMethods->xWrite(Shim(f)->real(), bytes, n, at);
}
int ShimTruncate(sqlite3_file* f, sqlite3_int64 size) {
  if (int code = SqliteCode(Shim(f)->env->NextStep(), SQLITE_IOERR_TRUNCATE); code != SQLITE_OK) return code;
  return Shim(f)->real()->pMethods->xTruncate(Shim(f)->real(), size);
}
int ShimSync(sqlite3_file* f, int) {
  if (int code = SqliteCode(Shim(f)->env->NextStep(/*sync=*/true), SQLITE_IOERR_FSYNC); code != SQLITE_OK) return code;
  if (Shim(f)->inode == nullptr) return SQLITE_OK;
  Shim(f)->env->Synced(*Shim(f)->inode);
  if (Shim(f)->log) Shim(f)->env->NameSynced((*Shim(f)->inode)->path);
  return SQLITE_OK;
}
int ShimFileSize(sqlite3_file* f, sqlite3_int64* size) {
  return Shim(f)->real()->pMethods->xFileSize(Shim(f)->real(), size);
}
int ShimLock(sqlite3_file* f, int level) { return Shim(f)->real()->pMethods->xLock(Shim(f)->real(), level); }
int ShimUnlock(sqlite3_file* f, int level) { return Shim(f)->real()->pMethods->xUnlock(Shim(f)->real(), level); }
int ShimCheckReservedLock(sqlite3_file* f, int* out) {
  return Shim(f)->real()->pMethods->xCheckReservedLock(Shim(f)->real(), out);
}
int ShimFileControl(sqlite3_file* f, int op, void* arg) {
  return Shim(f)->real()->pMethods->xFileControl(Shim(f)->real(), op, arg);
}
int ShimSectorSize(sqlite3_file* f) { return Shim(f)->real()->pMethods->xSectorSize(Shim(f)->real()); }
int ShimDeviceCharacteristics(sqlite3_file* f) {
  return Shim(f)->real()->pMethods->xDeviceCharacteristics(Shim(f)->real());
}
// Version 1: no shared memory, no mapping; every change goes through the functions above.
const sqlite3_io_methods kShimMethods = {1,
                                         ShimClose,
                                         ShimRead,
                                         ShimWrite,
                                         ShimTruncate,
                                         ShimSync,
                                         ShimFileSize,
                                         ShimLock,
                                         ShimUnlock,
                                         ShimCheckReservedLock,
                                         ShimFileControl,
                                         ShimSectorSize,
                                         ShimDeviceCharacteristics};

}  // namespace

struct FaultEnv::Vfs {
  sqlite3_vfs vfs;
  sqlite3_vfs* real;
  FaultEnv* env;

  static Vfs* Of(sqlite3_vfs* v) { return static_cast<Vfs*>(v->pAppData); }
  static int Open(sqlite3_vfs* v, const char* name, sqlite3_file* file, int flags, int* out_flags) {
    ShimFile* shim = Shim(file);
    shim->base.pMethods = nullptr;
    shim->env = Of(v)->env;
    shim->inode = nullptr;
    shim->log = (flags & (SQLITE_OPEN_WAL | SQLITE_OPEN_MAIN_JOURNAL)) != 0;
    const bool make = name != nullptr && (flags & SQLITE_OPEN_CREATE) != 0 && ::access(name, F_OK) != 0;
    if (make && SqliteCode(shim->env->NextStep(), SQLITE_CANTOPEN) != SQLITE_OK) return SQLITE_CANTOPEN;
    const int code = Of(v)->real->xOpen(Of(v)->real, name, shim->real(), flags, out_flags);
    if (code != SQLITE_OK) return code;
    if (name != nullptr) shim->inode = new std::shared_ptr<Inode>(shim->env->Find(name));
    shim->base.pMethods = &kShimMethods;
    return SQLITE_OK;
  }
  static int Delete(sqlite3_vfs* v, const char* name, int sync) {
    if (int code = SqliteCode(Of(v)->env->NextStep(), SQLITE_IOERR_DELETE); code != SQLITE_OK) return code;
    Of(v)->env->Removed(name);
    const int code = Of(v)->real->xDelete(Of(v)->real, name, 0);
    if (code == SQLITE_OK && sync) Of(v)->env->NameSynced(name);
    return code;
  }
  static int Access(sqlite3_vfs* v, const char* name, int flags, int* out) {
    return Of(v)->real->xAccess(Of(v)->real, name, flags, out);
  }
  static int FullPathname(sqlite3_vfs* v, const char* name, int n, char* out) {
    return Of(v)->real->xFullPathname(Of(v)->real, name, n, out);
  }
  static int Randomness(sqlite3_vfs* v, int n, char* out) { return Of(v)->real->xRandomness(Of(v)->real, n, out); }
  static int Sleep(sqlite3_vfs* v, int us) { return Of(v)->real->xSleep(Of(v)->real, us); }
  static int CurrentTime(sqlite3_vfs* v, double* out) { return Of(v)->real->xCurrentTime(Of(v)->real, out); }
  static int GetLastError(sqlite3_vfs*, int, char*) { return 0; }
};

FaultEnv::FaultEnv() : vfs_(std::make_unique<Vfs>()) {
  static std::atomic<int> count{0};
  vfs_name_ = "stillhouse-fault-" + std::to_string(count++);
  sqlite3_vfs* real = sqlite3_vfs_find(nullptr);
  vfs_->real = real;
  vfs_->env = this;
  sqlite3_vfs& vfs = vfs_->vfs;
  std::memset(&vfs, 0, sizeof(vfs));
  vfs.iVersion = 1;
  vfs.szOsFile = static_cast<int>(sizeof(ShimFile)) + real->szOsFile;
  vfs.mxPathname = real->mxPathname;
  vfs.zName = vfs_name_.c_str();
  vfs.pAppData = vfs_.get();
  vfs.xOpen = Vfs::Open;
  vfs.xDelete = Vfs::Delete;
  vfs.xAccess = Vfs::Access;
  vfs.xFullPathname = Vfs::FullPathname;
  vfs.xRandomness = Vfs::Randomness;
  vfs.xSleep = Vfs::Sleep;
  vfs.xCurrentTime = Vfs::CurrentTime;
  vfs.xGetLastError = Vfs::GetLastError;
  STILLHOUSE_CHECK(sqlite3_vfs_register(&vfs, 0) == SQLITE_OK);
}
FaultEnv::~FaultEnv() { sqlite3_vfs_unregister(&vfs_->vfs); }

void FaultEnv::Arm(int64_t step, Fault fault, bool sticky) {
  std::lock_guard lock(mu_);
  step_ = 0;
  fail_at_ = step;
  fault_ = fault;
  sticky_ = sticky || fault == Fault::kCrash;
  tripped_ = false;
}
bool FaultEnv::tripped() const {
  std::lock_guard lock(mu_);
  return tripped_;
}
int64_t FaultEnv::steps() const {
  std::lock_guard lock(mu_);
  return step_;
}
void FaultEnv::SetFreeSpace(uint64_t bytes) {
  std::lock_guard lock(mu_);
  free_space_ = bytes;
}

void FaultEnv::SetCapacity(uint64_t bytes) {
  std::lock_guard lock(mu_);
  capacity_ = bytes;
}
uint64_t FaultEnv::UsedBytes() const {
  std::lock_guard lock(mu_);
  uint64_t used = 0;
  for (const auto& [path, inode] : names_) used += PosixEnv()->FileSize(path).value_or(0);
  return used;
}
bool FaultEnv::Fits(const std::string& path, uint64_t end) const {
  const uint64_t used = UsedBytes(), size = PosixEnv()->FileSize(path).value_or(0);
  std::lock_guard lock(mu_);
  return end <= size || used + (end - size) <= capacity_;
}

FaultEnv::Fault FaultEnv::NextStep(bool sync) {
  std::lock_guard lock(mu_);
  const int64_t step = step_++;
  if (fail_at_ < 0 || step < fail_at_ || (step > fail_at_ && !sticky_)) return Fault::kNone;
  if (fault_ == Fault::kSyncError && !sync) return Fault::kNone;
  tripped_ = true;
  return fault_;
}

std::shared_ptr<FaultEnv::Inode> FaultEnv::Find(const std::string& path) {
  std::lock_guard lock(mu_);
  std::shared_ptr<Inode>& inode = names_[path];
  if (inode == nullptr) inode = std::make_shared<Inode>(Inode{path, ""});
  return inode;
}
void FaultEnv::Synced(const std::shared_ptr<Inode>& inode) {
  std::lock_guard lock(mu_);
  inode->durable = ReadWhole(inode->path);
}
void FaultEnv::NameSynced(const std::string& path) {
  std::lock_guard lock(mu_);
  auto it = names_.find(path);
  if (it == names_.end()) {
    durable_.erase(path);
  } else {
    durable_[path] = it->second;
  }
}
void FaultEnv::Removed(const std::string& path) {
  std::lock_guard lock(mu_);
  names_.erase(path);
}

void FaultEnv::LoseUnsynced() {
  std::lock_guard lock(mu_);
  for (const auto& [path, inode] : names_) std::filesystem::remove(path);
  names_.clear();
  for (auto& [path, inode] : durable_) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << inode->durable;
    inode = std::make_shared<Inode>(Inode{path, inode->durable});  // two names of one file part ways here
    names_[path] = inode;
  }
}

absl::StatusOr<std::unique_ptr<WritableFile>> FaultEnv::Create(const std::string& path) {
  STILLHOUSE_RETURN_IF_ERROR(FaultStatus(NextStep()));
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, PosixEnv()->Create(path));
  return std::make_unique<FaultyFile>(this, std::move(file), Find(path));
}
absl::StatusOr<std::unique_ptr<WritableFile>> FaultEnv::OpenForWriting(const std::string& path) {
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, PosixEnv()->OpenForWriting(path));
  return std::make_unique<FaultyFile>(this, std::move(file), Find(path));
}
absl::StatusOr<std::unique_ptr<ReadableFile>> FaultEnv::OpenForReading(const std::string& path) {
  return PosixEnv()->OpenForReading(path);
}
absl::Status FaultEnv::Rename(const std::string& from, const std::string& to) {
  STILLHOUSE_RETURN_IF_ERROR(FaultStatus(NextStep()));
  STILLHOUSE_RETURN_IF_ERROR(PosixEnv()->Rename(from, to));
  std::shared_ptr<Inode> inode = Find(from);
  std::lock_guard lock(mu_);
  names_.erase(from);
  names_[to] = inode;
  inode->path = to;
  return absl::OkStatus();
}
absl::Status FaultEnv::Unlink(const std::string& path) {
  STILLHOUSE_RETURN_IF_ERROR(FaultStatus(NextStep()));
  Removed(path);
  return PosixEnv()->Unlink(path);
}
absl::Status FaultEnv::CreateDirectory(const std::string& path) {
  STILLHOUSE_RETURN_IF_ERROR(FaultStatus(NextStep()));
  return PosixEnv()->CreateDirectory(path);
}
absl::Status FaultEnv::SyncDirectory(const std::string& path) {
  STILLHOUSE_RETURN_IF_ERROR(FaultStatus(NextStep(/*sync=*/true)));
  std::lock_guard lock(mu_);
  auto inside = [&](const std::string& name) { return std::filesystem::path(name).parent_path() == path; };
  std::erase_if(durable_, [&](const auto& entry) { return inside(entry.first); });
  for (const auto& entry : names_) {
    if (inside(entry.first)) durable_.insert(entry);
  }
  return absl::OkStatus();
}
absl::StatusOr<std::vector<std::string>> FaultEnv::ListDirectory(const std::string& path) {
  return PosixEnv()->ListDirectory(path);
}
absl::StatusOr<uint64_t> FaultEnv::FileSize(const std::string& path) { return PosixEnv()->FileSize(path); }
absl::StatusOr<uint64_t> FaultEnv::FreeSpace(const std::string& path) {
  std::lock_guard lock(mu_);
  return free_space_;
}
absl::StatusOr<std::unique_ptr<DirectoryLock>> FaultEnv::Lock(const std::string& path) {
  return PosixEnv()->Lock(path);
}

}  // namespace stillhouse
