#ifndef STILLHOUSE_CACHE_STORE_STORE_H_
#define STILLHOUSE_CACHE_STORE_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_store/env.h"

namespace stillhouse {

// The durable memory of a server: documents, cache artifacts, build jobs, tenants and keys. It sees bytes and rows,
// never tensors or protobufs. Contents are blobs named by their SHA-256; a catalog row is the commit point of every
// change, so that after any crash a thing is wholly there or wholly absent.
//
// Every name carries its tenant; another tenant's row is the same NOT_FOUND as a missing one. Ids of tenants, corpora,
// caches and operations match ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$; upload, request and key ids match
// ^[A-Za-z0-9_-]{1,64}$. JSON columns are opaque strings here. SHA-256 values are 64 lower-case hex digits. Rows are
// returned by value.
//
// Errors: INVALID_ARGUMENT (malformed id, hash or page token), NOT_FOUND, ALREADY_EXISTS, ABORTED (the etag is not the
// row's: read again), FAILED_PRECONDITION, OUT_OF_RANGE (upload gaps), RESOURCE_EXHAUSTED (disk full), DATA_LOSS
// (stored bytes do not match their hash), UNAVAILABLE (device error). After an error nothing is half-visible and the
// store is usable. One case is in doubt, as with any disk: if it fails while a commit is synced and stays bad, the
// error may be reported for a change that was made, wholly. Asking again (with the same request or upload id) tells.

struct CorpusRow {
  std::string tenant;
  std::string corpus_id;
  std::string display_name;
  std::string media_type;
  uint64_t size = 0;   // bytes
  std::string sha256;  // of the bytes
  absl::Time create_time;
  std::string etag;
};

struct UploadSpec {
  std::string tenant;
  std::string corpus_id;
  std::string display_name;
  std::string media_type;
  uint64_t size = 0;       // declared; Seal refuses anything else
  std::string sha256;      // declared; Seal refuses anything else
  std::string upload_id;   // chosen by the caller, or empty: one is made
  std::string request_id;  // optional UUID that makes the create idempotent
};

struct UploadState {
  std::string upload_id;
  std::string corpus_id;
  uint64_t declared_size = 0;
  uint64_t received = 0;            // the offset that the next chunk must have
  std::optional<CorpusRow> corpus;  // set once sealed: nothing is left to send
};

struct ArtifactRow {
  std::string tenant;
  std::string corpus_id;
  std::string cache_id;
  std::string method;        // CARTRIDGE, STILL, ATTENTION_MATCHING, …
  std::string summary_json;  // what lists and Get show without opening the file (header and quality report)
  uint64_t size = 0;         // bytes of the file
  std::string sha256;        // of the whole file
  absl::Time create_time;
  std::string etag;
  bool quarantined = false;
  std::string quarantine_reason;
};

struct ArtifactSpec {
  std::string tenant;
  std::string corpus_id;
  std::string cache_id;
  std::string method;
  std::string summary_json;
  std::string request_id;     // optional, as for uploads; the fingerprint is the file's hash and these fields
  bool replace = false;       // false: ALREADY_EXISTS if the cache exists
  std::string expected_etag;  // with replace: if set, ABORTED unless the current row has it
};

enum class OperationState { kQueued, kRunning, kSucceeded, kFailed, kCancelled };
inline bool IsDone(OperationState s) { return s != OperationState::kQueued && s != OperationState::kRunning; }

struct OperationRow {
  std::string tenant;
  std::string operation_id;
  std::string kind;    // BUILD_CACHE, …
  std::string target;  // resource that it makes, e.g. corpora/c/caches/k
  std::string request_json;
  OperationState state = OperationState::kQueued;
  bool cancel_requested = false;
  std::string progress_json;
  bool has_checkpoint = false;
  std::string result_json;  // when kSucceeded
  int error_code = 0;       // absl::StatusCode when kFailed or kCancelled
  std::string error_message;
  absl::Time create_time;
  absl::Time update_time;
  absl::Time end_time = absl::InfiniteFuture();  // until done
  std::string etag;
};

// Fields that are set change; the others stay.
struct OperationUpdate {
  std::optional<OperationState> state;
  std::optional<bool> cancel_requested;
  std::optional<std::string> progress_json;
  std::optional<std::string> result_json;
  std::optional<int> error_code;
  std::optional<std::string> error_message;
};

struct OperationFilter {
  std::optional<bool> done;
  std::string kind;    // empty: any
  std::string target;  // empty: any
};

struct TenantRow {
  std::string tenant;
  std::string display_name;
  std::string quotas_json;
  absl::Time create_time;
  std::string etag;
};

struct ApiKeyRow {
  std::string key_id;  // public part of the key, unique in the store
  std::string tenant;
  std::string key_sha256;
  std::string label;
  absl::Time create_time;
  absl::Time revoke_time = absl::InfiniteFuture();  // in the past: revoked
};

struct TenantUsage {
  uint64_t corpora = 0, corpus_bytes = 0;
  uint64_t caches = 0, cache_bytes = 0;
  uint64_t uploads = 0, upload_bytes = 0;  // declared sizes of open uploads: count them against the quota too
  uint64_t checkpoint_bytes = 0;
};

// Bytes on disk (a blob shared by several rows counts once, under the first kind that applies).
struct StoreBytes {
  uint64_t corpora = 0, caches = 0, checkpoints = 0, uploads = 0, quarantine = 0, catalog = 0;
};

struct PageRequest {
  int page_size = 0;       // 0: 100; more than 1000 is cut to 1000; negative is INVALID_ARGUMENT
  std::string page_token;  // from the previous page of the same list and filter, or empty
};

template <typename Row>
struct Page {
  std::vector<Row> rows;
  std::string next_page_token;  // empty: the last page
};

// A blob on its way in. One thread at a time. Dropping it without Put removes the bytes.
class BlobWriter {
 public:
  virtual ~BlobWriter() = default;
  virtual absl::Status Append(std::string_view bytes) = 0;
  virtual uint64_t size() const = 0;
  // The bytes so far, for a check before they are put (an import must verify the file first).
  virtual absl::StatusOr<std::shared_ptr<ReadableFile>> OpenForReading() = 0;
};

struct StoredArtifact {
  ArtifactRow row;
  std::shared_ptr<ReadableFile> file;  // pins the blob: its bytes stay until the last reference is dropped
};

// Thread-safe.
class Store {
 public:
  virtual ~Store() = default;

  // ---- Tenants and keys. Everything else needs the tenant's row first (NOT_FOUND without).
  virtual absl::StatusOr<TenantRow> CreateTenant(const TenantRow& row, std::string_view request_id = {}) = 0;
  // The row, made with no quotas if it is missing (the loopback mode's tenants/default).
  virtual absl::StatusOr<TenantRow> EnsureTenant(std::string_view tenant) = 0;
  virtual absl::StatusOr<TenantRow> GetTenant(std::string_view tenant) = 0;
  virtual absl::StatusOr<Page<TenantRow>> ListTenants(const PageRequest& page) = 0;
  // Writes display_name and quotas_json; a non-empty row.etag must be the current one.
  virtual absl::StatusOr<TenantRow> UpdateTenant(const TenantRow& row) = 0;
  // FAILED_PRECONDITION while it has corpora, uploads or unfinished operations. Removes its keys and finished
  // operations.
  virtual absl::Status DeleteTenant(std::string_view tenant, std::string_view expected_etag = {}) = 0;
  virtual absl::StatusOr<ApiKeyRow> InsertApiKey(const ApiKeyRow& row) = 0;
  virtual absl::StatusOr<ApiKeyRow> GetApiKey(std::string_view key_id) = 0;
  virtual absl::StatusOr<std::vector<ApiKeyRow>> ListApiKeys(std::string_view tenant) = 0;
  virtual absl::StatusOr<ApiKeyRow> RevokeApiKey(std::string_view tenant, std::string_view key_id) = 0;

  // ---- Uploads. A session survives broken streams and restarts until it is sealed, aborted or left idle too long.
  // The same upload_id or request_id with the same spec gives the session as it stands (or the sealed corpus); with
  // another spec ALREADY_EXISTS, as is a corpus id that is taken. RESOURCE_EXHAUSTED if the disk cannot hold the
  // declared size.
  virtual absl::StatusOr<UploadState> BeginUpload(const UploadSpec& spec) = 0;
  // Returns the new received size. `offset` must be the received size; bytes that were already received may be sent
  // again (checked against what is there: other bytes are INVALID_ARGUMENT). Past the received size: OUT_OF_RANGE. Past
  // the declared size: INVALID_ARGUMENT.
  virtual absl::StatusOr<uint64_t> WriteChunk(std::string_view tenant, std::string_view upload_id, uint64_t offset,
                                              std::string_view bytes) = 0;
  virtual absl::StatusOr<UploadState> GetUpload(std::string_view tenant, std::string_view upload_id) = 0;
  // Verifies size (FAILED_PRECONDITION if bytes are missing) and hash (INVALID_ARGUMENT; the session is then discarded)
  // and makes the corpus visible. Sealing again gives the same row.
  virtual absl::StatusOr<CorpusRow> Seal(std::string_view tenant, std::string_view upload_id) = 0;
  virtual absl::Status AbortUpload(std::string_view tenant, std::string_view upload_id) = 0;

  // ---- Corpora, in the order of their ids.
  virtual absl::StatusOr<CorpusRow> GetCorpus(std::string_view tenant, std::string_view corpus_id) = 0;
  virtual absl::StatusOr<Page<CorpusRow>> ListCorpora(std::string_view tenant, const PageRequest& page) = 0;
  // The bytes, verified against the hash (DATA_LOSS).
  virtual absl::StatusOr<std::string> ReadCorpus(std::string_view tenant, std::string_view corpus_id) = 0;
  virtual absl::StatusOr<std::shared_ptr<ReadableFile>> OpenCorpus(std::string_view tenant,
                                                                   std::string_view corpus_id) = 0;
  // FAILED_PRECONDITION while the corpus has caches, unless `cascade`: then they go in the same transaction.
  virtual absl::Status DeleteCorpus(std::string_view tenant, std::string_view corpus_id, bool cascade = false,
                                    std::string_view expected_etag = {}) = 0;

  // ---- Artifacts, in the order of (corpus id, cache id).
  virtual absl::StatusOr<std::unique_ptr<BlobWriter>> NewBlob() = 0;
  // Makes the written bytes the cache's file. The corpus must exist. On success `blob` is consumed; on error it may be
  // put again. Readers of a replaced artifact keep the old bytes.
  virtual absl::StatusOr<ArtifactRow> PutArtifact(const ArtifactSpec& spec, BlobWriter* blob) = 0;
  absl::StatusOr<ArtifactRow> PutArtifact(const ArtifactSpec& spec, std::string_view bytes);
  virtual absl::StatusOr<ArtifactRow> GetArtifact(std::string_view tenant, std::string_view corpus_id,
                                                  std::string_view cache_id) = 0;
  // corpus_id empty: those of all corpora.
  virtual absl::StatusOr<Page<ArtifactRow>> ListArtifacts(std::string_view tenant, std::string_view corpus_id,
                                                          const PageRequest& page) = 0;
  // The corpus's newest that is not quarantined. NOT_FOUND if it has none.
  virtual absl::StatusOr<ArtifactRow> GetNewestArtifact(std::string_view tenant, std::string_view corpus_id) = 0;
  // FAILED_PRECONDITION if it is quarantined. The size is checked here; the content by OpenArtifact (artifact.h).
  virtual absl::StatusOr<StoredArtifact> OpenArtifactFile(std::string_view tenant, std::string_view corpus_id,
                                                          std::string_view cache_id) = 0;
  // Marks every row that shares the bytes and moves the file to quarantine/, where only an operator touches it. A
  // non-empty `sha256` must still be the row's (ABORTED): a rebuilt cache is not punished for its predecessor.
  virtual absl::Status QuarantineArtifact(std::string_view tenant, std::string_view corpus_id,
                                          std::string_view cache_id, std::string_view reason,
                                          std::string_view sha256 = {}) = 0;
  virtual absl::Status DeleteArtifact(std::string_view tenant, std::string_view corpus_id, std::string_view cache_id,
                                      std::string_view expected_etag = {}) = 0;

  // ---- Operations, newest first. A finished operation never changes again (FAILED_PRECONDITION): the first of
  // completion and cancellation wins. With a request_id, the same `fingerprint` (any string that stands for the
  // request's content) gives the first row, another one ALREADY_EXISTS. Times, etag and has_checkpoint of `row` are
  // ignored.
  virtual absl::StatusOr<OperationRow> InsertOperation(const OperationRow& row, std::string_view request_id = {},
                                                       std::string_view fingerprint = {}) = 0;
  virtual absl::StatusOr<OperationRow> UpdateOperation(std::string_view tenant, std::string_view operation_id,
                                                       const OperationUpdate& update) = 0;
  virtual absl::StatusOr<OperationRow> GetOperation(std::string_view tenant, std::string_view operation_id) = 0;
  virtual absl::StatusOr<Page<OperationRow>> ListOperations(std::string_view tenant, const OperationFilter& filter,
                                                            const PageRequest& page) = 0;
  // All tenants, oldest first: what a restarted server takes up again.
  virtual absl::StatusOr<std::vector<OperationRow>> ListUnfinishedOperations() = 0;
  virtual absl::Status DeleteOperation(std::string_view tenant, std::string_view operation_id) = 0;  // finished ones
  // Replaces the operation's checkpoint atomically; it is dropped when the operation finishes.
  virtual absl::Status PutCheckpoint(std::string_view tenant, std::string_view operation_id,
                                     std::string_view bytes) = 0;
  // NOT_FOUND if there is none; DATA_LOSS if it does not match its hash (start from the beginning then).
  virtual absl::StatusOr<std::string> GetCheckpoint(std::string_view tenant, std::string_view operation_id) = 0;

  // ---- The whole.
  virtual absl::StatusOr<TenantUsage> GetUsage(std::string_view tenant) = 0;
  virtual absl::StatusOr<StoreBytes> GetStoreBytes() = 0;
  // Removes idle uploads, old finished operations, stale temporary files and blobs that no row and no reader holds. Run
  // at open; safe at any time (garbage_collector.h).
  virtual absl::Status CollectGarbage() = 0;
};

// Whether `id` may name a tenant, corpus, cache or operation.
bool IsResourceId(std::string_view id);

struct StoreOptions {
  std::string directory;                  // made if missing (its parent must exist)
  Env* env = nullptr;                     // nullptr: PosixEnv()
  uint64_t min_free_bytes = 64ull << 20;  // an upload that would leave less is refused
  absl::Duration upload_ttl = absl::Hours(24);
  absl::Duration finished_operation_ttl = absl::Hours(24 * 30);
  absl::Time (*now)() = &absl::Now;
};

// Opens the embedded store (SQLite catalog and content-addressed files; FORMAT.md). FAILED_PRECONDITION if another
// process has the directory open or a newer version wrote it; DATA_LOSS if the catalog is damaged.
absl::StatusOr<std::unique_ptr<Store>> OpenEmbeddedStore(const StoreOptions& options);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_STORE_H_
