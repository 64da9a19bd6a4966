#include <algorithm>
#include <array>

#include "cache_store/crc32c.h"
#include "cache_store/embedded/embedded_store.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

// An upload's bytes go to uploads/<file id>.data, and for every chunk a 16-byte record to <file id>.log: the offset
// where the chunk ends, the CRC32C of its bytes, the CRC32C of the record. After a crash the log tells how much of the
// data can be trusted, without a sync per chunk: the longest chain of records whose bytes match. Seal then checks the
// whole.

namespace stillhouse {
namespace {

constexpr size_t kPiece = 1u << 20;
constexpr size_t kRecord = 16;

void PutLittleEndian(uint64_t value, int bytes, std::string& out) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}
uint64_t GetLittleEndian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

std::string LogRecord(const std::string& file_id, uint64_t end, uint32_t crc) {
  std::string record;
  PutLittleEndian(end, 8, record);
  PutLittleEndian(crc, 4, record);
  // The file's id is part of the sum, so that a stale block of another log is no record of this one.
  PutLittleEndian(Crc32c(record, Crc32c(file_id)), 4, record);
  return record;
}

std::string Fingerprint(const UploadSpec& spec) {
  return Sha256Hex(StrCat(spec.corpus_id, "/", spec.size, "/", spec.sha256, "/", spec.display_name.size(), "/",
                          spec.display_name, spec.media_type));
}

absl::Status CheckSpec(const UploadSpec& spec) {
  STILLHOUSE_RETURN_IF_ERROR(CheckId("corpus", spec.corpus_id));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the display name", spec.display_name, 1024));
  STILLHOUSE_RETURN_IF_ERROR(CheckText("the media type", spec.media_type, 255));
  if (!spec.upload_id.empty()) STILLHOUSE_RETURN_IF_ERROR(CheckToken("upload", spec.upload_id));
  if (!spec.request_id.empty()) STILLHOUSE_RETURN_IF_ERROR(CheckToken("request", spec.request_id));
  if (!IsSha256Hex(spec.sha256))
    return absl::InvalidArgumentError("the declared SHA-256 is not 64 lower-case hex digits");
  if (spec.size > (uint64_t{1} << 50)) return absl::InvalidArgumentError("the declared size is over 2^50 bytes");
  return absl::OkStatus();
}

// The 1 MiB pieces of [begin, end) of a file, one after the other.
template <typename Visit>
absl::Status ForEachPiece(const ReadableFile& file, uint64_t begin, uint64_t end, const Visit& visit) {
  std::string piece(static_cast<size_t>(std::min<uint64_t>(kPiece, end - begin)), '\0');
  while (begin < end) {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(piece.size(), end - begin));
    STILLHOUSE_RETURN_IF_ERROR(file.Read(begin, n, piece.data()));
    if (!visit(std::string_view(piece.data(), n))) break;
    begin += n;
  }
  return absl::OkStatus();
}

// Opens for writing, making the file if it is missing.
absl::StatusOr<std::unique_ptr<WritableFile>> OpenOrCreate(Env* env, const std::string& path) {
  absl::StatusOr<std::unique_ptr<WritableFile>> file = env->OpenForWriting(path);
  return absl::IsNotFound(file.status()) ? env->Create(path) : std::move(file);
}

}  // namespace

absl::StatusOr<EmbeddedStore::UploadRow> EmbeddedStore::FindUpload(std::string_view tenant,
                                                                   std::string_view upload_id) {
  STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
  Statement find = db_->Prepare(
      "SELECT corpus_id, display_name, media_type, size, sha256, request_id, file_id, touch_time FROM uploads "
      "WHERE tenant = ?1 AND upload_id = ?2");
  find.Bind(tenant, upload_id);
  STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
  if (!row) {
    return absl::NotFoundError("no such upload: it was aborted, left idle too long, or never begun; begin a new one");
  }
  UploadRow upload;
  upload.spec = {
      std::string(tenant), find.Text(0),           find.Text(1), find.Text(2), static_cast<uint64_t>(find.Int(3)),
      find.Text(4),        std::string(upload_id), find.Text(5)};
  upload.file_id = find.Text(6);
  upload.touch_time = find.Int(7);
  return upload;
}

std::shared_ptr<UploadSession> EmbeddedStore::SessionOf(const UploadRow& row) {
  std::shared_ptr<UploadSession>& session = sessions_[row.file_id];
  if (session == nullptr) session = std::make_shared<UploadSession>();
  return session;
}

absl::StatusOr<UploadState> EmbeddedStore::BeginUpload(const UploadSpec& wanted) {
  STILLHOUSE_RETURN_IF_ERROR(CheckSpec(wanted));
  const std::string fingerprint = Fingerprint(wanted);
  UploadSpec spec = wanted;
  auto other_content = [] {
    return absl::AlreadyExistsError("this upload id was used for another document: choose a new one");
  };
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_RETURN_IF_ERROR(RequireTenant(spec.tenant));
    STILLHOUSE_ASSIGN_OR_RETURN(const std::string made,
                                FindRequest(spec.tenant, spec.request_id, "corpus", fingerprint));
    if (!made.empty()) {
      absl::StatusOr<CorpusRow> corpus = FindCorpus(spec.tenant, made);
      std::string upload_id;
      {
        Statement find = db_->Prepare(
            "SELECT upload_id FROM uploads WHERE tenant = ?1 AND request_id = ?2 UNION ALL "
            "SELECT upload_id FROM corpora WHERE tenant = ?1 AND corpus_id = ?3");
        find.Bind(spec.tenant, spec.request_id, made);
        STILLHOUSE_ASSIGN_OR_RETURN(const bool row, find.Step());
        if (row) upload_id = find.Text(0);
      }
      if (!spec.upload_id.empty() && spec.upload_id != upload_id) {
        return absl::AlreadyExistsError(
            "this request_id began an upload with another upload id: send that one, or a new request_id");
      }
      spec.upload_id = upload_id;
      if (corpus.ok()) return UploadState{upload_id, made, corpus->size, corpus->size, *corpus};
      if (!absl::IsNotFound(corpus.status())) return corpus.status();
    }
    if (spec.upload_id.empty()) spec.upload_id = RandomHex(16);
    absl::StatusOr<UploadRow> open = FindUpload(spec.tenant, spec.upload_id);
    if (open.ok()) {
      if (Fingerprint(open->spec) != fingerprint) return other_content();
    } else if (!absl::IsNotFound(open.status())) {
      return open.status();
    } else {
      absl::StatusOr<CorpusRow> sealed = FindSealed(spec.tenant, spec.upload_id);
      if (sealed.ok()) {
        UploadSpec then = spec;
        then.corpus_id = sealed->corpus_id, then.display_name = sealed->display_name,
        then.media_type = sealed->media_type;
        then.size = sealed->size, then.sha256 = sealed->sha256;
        if (Fingerprint(then) != fingerprint) return other_content();
        return UploadState{spec.upload_id, sealed->corpus_id, sealed->size, sealed->size, *sealed};
      }
      if (!absl::IsNotFound(sealed.status())) return sealed.status();
      absl::StatusOr<CorpusRow> taken = FindCorpus(spec.tenant, spec.corpus_id);
      if (taken.ok()) {
        return absl::AlreadyExistsError(
            StrCat("there is a corpus '", spec.corpus_id, "' already: choose another id, or delete it first"));
      }
      if (!absl::IsNotFound(taken.status())) return taken.status();
      STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t free, env_->FreeSpace(options_.directory));
      if (free < options_.min_free_bytes || free - options_.min_free_bytes < spec.size) {
        return absl::ResourceExhaustedError(
            StrCat("the server's disk has no room for ", spec.size, " bytes: delete something and try again"));
      }
      STILLHOUSE_RETURN_IF_ERROR(Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        const int64_t now = NowMicros();
        STILLHOUSE_RETURN_IF_ERROR(
            db_->Prepare("INSERT INTO uploads VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)")
                .Bind(spec.tenant, spec.upload_id, RandomHex(16), spec.corpus_id, spec.display_name, spec.media_type,
                      spec.size, spec.sha256, spec.request_id, fingerprint, now, now)
                .Run());
        return RecordRequest(spec.tenant, spec.request_id, "corpus", spec.corpus_id, fingerprint);
      }));
    }
  }
  return GetUpload(spec.tenant, spec.upload_id);
}

absl::Status EmbeddedStore::LoadSession(const UploadRow& row, UploadSession& session) {
  if (session.loaded) return absl::OkStatus();
  uint64_t received = 0, chunks = 0;
  absl::StatusOr<std::unique_ptr<ReadableFile>> log = env_->OpenForReading(UploadLog(row.file_id));
  absl::StatusOr<std::unique_ptr<ReadableFile>> data = env_->OpenForReading(UploadData(row.file_id));
  for (const absl::Status& status : {log.status(), data.status()}) {
    if (!status.ok() && !absl::IsNotFound(status)) return status;
  }
  if (log.ok() && data.ok()) {
    std::array<char, kRecord> bytes;
    for (; (chunks + 1) * kRecord <= (*log)->size(); ++chunks) {
      STILLHOUSE_RETURN_IF_ERROR((*log)->Read(chunks * kRecord, kRecord, bytes.data()));
      const std::string_view record(bytes.data(), kRecord);
      const uint64_t end = GetLittleEndian(record.substr(0, 8));
      const uint32_t expected = static_cast<uint32_t>(GetLittleEndian(record.substr(8, 4)));
      if (record != LogRecord(row.file_id, end, expected)) break;
      if (end <= received || end > row.spec.size || end > (*data)->size()) break;
      uint32_t crc = 0;
      STILLHOUSE_RETURN_IF_ERROR(ForEachPiece(**data, received, end, [&](std::string_view piece) {
        crc = Crc32c(piece, crc);
        return true;
      }));
      if (crc != expected) break;
      received = end;
    }
  }
  session.received = received;
  session.chunks = chunks;
  session.loaded = true;
  return absl::OkStatus();
}

absl::StatusOr<UploadState> EmbeddedStore::GetUpload(std::string_view tenant, std::string_view upload_id) {
  UploadRow row;
  std::shared_ptr<UploadSession> session;
  {
    absl::MutexLock lock(&mu_);
    absl::StatusOr<UploadRow> found = FindUpload(tenant, upload_id);
    if (absl::IsNotFound(found.status())) {
      STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
      STILLHOUSE_ASSIGN_OR_RETURN(CorpusRow corpus, FindSealed(tenant, upload_id));
      return UploadState{std::string(upload_id), corpus.corpus_id, corpus.size, corpus.size, corpus};
    }
    STILLHOUSE_RETURN_IF_ERROR(found.status());
    row = *std::move(found);
    session = SessionOf(row);
  }
  absl::MutexLock lock(&session->mu);
  if (session->closed) {
    absl::MutexLock store_lock(&mu_);
    STILLHOUSE_ASSIGN_OR_RETURN(CorpusRow corpus, FindSealed(tenant, upload_id));
    return UploadState{std::string(upload_id), corpus.corpus_id, corpus.size, corpus.size, corpus};
  }
  STILLHOUSE_RETURN_IF_ERROR(LoadSession(row, *session));
  return UploadState{row.spec.upload_id, row.spec.corpus_id, row.spec.size, session->received, std::nullopt};
}

absl::StatusOr<uint64_t> EmbeddedStore::WriteChunk(std::string_view tenant, std::string_view upload_id, uint64_t offset,
                                                   std::string_view bytes) {
  UploadRow row;
  std::shared_ptr<UploadSession> session;
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_ASSIGN_OR_RETURN(row, FindUpload(tenant, upload_id));
    session = SessionOf(row);
  }
  absl::MutexLock lock(&session->mu);
  if (session->closed) return absl::NotFoundError("the upload was sealed or aborted meanwhile");
  STILLHOUSE_RETURN_IF_ERROR(LoadSession(row, *session));
  uint64_t end = 0;
  if (offset > session->received) {
    return absl::OutOfRangeError(StrCat("chunk at offset ", offset, " leaves a gap: ", session->received,
                                        " bytes were received, go on from there"));
  }
  if (__builtin_add_overflow(offset, uint64_t{bytes.size()}, &end) || end > row.spec.size) {
    return absl::InvalidArgumentError(StrCat("chunk goes past the declared size of ", row.spec.size, " bytes"));
  }
  const uint64_t known = std::min(end, session->received);
  if (offset < known) {
    bool same = true;
    uint64_t at = 0;
    STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> data, env_->OpenForReading(UploadData(row.file_id)));
    STILLHOUSE_RETURN_IF_ERROR(ForEachPiece(*data, offset, known, [&](std::string_view piece) {
      same = bytes.substr(at, piece.size()) == piece;
      at += piece.size();
      return same;
    }));
    if (!same) {
      return absl::InvalidArgumentError(
          StrCat("chunk at offset ", offset,
                 " differs from the bytes received before: abort this upload and begin a new one"));
    }
  }
  bytes.remove_prefix(known - offset);
  if (bytes.empty()) return session->received;

  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> data, OpenOrCreate(env_, UploadData(row.file_id)));
  STILLHOUSE_RETURN_IF_ERROR(data->WriteAt(session->received, bytes));
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> log, OpenOrCreate(env_, UploadLog(row.file_id)));
  STILLHOUSE_RETURN_IF_ERROR(log->WriteAt(session->chunks * kRecord, LogRecord(row.file_id, end, Crc32c(bytes))));
  session->received = end;
  ++session->chunks;

  const int64_t now = NowMicros();
  const int64_t rest = absl::ToInt64Microseconds(std::min(absl::Minutes(10), options_.upload_ttl / 8));
  if (now - row.touch_time > rest) {
    absl::MutexLock store_lock(&mu_);
    absl::Status touched = Write([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return db_->Prepare("UPDATE uploads SET touch_time = ?2 WHERE file_id = ?1").Bind(row.file_id, now).Run();
    });
    if (!touched.ok()) STILLHOUSE_LOG(WARNING) << "noting an upload's activity: " << touched;
  }
  return session->received;
}

absl::StatusOr<CorpusRow> EmbeddedStore::Seal(std::string_view tenant, std::string_view upload_id) {
  UploadRow row;
  std::shared_ptr<UploadSession> session;
  {
    absl::MutexLock lock(&mu_);
    absl::StatusOr<UploadRow> found = FindUpload(tenant, upload_id);
    if (absl::IsNotFound(found.status())) {
      STILLHOUSE_RETURN_IF_ERROR(RequireTenant(tenant));
      return FindSealed(tenant, upload_id);
    }
    STILLHOUSE_RETURN_IF_ERROR(found.status());
    row = *std::move(found);
    session = SessionOf(row);
  }
  const UploadSpec& spec = row.spec;
  absl::MutexLock lock(&session->mu);
  if (session->closed) {
    absl::MutexLock store_lock(&mu_);
    return FindSealed(tenant, upload_id);
  }
  STILLHOUSE_RETURN_IF_ERROR(LoadSession(row, *session));
  if (session->received < spec.size) {
    return absl::FailedPreconditionError(
        StrCat("the upload has ", session->received, " of ", spec.size, " bytes: send the rest, then seal it"));
  }
  // What is on disk is what is checked, and what is synced.
  {
    STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> data, OpenOrCreate(env_, UploadData(row.file_id)));
    STILLHOUSE_RETURN_IF_ERROR(data->Truncate(spec.size));
    if (absl::Status synced = data->Sync(); !synced.ok()) {
      // After a failed sync the pages may be gone while they still read well, so the bytes must be sent again.
      RemoveUploadFiles(row.file_id);
      session->loaded = false;
      return synced;
    }
  }
  Sha256 hash;
  STILLHOUSE_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> data, env_->OpenForReading(UploadData(row.file_id)));
  STILLHOUSE_RETURN_IF_ERROR(ForEachPiece(*data, 0, spec.size, [&](std::string_view piece) {
    hash.Update(piece);
    return true;
  }));
  if (hash.FinishHex() != spec.sha256) {
    STILLHOUSE_RETURN_IF_ERROR(DiscardUpload(row, *session));
    return absl::InvalidArgumentError(
        "the uploaded bytes do not have the declared SHA-256; the upload was discarded: begin a new one");
  }

  absl::MutexLock store_lock(&mu_);
  absl::StatusOr<CorpusRow> taken = FindCorpus(tenant, spec.corpus_id);
  if (taken.ok()) {
    return absl::AlreadyExistsError(StrCat("there is a corpus '", spec.corpus_id,
                                           "' already, sealed while this upload ran: abort it, or delete that corpus"));
  }
  if (!absl::IsNotFound(taken.status())) return taken.status();
  absl::Status written = Write([&](FileChanges& files) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(AdoptBlob(UploadData(row.file_id), spec.sha256, spec.size, files));
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("INSERT INTO corpora VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)")
                                   .Bind(tenant, spec.corpus_id, spec.display_name, spec.media_type, spec.size,
                                         spec.sha256, upload_id, Fingerprint(spec), NowMicros(), RandomHex(8))
                                   .Run());
    return db_->Prepare("DELETE FROM uploads WHERE tenant = ?1 AND upload_id = ?2").Bind(tenant, upload_id).Run();
  });
  if (!written.ok()) {
    session->loaded = false;  // the file may have moved
    return written;
  }
  session->closed = true;
  sessions_.erase(row.file_id);
  RemoveUploadFiles(row.file_id);
  return FindCorpus(tenant, spec.corpus_id);
}

absl::Status EmbeddedStore::AbortUpload(std::string_view tenant, std::string_view upload_id) {
  UploadRow row;
  std::shared_ptr<UploadSession> session;
  {
    absl::MutexLock lock(&mu_);
    STILLHOUSE_ASSIGN_OR_RETURN(row, FindUpload(tenant, upload_id));
    session = SessionOf(row);
  }
  absl::MutexLock lock(&session->mu);
  if (session->closed) return absl::NotFoundError("the upload was sealed or aborted meanwhile");
  return DiscardUpload(row, *session);
}

absl::Status EmbeddedStore::DiscardUpload(const UploadRow& row, UploadSession& session) {
  absl::MutexLock lock(&mu_);
  STILLHOUSE_RETURN_IF_ERROR(WriteFreeing([&](FileChanges&) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    STILLHOUSE_RETURN_IF_ERROR(db_->Prepare("DELETE FROM requests WHERE tenant = ?1 AND request_id = ?2")
                                   .Bind(row.spec.tenant, row.spec.request_id)
                                   .Run());
    return db_->Prepare("DELETE FROM uploads WHERE file_id = ?1").Bind(row.file_id).Run();
  }));
  session.closed = true;
  sessions_.erase(row.file_id);
  RemoveUploadFiles(row.file_id);
  return absl::OkStatus();
}

void EmbeddedStore::RemoveUploadFiles(const std::string& file_id) {
  // What stays behind is garbage for the next collection.
  env_->Unlink(UploadData(file_id)).IgnoreError();
  env_->Unlink(UploadLog(file_id)).IgnoreError();
}

}  // namespace stillhouse
