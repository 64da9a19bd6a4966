#include "cache_store/embedded/embedded_store.h"
#include "cache_store/embedded/page_token.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

CorpusRow ReadRow(const Statement& s) {
  return {s.Text(0),
          s.Text(1),
          s.Text(2),
          s.Text(3),
          static_cast<uint64_t>(s.Int(4)),
          s.Text(5),
          absl::FromUnixMicros(s.Int(6)),
          s.Text(7)};
}

}  // namespace

absl::StatusOr<CorpusRow> EmbeddedStore::FindCorpus(std::string_view tenant, std::string_view corpus_id) {
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  STILLHOUSE_RETURN_IF_ERROR(CheckId("corpus", corpus_id));
  Statement find = db_->Prepare(
      "SELECT tenant, corpus_id, display_name, media_type, size, sha256, create_time, etag FROM corpora "
      "WHERE tenant = ?1 AND corpus_id = ?2");
  find.Bind(tenant, corpus_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) return absl::NotFoundError(StrCat("no corpus '", corpus_id, "'"));
  return ReadRow(find);
}

absl::StatusOr<CorpusRow> EmbeddedStore::FindSealed(std::string_view tenant, std::string_view upload_id) {
  std::string corpus_id;
  {
    Statement find = db_->Prepare("SELECT corpus_id FROM corpora WHERE tenant = ?1 AND upload_id = ?2");
    find.Bind(tenant, upload_id);
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
    if (!row)
      return absl::NotFoundError("no such upload: it was aborted, left idle too long, or never begun; begin a new one");
    corpus_id = find.Text(0);
  }
  return FindCorpus(tenant, corpus_id);
}

absl::StatusOr<CorpusRow> EmbeddedStore::GetCorpus(std::string_view tenant, std::string_view corpus_id) {
  absl::MutexLock lock(&mu_);
  return FindCorpus(tenant, corpus_id);
}

absl::StatusOr<Page<CorpusRow>> EmbeddedStore::ListCorpora(std::string_view tenant, const PageRequest& request) {
  const std::string list_name = StrCat("corpora/", tenant);
  STILLHOUSE_ASSIGN_OR_RETURN(const int size, PageSize(request.page_size));
  STILLHOUSE_ASSIGN_OR_RETURN(const auto after, ReadPageToken(list_name, request.page_token, 1));
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  Statement list = db_->Prepare(
      "SELECT tenant, corpus_id, display_name, media_type, size, sha256, create_time, etag FROM corpora "
      "WHERE tenant = ?1 AND corpus_id > ?2 ORDER BY corpus_id LIMIT ?3");
  list.Bind(tenant, after[0], size + 1);
  Page<CorpusRow> page;
  while (true) {
    STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
    if (!row) return page;
    if (page.rows.size() == static_cast<size_t>(size)) {
      page.next_page_token = MakePageToken(list_name, {page.rows.back().corpus_id});
      return page;
    }
    page.rows.push_back(ReadRow(list));
  }
}

absl::StatusOr<std::shared_ptr<ReadableFile>> EmbeddedStore::OpenCorpus(std::string_view tenant,
                                                                        std::string_view corpus_id) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const CorpusRow row, FindCorpus(tenant, corpus_id));
  return OpenBlob(row.sha256, row.size);
}

absl::StatusOr<std::string> EmbeddedStore::ReadCorpus(std::string_view tenant, std::string_view corpus_id) {
  std::shared_ptr<ReadableFile> file;
  std::string sha256;
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_ASSIGN_OR_RETURN(const CorpusRow row, FindCorpus(tenant, corpus_id));
    STILLHOUSE_ASSIGN_OR_RETURN(file, OpenBlob(row.sha256, row.size));
    sha256 = row.sha256;
  }
  return ReadVerified(*file, sha256, StrCat("corpus '", corpus_id, "'"));
}

absl::Status EmbeddedStore::DeleteCorpus(std::string_view tenant, std::string_view corpus_id, bool cascade,
                                         std::string_view expected_etag) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_ASSIGN_OR_RETURN(const CorpusRow corpus, FindCorpus(tenant, corpus_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckEtag(expected_etag, corpus.etag));
  std::vector<std::string> caches;
  {
    Statement list =
        db_->Prepare("SELECT cache_id FROM artifacts WHERE tenant = ?1 AND corpus_id = ?2 ORDER BY cache_id");
    list.Bind(tenant, corpus_id);
    while (true) {
      STILLHOUSE_ASSIGN_OR_RETURN(const bool row, list.Step());
      if (!row) break;
      caches.push_back(list.Text(0));
    }
  }
  if (!caches.empty() && !cascade) {
    return absl::FailedPreconditionError(
        StrCat("corpus '", corpus_id, "' still has ", caches.size(), " cache(s): delete them first, or ask for both"));
  }
  return WriteFreeing([&](FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const std::string& cache_id : caches) {
      STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactRow artifact, FindArtifact(tenant, corpus_id, cache_id));
      STILLHOUSE_RETURN_IF_ERROR(RemoveArtifact(artifact, files));
    }
    STILLHOUSE_RETURN_IF_ERROR(ForgetRequests(tenant, "corpus", corpus_id));
    STILLHOUSE_RETURN_IF_ERROR(
        db_->Prepare("DELETE FROM corpora WHERE tenant = ?1 AND corpus_id = ?2").Bind(tenant, corpus_id).Run());
    return ReleaseBlob(corpus.sha256, files);
  });
}

}  // namespace stillhouse
