#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "client/client.h"
#include "client/names.h"

// Uploads, imports and exports: streams of chunks.
namespace stillhouse::client {
namespace {

constexpr int64_t kMaxChunk = 1 << 20;

// A stream that died on the way (RST_STREAM shows as INTERNAL or CANCELLED) or a place that the server disagrees about.
bool CanResume(const absl::Status& status) {
  if (OriginOf(status) == Origin::kLocal) return false;
  if (IsTransient(status)) return true;
  if (Fact(status, "committed_bytes")) return true;
  return Reason(status).empty() &&
         (absl::IsInternal(status) || absl::IsCancelled(status) || absl::IsUnknown(status) || absl::IsAborted(status));
}

// Writes `message` with its header, then the source from `offset` on in chunks. Not OK if the source cannot be read:
// the call is cancelled then. What the stream itself says of an early end is in its Finish.
template <typename Request>
absl::Status SendChunks(grpc::ClientContext& context, grpc::ClientWriter<Request>& writer, Request message,
                        ByteSource& source, int64_t offset, int64_t chunk_bytes,
                        const std::function<void(int64_t, int64_t)>& progress) {
  bool open = writer.Write(message);
  while (open && offset < source.size()) {
    auto& chunk = *message.mutable_chunk();
    if (absl::Status read = source.Read(offset, chunk_bytes, *chunk.mutable_data()); !read.ok()) {
      context.TryCancel();
      return read;
    }
    chunk.set_offset(offset);
    offset += static_cast<int64_t>(chunk.data().size());
    open = writer.Write(message);
    if (open && progress) progress(offset, source.size());
  }
  if (open) writer.WritesDone();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::Corpus> Client::Upload(const UploadOptions& options, ByteSource& source,
                                          const std::function<void(int64_t, int64_t)>& progress) {
  if (auto status = CheckId("corpus id", options.corpus_id); !status.ok()) return status;
  if (source.size() == 0) return absl::InvalidArgumentError("The document is empty; there is nothing to upload.");
  if (options.chunk_bytes < 1 || options.chunk_bytes > kMaxChunk) {
    return absl::InvalidArgumentError("chunk_bytes must lie between 1 and 1048576.");
  }
  auto sha = Sha256Of(source);
  if (!sha.ok()) return sha.status();
  auto tenant = Tenant();
  if (!tenant.ok()) return tenant.status();
  // No request id: a later process must be able to send the same header and go on.
  v1::UploadHeader header;
  header.set_parent(*tenant);
  header.set_corpus_id(options.corpus_id);
  header.set_display_name(options.display_name);
  header.set_media_type(options.media_type);
  header.set_size_bytes(source.size());
  header.set_sha256(*sha);

  int failures = 0;
  int64_t best = 0;
  while (true) {
    // Where to go on.
    v1::GetUploadRequest where;
    *where.mutable_header() = header;
    auto upload = impl_->Unary<v1::Upload>(
        [&](auto* context, auto* response) { return impl_->corpora->GetUpload(context, where, response); });
    int64_t offset = 0;
    if (upload.ok()) {
      if (upload->has_corpus()) return upload->corpus();
      offset = std::clamp<int64_t>(upload->committed_bytes(), 0, source.size());
    } else if (!absl::IsNotFound(upload.status())) {
      return upload.status();
    }
    if (offset > best) {
      best = offset;
      failures = 0;
    }
    if (progress) progress(offset, source.size());

    grpc::ClientContext context;
    impl_->Prepare(context);
    v1::Corpus corpus;
    auto writer = impl_->corpora->UploadCorpus(&context, &corpus);
    v1::UploadCorpusRequest message;
    *message.mutable_header() = header;
    const absl::Status read =
        SendChunks(context, *writer, std::move(message), source, offset, options.chunk_bytes, progress);
    const absl::Status status = impl_->Translate(writer->Finish());
    if (!read.ok()) return read;
    if (status.ok()) return corpus;
    if (!CanResume(status) || ++failures >= options.attempts) return status;
    const absl::Duration pause = std::min(impl_->options.backoff * (1 << (failures - 1)), absl::Seconds(8));
    absl::SleepFor(std::max(pause, RetryDelay(status).value_or(absl::ZeroDuration())));
  }
}

absl::StatusOr<v1::FileHeader> Client::Export(const std::string& cache, const std::string& path,
                                              const std::function<void(int64_t, int64_t)>& progress) {
  std::unique_ptr<PartialFile> file;
  if (path != "-") {
    auto created = PartialFile::Create(path);
    if (!created.ok()) return created.status();
    file = *std::move(created);
  }
  v1::ExportCacheRequest request;
  request.set_name(cache);
  grpc::ClientContext context;
  impl_->Prepare(context);
  auto reader = impl_->caches->ExportCache(&context, request);
  v1::ExportCacheResponse message;
  v1::FileHeader header;
  absl::Status local;
  Sha256 sha;
  int64_t received = 0;
  bool headed = false;
  while (local.ok() && reader->Read(&message)) {
    if (message.has_header() && !headed) {
      header = message.header();
      headed = true;
    } else if (message.has_chunk() && headed && message.chunk().offset() == received) {
      const std::string& data = message.chunk().data();
      sha.Update(data);
      received += static_cast<int64_t>(data.size());
      if (file != nullptr) {
        local = file->Append(data);
      } else if (fwrite(data.data(), 1, data.size(), stdout) != data.size()) {
        local = absl::FailedPreconditionError("Standard output was closed.");
      }
      if (progress) progress(received, header.size_bytes());
    } else {
      local = absl::DataLossError("The file arrived out of order; export it again.");
    }
  }
  if (!local.ok()) context.TryCancel();
  const absl::Status status = impl_->Translate(reader->Finish());
  if (!local.ok()) return local;
  if (!status.ok()) return status;
  if (!headed || received != header.size_bytes() || sha.Hex() != header.sha256()) {
    return absl::DataLossError("The file that arrived is not the one that was announced; export it again.");
  }
  if (file != nullptr) {
    if (auto committed = file->Commit(); !committed.ok()) return committed;
  } else if (fflush(stdout) != 0) {
    return absl::FailedPreconditionError("Standard output was closed.");
  }
  return header;
}

absl::StatusOr<v1::Cache> Client::Import(const std::string& corpus, const std::string& cache_id,
                                         const std::string& display_name, ByteSource& source,
                                         const std::function<void(int64_t, int64_t)>& progress) {
  if (auto status = CheckId("cache id", cache_id); !status.ok()) return status;
  auto sha = Sha256Of(source);
  if (!sha.ok()) return sha.status();
  v1::ImportHeader header;
  header.set_parent(corpus);
  header.set_cache_id(cache_id);
  header.set_display_name(display_name);
  header.set_size_bytes(source.size());
  header.set_sha256(*sha);
  header.set_request_id(NewRequestId());
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    impl_->Prepare(context);
    v1::Cache cache;
    auto writer = impl_->caches->ImportCache(&context, &cache);
    v1::ImportCacheRequest message;
    *message.mutable_header() = header;
    const absl::Status read = SendChunks(context, *writer, std::move(message), source, 0, kMaxChunk, progress);
    const absl::Status status = impl_->Translate(writer->Finish());
    if (!read.ok()) return read;
    if (status.ok()) return cache;
    if (!impl_->Retry(status, attempt)) return status;
  }
}

}  // namespace stillhouse::client
