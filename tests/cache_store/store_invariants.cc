#include "tests/cache_store/store_invariants.h"

#include <set>

#include "kernels/base/sha256.h"
#include "kernels/base/status.h"

namespace stillhouse {

absl::StatusOr<std::string> ReadArtifact(Store& store, const std::string& tenant, const std::string& corpus,
                                         const std::string& cache) {
  STILLHOUSE_ASSIGN_OR_RETURN(StoredArtifact stored, store.OpenArtifactFile(tenant, corpus, cache));
  std::string bytes(stored.file->size(), '\0');
  STILLHOUSE_RETURN_IF_ERROR(stored.file->Read(0, bytes.size(), bytes.data()));
  if (Sha256Hex(bytes) != stored.row.sha256) return absl::DataLossError("the artifact's bytes are not its row's");
  return bytes;
}

std::string BrokenInvariant(Store& store, const std::string& directory, const std::string& tenant, bool exact) {
  std::set<std::string> named;
  absl::StatusOr<Page<CorpusRow>> corpora = store.ListCorpora(tenant, {1000, ""});
  if (!corpora.ok()) return "listing corpora: " + corpora.status().ToString();
  uint64_t corpus_bytes = 0;
  for (const CorpusRow& row : corpora->rows) {
    absl::StatusOr<std::string> text = store.ReadCorpus(tenant, row.corpus_id);
    if (!text.ok()) return "corpus " + row.corpus_id + ": " + text.status().ToString();
    if (text->size() != row.size || Sha256Hex(*text) != row.sha256)
      return "corpus " + row.corpus_id + " is not its row";
    named.insert(row.sha256);
    corpus_bytes += row.size;
  }
  absl::StatusOr<Page<ArtifactRow>> artifacts = store.ListArtifacts(tenant, "", {1000, ""});
  if (!artifacts.ok()) return "listing artifacts: " + artifacts.status().ToString();
  for (const ArtifactRow& row : artifacts->rows) {
    if (row.quarantined) continue;
    absl::StatusOr<std::string> bytes = ReadArtifact(store, tenant, row.corpus_id, row.cache_id);
    if (!bytes.ok()) return "artifact " + row.cache_id + ": " + bytes.status().ToString();
    if (!store.GetCorpus(tenant, row.corpus_id).ok()) return "artifact " + row.cache_id + " without a corpus";
    named.insert(row.sha256);
  }
  absl::StatusOr<Page<OperationRow>> operations = store.ListOperations(tenant, {}, {1000, ""});
  if (!operations.ok()) return "listing operations: " + operations.status().ToString();
  for (const OperationRow& row : operations->rows) {
    if (!row.has_checkpoint) continue;
    if (IsDone(row.state)) return "operation " + row.operation_id + " ended with a checkpoint";
    absl::StatusOr<std::string> bytes = store.GetCheckpoint(tenant, row.operation_id);
    if (!bytes.ok()) return "checkpoint of " + row.operation_id + ": " + bytes.status().ToString();
    named.insert(Sha256Hex(*bytes));
  }
  absl::StatusOr<TenantUsage> usage = store.GetUsage(tenant);
  if (!usage.ok() || usage->corpus_bytes != corpus_bytes) return "the usage is not the sum of the corpora";
  if (!exact) return "";
  const std::vector<std::string> blobs = PosixEnv()->ListDirectory(directory + "/blobs").value();
  for (const std::string& file : blobs) {
    if (!named.contains(file)) return "blob " + file + " belongs to nothing";
  }
  if (!PosixEnv()->ListDirectory(directory + "/tmp").value().empty()) return "tmp/ is not empty";
  if (PosixEnv()->ListDirectory(directory + "/uploads").value().size() > 2 * usage->uploads) {
    return "files in uploads/ belong to nothing";
  }
  return "";
}

}  // namespace stillhouse
