#ifndef STILLHOUSE_CACHE_STORE_EMBEDDED_EMBEDDED_STORE_H_
#define STILLHOUSE_CACHE_STORE_EMBEDDED_EMBEDDED_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "cache_store/embedded/database.h"
#include "cache_store/store.h"
#include "kernels/base/sha256.h"

namespace stillhouse {

// The live half of an upload: how much of its file is good. Made on first use after an open, from the chunk log.
struct UploadSession {
  absl::Mutex mu;  // taken before the store's
  bool loaded ABSL_GUARDED_BY(mu) = false;
  bool closed ABSL_GUARDED_BY(mu) = false;  // sealed or aborted: the row and files are gone
  uint64_t received ABSL_GUARDED_BY(mu) = 0;
  uint64_t chunks ABSL_GUARDED_BY(mu) = 0;  // records in the log
};

// The store on one disk: catalog.db, blobs/, uploads/, tmp/, quarantine/, LOCK (FORMAT.md). One mutex guards the
// catalog and every rename that a row names; hashing and bulk writes happen outside it.
class EmbeddedStore final : public Store {
 public:
  static absl::StatusOr<std::unique_ptr<EmbeddedStore>> Open(const StoreOptions& options);
  ~EmbeddedStore() override;

  using Store::PutArtifact;
  absl::StatusOr<TenantRow> CreateTenant(const TenantRow& row, std::string_view request_id) override;
  absl::StatusOr<TenantRow> EnsureTenant(std::string_view tenant) override;
  absl::StatusOr<TenantRow> GetTenant(std::string_view tenant) override;
  absl::StatusOr<Page<TenantRow>> ListTenants(const PageRequest& page) override;
  absl::StatusOr<TenantRow> UpdateTenant(const TenantRow& row) override;
  absl::Status DeleteTenant(std::string_view tenant, std::string_view expected_etag) override;
  absl::StatusOr<ApiKeyRow> InsertApiKey(const ApiKeyRow& row) override;
  absl::StatusOr<ApiKeyRow> GetApiKey(std::string_view key_id) override;
  absl::StatusOr<std::vector<ApiKeyRow>> ListApiKeys(std::string_view tenant) override;
  absl::StatusOr<ApiKeyRow> RevokeApiKey(std::string_view tenant, std::string_view key_id) override;

  absl::StatusOr<UploadState> BeginUpload(const UploadSpec& spec) override;
  absl::StatusOr<uint64_t> WriteChunk(std::string_view tenant, std::string_view upload_id, uint64_t offset,
                                      std::string_view bytes) override;
  absl::StatusOr<UploadState> GetUpload(std::string_view tenant, std::string_view upload_id) override;
  absl::StatusOr<CorpusRow> Seal(std::string_view tenant, std::string_view upload_id) override;
  absl::Status AbortUpload(std::string_view tenant, std::string_view upload_id) override;

  absl::StatusOr<CorpusRow> GetCorpus(std::string_view tenant, std::string_view corpus_id) override;
  absl::StatusOr<Page<CorpusRow>> ListCorpora(std::string_view tenant, const PageRequest& page) override;
  absl::StatusOr<std::string> ReadCorpus(std::string_view tenant, std::string_view corpus_id) override;
  absl::StatusOr<std::shared_ptr<ReadableFile>> OpenCorpus(std::string_view tenant,
                                                           std::string_view corpus_id) override;
  absl::Status DeleteCorpus(std::string_view tenant, std::string_view corpus_id, bool cascade,
                            std::string_view expected_etag) override;

  absl::StatusOr<std::unique_ptr<BlobWriter>> NewBlob() override;
  absl::StatusOr<ArtifactRow> PutArtifact(const ArtifactSpec& spec, BlobWriter* blob) override;
  absl::StatusOr<ArtifactRow> GetArtifact(std::string_view tenant, std::string_view corpus_id,
                                          std::string_view cache_id) override;
  absl::StatusOr<Page<ArtifactRow>> ListArtifacts(std::string_view tenant, std::string_view corpus_id,
                                                  const PageRequest& page) override;
  absl::StatusOr<ArtifactRow> GetNewestArtifact(std::string_view tenant, std::string_view corpus_id) override;
  absl::StatusOr<StoredArtifact> OpenArtifactFile(std::string_view tenant, std::string_view corpus_id,
                                                  std::string_view cache_id) override;
  absl::Status QuarantineArtifact(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id,
                                  std::string_view reason, std::string_view sha256) override;
  absl::Status DeleteArtifact(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id,
                              std::string_view expected_etag) override;

  absl::StatusOr<OperationRow> InsertOperation(const OperationRow& row, std::string_view request_id,
                                               std::string_view fingerprint) override;
  absl::StatusOr<OperationRow> UpdateOperation(std::string_view tenant, std::string_view operation_id,
                                               const OperationUpdate& update) override;
  absl::StatusOr<OperationRow> GetOperation(std::string_view tenant, std::string_view operation_id) override;
  absl::StatusOr<Page<OperationRow>> ListOperations(std::string_view tenant, const OperationFilter& filter,
                                                    const PageRequest& page) override;
  absl::StatusOr<std::vector<OperationRow>> ListUnfinishedOperations() override;
  absl::Status DeleteOperation(std::string_view tenant, std::string_view operation_id) override;
  absl::Status PutCheckpoint(std::string_view tenant, std::string_view operation_id, std::string_view bytes) override;
  absl::StatusOr<std::string> GetCheckpoint(std::string_view tenant, std::string_view operation_id) override;

  absl::StatusOr<TenantUsage> GetUsage(std::string_view tenant) override;
  absl::StatusOr<StoreBytes> GetStoreBytes() override;
  absl::Status CollectGarbage() override;

 private:
  friend class TemporaryBlob;

  // What a transaction does to files, so that they follow its outcome.
  struct FileChanges {
    std::vector<std::pair<std::string, std::string>> undo;  // rename first back to second if it is rolled back
    std::vector<std::string> unlink;                        // blobs to remove once it is committed
  };

  explicit EmbeddedStore(const StoreOptions& options);
  absl::Status Prepare();

  // Runs `body` in a transaction: commits if it says OK, else leaves catalog and files as they were.
  absl::Status Write(absl::FunctionRef<absl::Status(FileChanges&)> body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The same for a body that frees space: on a full disk it gives up the reserve and tries once more, so that a full
  // disk can be emptied. The body may run twice.
  absl::Status WriteFreeing(absl::FunctionRef<absl::Status(FileChanges&)> body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the reserve again if it is missing and there is room.
  void KeepReserve() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes the synced file `temp` the blob `sha256`, inside a transaction.
  absl::Status AdoptBlob(const std::string& temp, const std::string& sha256, uint64_t size, FileChanges& files)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Forgets the blob, inside a transaction, unless a row still names it.
  absl::Status ReleaseBlob(const std::string& sha256, FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Opens a blob that a row names; DATA_LOSS if it is missing or has another size.
  absl::StatusOr<std::shared_ptr<ReadableFile>> OpenBlob(const std::string& sha256, uint64_t size)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Status RequireTenant(std::string_view tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<TenantRow> FindTenant(std::string_view tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<ApiKeyRow> FindApiKey(std::string_view key_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<CorpusRow> FindCorpus(std::string_view tenant, std::string_view corpus_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<ArtifactRow> FindArtifact(std::string_view tenant, std::string_view corpus_id,
                                           std::string_view cache_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<OperationRow> FindOperation(std::string_view tenant, std::string_view operation_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveArtifactRow(const ArtifactRow& row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveArtifact(const ArtifactRow& row, FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Points the operation at another checkpoint blob (none if empty) and releases the one it had.
  absl::Status SetCheckpoint(std::string_view tenant, std::string_view operation_id, const std::string& sha256,
                             FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Idempotency. Look-up: the resource that this request made, empty if it is new, ALREADY_EXISTS if the content
  // differs.
  absl::StatusOr<std::string> FindRequest(std::string_view tenant, std::string_view request_id, std::string_view kind,
                                          std::string_view fingerprint) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RecordRequest(std::string_view tenant, std::string_view request_id, std::string_view kind,
                             std::string_view resource, std::string_view fingerprint)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ForgetRequests(std::string_view tenant, std::string_view kind, std::string_view resource)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  struct UploadRow {
    UploadSpec spec;
    std::string file_id;
    int64_t touch_time = 0;
  };
  absl::StatusOr<UploadRow> FindUpload(std::string_view tenant, std::string_view upload_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The corpus that this upload became; NOT_FOUND if none.
  absl::StatusOr<CorpusRow> FindSealed(std::string_view tenant, std::string_view upload_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<UploadSession> SessionOf(const UploadRow& row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LoadSession(const UploadRow& row, UploadSession& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session.mu);
  absl::Status DiscardUpload(const UploadRow& row, UploadSession& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session.mu)
      ABSL_LOCKS_EXCLUDED(mu_);
  void RemoveUploadFiles(const std::string& file_id);
  std::string UploadData(const std::string& file_id) const {
    return options_.directory + "/uploads/" + file_id + ".data";
  }
  std::string UploadLog(const std::string& file_id) const {
    return options_.directory + "/uploads/" + file_id + ".log";
  }
  std::string BlobPath(std::string_view sha256) const { return options_.directory + "/blobs/" + std::string(sha256); }

  std::string ReservePath() const { return options_.directory + "/RESERVE"; }
  void SweepFolders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<uint64_t> FolderBytes(const std::string& name);

  int64_t NowMicros() const { return absl::ToUnixMicros(options_.now()); }

  const StoreOptions options_;
  Env* const env_;
  std::unique_ptr<DirectoryLock> lock_;

  absl::Mutex mu_;
  std::unique_ptr<Database> db_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::shared_ptr<UploadSession>> sessions_ ABSL_GUARDED_BY(mu_);  // by file id

  absl::Mutex temporaries_mu_;                                                     // innermost
  absl::flat_hash_set<std::string> temporaries_ ABSL_GUARDED_BY(temporaries_mu_);  // base names in tmp/ in use
};

// A file in tmp/ that is hashed as it is written. Must not outlive the store.
class TemporaryBlob final : public BlobWriter {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryBlob>> Create(EmbeddedStore* store);
  ~TemporaryBlob() override;
  absl::Status Append(std::string_view bytes) override;
  uint64_t size() const override { return size_; }
  absl::StatusOr<std::shared_ptr<ReadableFile>> OpenForReading() override;

  // Syncs; after it nothing can be appended.
  absl::Status Finish();
  const std::string& path() const { return path_; }
  const std::string& sha256() const { return sha256_; }  // after Finish
  EmbeddedStore* store() const { return store_; }
  void MarkConsumed() { consumed_ = true; }

 private:
  TemporaryBlob(EmbeddedStore* store, std::string name);
  EmbeddedStore* const store_;
  const std::string name_;
  const std::string path_;
  std::unique_ptr<WritableFile> file_;
  Sha256 hash_;
  std::string sha256_;
  uint64_t size_ = 0;
  absl::Status failed_;
  bool consumed_ = false;
};

// Shared by the files of this folder.
std::string RandomHex(int bytes);
bool IsToken(std::string_view id);  // upload, request and key ids
absl::Status CheckId(std::string_view what, std::string_view id);
absl::Status CheckToken(std::string_view what, std::string_view id);
absl::Status CheckText(std::string_view what, std::string_view text, size_t limit);
absl::Status CheckEtag(std::string_view expected, const std::string& current);
// Reads a blob whole and checks it against its name; DATA_LOSS if it differs.
absl::StatusOr<std::string> ReadVerified(const ReadableFile& file, std::string_view sha256, std::string_view what);

inline constexpr uint64_t kReserveBytes = 1u << 20;
inline constexpr size_t kMaxJsonText = 16u << 20;

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_EMBEDDED_EMBEDDED_STORE_H_
