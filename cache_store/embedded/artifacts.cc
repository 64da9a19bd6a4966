#include "cache_store/embedded/embedded_store.h"
#include "cache_store/embedded/page_token.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

ArtifactRow ReadRow(const Statement& s) {
  ArtifactRow row{s.Text(0), s.Text(1),
                  s.Text(2), s.Text(3),
                  s.Text(4), static_cast<uint64_t>(s.Int(5)),
                  s.Text(6), absl::FromUnixMicros(s.Int(7)),
                  s.Text(8)};
  row.quarantined = !s.IsNull(9);
  row.quarantine_reason = s.Text(9);
  return row;
}

std::string ResourceName(std::string_view corpus_id, std::string_view cache_id) {
  return StrCat(corpus_id, "/", cache_id);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlobWriter>> EmbeddedStore::NewBlob() {
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<TemporaryBlob> blob, TemporaryBlob::Create(this));
  return blob;
}

absl::StatusOr<ArtifactRow> EmbeddedStore::FindArtifact(std::string_view tenant, std::string_view corpus_id,
                                                        std::string_view cache_id) {
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckId("corpus", corpus_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckId("cache", cache_id));
  Statement find = db_->Prepare(
      "SELECT tenant, corpus_id, cache_id, method, summary_json, size, sha256, create_time, etag, quarantine_reason "
      "FROM artifacts WHERE tenant = ?1 AND corpus_id = ?2 AND cache_id = ?3");
  find.Bind(tenant, corpus_id, cache_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return absl::NotFoundError(StrCat("no cache '", cache_id, "' of corpus '", corpus_id, "'"));
  return ReadRow(find);
}

absl::StatusOr<ArtifactRow> EmbeddedStore::PutArtifact(const ArtifactSpec& spec, BlobWriter* writer) {
  auto* blob = dynamic_cast<TemporaryBlob*>(writer);
  STILLHOUSE_CHECK(blob != nullptr && blob->store() == this) << "the blob is not from this store";
  STILLHOUSE_RETURN_IF_ERROR(CheckId("cache", spec.cache_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the summary", spec.summary_json, kMaxJsonText));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the method", spec.method, 64));
  if (!spec.request_id.empty()) STILLHOUSE_RETURN_IF_ERROR(CheckToken("request", spec.request_id));
  STILLHOUSE_RETURN_IF_ERROR(blob->Finish());
  const std::string resource = ResourceName(spec.corpus_id, spec.cache_id);
  const std::string fingerprint =
      Sha256Hex(StrCat(resource, "/", spec.method, "/", blob->sha256(), "/", spec.summary_json));

  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(FindCorpus(spec.tenant, spec.corpus_id).status());
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string made, FindRequest(spec.tenant, spec.request_id, "cache", fingerprint));
  if (!made.empty()) return FindArtifact(spec.tenant, spec.corpus_id, spec.cache_id);
  absl::StatusOr<ArtifactRow> existing = FindArtifact(spec.tenant, spec.corpus_id, spec.cache_id);
  if (existing.ok() && !spec.replace) {
    return absl::AlreadyExistsError(StrCat("there is a cache '", spec.cache_id, "' of corpus '", spec.corpus_id,
                                           "' already: choose another id, or delete it first"));
  }
  if (!existing.ok() && !absl::IsNotFound(existing.status())) return existing.status();
  if (spec.replace) STILLHOUSE_RETURN_IF_ERROR(CheckEtag(spec.expected_etag, existing.ok() ? existing->etag : ""));
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    // The new blob comes first and the old one goes last: they may be the same.
    STILLHOUSE_RETURN_IF_ERROR(AdoptBlob(blob->path(), blob->sha256(), blob->size(), files));
    if (existing.ok()) STILLHOUSE_RETURN_IF_ERROR(RemoveArtifactRow(*existing));
    STILLHOUSE_RETURN_IF_ERROR(
        db_->Prepare("INSERT INTO artifacts VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, NULL, ?8, ?9)")
            .Bind(spec.tenant, spec.corpus_id, spec.cache_id, spec.method, spec.summary_json, blob->size(),
                  blob->sha256(), NowMicros(), RandomHex(8))
            .Run());
    if (existing.ok() && !existing->quarantined) STILLHOUSE_RETURN_IF_ERROR(ReleaseBlob(existing->sha256, files));
    return RecordRequest(spec.tenant, spec.request_id, "cache", resource, fingerprint);
  }));
  blob->MarkConsumed();
  return FindArtifact(spec.tenant, spec.corpus_id, spec.cache_id);
}

absl::StatusOr<ArtifactRow> EmbeddedStore::GetArtifact(std::string_view tenant, std::string_view corpus_id,
                                                       std::string_view cache_id) {
  absl::MutexLock lock(&mu_);
  return FindArtifact(tenant, corpus_id, cache_id);
}

absl::StatusOr<Page<ArtifactRow>> EmbeddedStore::ListArtifacts(std::string_view tenant, std::string_view corpus_id,
                                                               const PageRequest& request) {
  const std::string list_name = StrCat("artifacts/", tenant, "/", corpus_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size));
  STILLHOUSE_ASSIGN_OR_RETURN(const auto after, ReadPageToken(list_name, request.page_token, 2));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(corpus_id.empty() ? RequireTenant(tenant) : FindCorpus(tenant, corpus_id).status());
  Statement list = db_->Prepare(
      "SELECT tenant, corpus_id, cache_id, method, summary_json, size, sha256, create_time, etag, quarantine_reason "
      "FROM artifacts WHERE tenant = ?1 AND (?2 = '' OR corpus_id = ?2) AND (corpus_id, cache_id) > (?3, ?4) "
      "ORDER BY corpus_id, cache_id LIMIT ?5");
  list.Bind(tenant, corpus_id, after[0], after[1], size + 1);
  Page<ArtifactRow> page;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return page;
    if (page.rows.size() == static_cast<size_t>(size)) {
      page.next_page_token = MakePageToken(list_name, {page.rows.back().corpus_id, page.rows.back().cache_id});
      return page;
    }
    page.rows.push_back(ReadRow(list));
  }
}

absl::StatusOr<ArtifactRow> EmbeddedStore::GetNewestArtifact(std::string_view tenant, std::string_view corpus_id) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(FindCorpus(tenant, corpus_id).status());
  Statement find = db_->Prepare(
      "SELECT tenant, corpus_id, cache_id, method, summary_json, size, sha256, create_time, etag, quarantine_reason "
      "FROM artifacts WHERE tenant = ?1 AND corpus_id = ?2 AND quarantine_reason IS NULL "
      "ORDER BY create_time DESC, cache_id DESC LIMIT 1");
  find.Bind(tenant, corpus_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return absl::NotFoundError("the corpus has no cache yet: build one first");
  return ReadRow(find);
}

absl::StatusOr<StoredArtifact> EmbeddedStore::OpenArtifactFile(std::string_view tenant, std::string_view corpus_id,
                                                               std::string_view cache_id) {
  absl::MutexLock lock(&mu_);
  StoredArtifact artifact;
  STILLHOUSE_ASSIGN_OR_RETURN(artifact.row, FindArtifact(tenant, corpus_id, cache_id));
  if (artifact.row.quarantined) {
    return absl::FailedPreconditionError(
        StrCat("cache '", cache_id, "' is quarantined (", artifact.row.quarantine_reason, "): build it again"));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(artifact.file, OpenBlob(artifact.row.sha256, artifact.row.size));
  return artifact;
}

absl::Status EmbeddedStore::QuarantineArtifact(std::string_view tenant, std::string_view corpus_id,
                                               std::string_view cache_id, std::string_view reason,
                                               std::string_view sha256) {
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the reason", reason, 4096));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactRow row, FindArtifact(tenant, corpus_id, cache_id));
  if (!sha256.empty() && sha256 != row.sha256) return absl::AbortedError("the cache was replaced meanwhile");
  if (row.quarantined) return absl::OkStatus();
  // The rows first: a crash before the move leaves a marked blob, which the next sweep moves.
  FileChanges released;
  STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("UPDATE artifacts SET blob = NULL, quarantine_reason = ?2, etag = "
                                            "lower(hex(randomblob(8))) WHERE blob = ?1")
                                   .Bind(row.sha256, reason)
                                   .Run());
    return ReleaseBlob(row.sha256, released);
  }));
  for (const std::string& name : released.unlink) {
    env_->Rename(BlobPath(name), options_.directory + "/quarantine/" + name)
        .IgnoreError();  // missing, or the next sweep's
  }
  return absl::OkStatus();
}

absl::Status EmbeddedStore::RemoveArtifactRow(const ArtifactRow& row) {
  STILLHOUSE_RETURN_IF_ERROR(ForgetRequests(row.tenant, "cache", ResourceName(row.corpus_id, row.cache_id)));
  return db_->Prepare("DELETE FROM artifacts WHERE tenant = ?1 AND corpus_id = ?2 AND cache_id = ?3")
      .Bind(row.tenant, row.corpus_id, row.cache_id)
      .Run();
}

absl::Status EmbeddedStore::RemoveArtifact(const ArtifactRow& row, FileChanges& files) {
  STILLHOUSE_RETURN_IF_ERROR(RemoveArtifactRow(row));
  return row.quarantined ? absl::OkStatus() : ReleaseBlob(row.sha256, files);
}

absl::Status EmbeddedStore::DeleteArtifact(std::string_view tenant, std::string_view corpus_id,
                                           std::string_view cache_id, std::string_view expected_etag) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactRow row, FindArtifact(tenant, corpus_id, cache_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckEtag(expected_etag, row.etag));
  return WriteFreeing([&](FileChanges& files)
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return RemoveArtifact(row, files); });
}

}  // namespace stillhouse
