#include "server/service/caches_service.h"

#include <algorithm>
#include <memory>
#include <string>

#include "cache_store/artifact.h"
#include "cache_store/store.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/corpus/build_queue.h"
#include "server/corpus/build_record.h"
#include "server/metrics/metrics.h"
#include "server/service/build_request.h"
#include "server/service/convert.h"
#include "server/service/read_call.h"
#include "server/service/validation.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"
#include "stillhouse/v1/caches.grpc.pb.h"

namespace stillhouse {
namespace {

constexpr size_t kExportChunk = 512 << 10;
// Of an imported file: the catalog keeps it, and a page of a list has a thousand. A build's has a few KiB.
constexpr size_t kMaxSummary = 32 << 10;

v1::Cache ToProto(const ServiceContext& service, const ArtifactRow& row) {
  return stillhouse::ToProto(row, service.directory->IsResident(row.tenant, row.corpus_id, row.cache_id));
}

absl::StatusOr<CacheName> OwnCache(const Caller& caller, const std::string& name) {
  STILLHOUSE_ASSIGN_OR_RETURN(CacheName parsed, ParseCacheName(name));
  STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, parsed.tenant, name));
  return parsed;
}

absl::StatusOr<CorpusName> OwnCorpus(const Caller& caller, const std::string& name) {
  STILLHOUSE_ASSIGN_OR_RETURN(CorpusName parsed, ParseCorpusName(name));
  STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, parsed.tenant, name));
  return parsed;
}

absl::Status Hidden(const absl::Status& status, const std::string& name) {
  return absl::IsNotFound(status) ? NotFound(name) : status;
}

// Sends a cache's file: header, then pieces read on the work pool as the caller takes them. Verifies the hash as it
// goes: a damaged file ends with DATA_LOSS and goes to quarantine.
class ExportCall final : public grpc::ServerWriteReactor<v1::ExportCacheResponse> {
 public:
  ExportCall(ServiceContext* service, grpc::CallbackServerContext* context, const v1::ExportCacheRequest* request)
      : service_(service), context_(context), request_(request), counter_(service, "ExportCache") {
    service_->work.Post([this] {
      const absl::Status status = Begin();
      if (!status.ok()) return End(status);
      StartWrite(&message_);
    });
  }

 private:
  void OnCancel() override {}  // the write in flight fails
  void OnDone() override { delete this; }
  void OnWriteDone(bool ok) override {
    service_->work.Post([this, ok] {
      if (!ok || context_->IsCancelled()) return End(CancelledStatus(*context_));
      if (offset_ == stored_.file->size()) return End(Verify());
      const absl::Status status = ReadNext();
      if (!status.ok()) return End(status);
      StartWrite(&message_);
    });
  }

  void End(const absl::Status& status) {
    lease_ = Quota::Lease();
    Finish(counter_.Finish(status));
  }

  absl::Status Begin() {
    STILLHOUSE_ASSIGN_OR_RETURN(const Caller caller, Authenticate(*service_, *context_));
    STILLHOUSE_RETURN_IF_ERROR(CheckTenantKey(caller));
    STILLHOUSE_ASSIGN_OR_RETURN(name_, OwnCache(caller, request_->name()));
    STILLHOUSE_ASSIGN_OR_RETURN(lease_, service_->quota->AdmitStream(caller.tenant));
    absl::StatusOr<StoredArtifact> stored = service_->store->OpenArtifactFile(name_.tenant, name_.corpus, name_.cache);
    if (!stored.ok()) return Hidden(stored.status(), request_->name());
    stored_ = *std::move(stored);
    v1::FileHeader* header = message_.mutable_header();
    header->set_size_bytes(static_cast<int64_t>(stored_.file->size()));
    header->set_sha256(stored_.row.sha256);
    header->set_suggested_file_name(StrCat(name_.corpus, "-", name_.cache, ".safetensors"));
    return absl::OkStatus();
  }

  absl::Status ReadNext() {
    const size_t size = static_cast<size_t>(std::min<uint64_t>(kExportChunk, stored_.file->size() - offset_));
    v1::FileChunk* chunk = message_.mutable_chunk();
    chunk->set_offset(static_cast<int64_t>(offset_));
    std::string* data = chunk->mutable_data();
    data->resize(size);
    STILLHOUSE_RETURN_IF_ERROR(stored_.file->Read(offset_, size, data->data()));
    hash_.Update(*data);
    offset_ += size;
    return absl::OkStatus();
  }

  absl::Status Verify() {
    if (hash_.FinishHex() == stored_.row.sha256) return absl::OkStatus();
    service_->metrics->Increment(Metric::kChecksumFailures);
    const absl::Status quarantined = service_->store->QuarantineArtifact(
        name_.tenant, name_.corpus, name_.cache, "the file's bytes changed on disk", stored_.row.sha256);
    if (!quarantined.ok()) STILLHOUSE_LOG(ERROR) << "could not quarantine a damaged cache: " << quarantined;
    return WithReason(absl::DataLossError(StrCat(request_->name(),
                                                 " is damaged on disk: discard what was received, and build it again")),
                      "CHECKSUM_MISMATCH");
  }

  ServiceContext* service_;
  grpc::CallbackServerContext* context_;
  const v1::ExportCacheRequest* request_;
  CallCounter counter_;
  CacheName name_;
  Quota::Lease lease_;
  StoredArtifact stored_;
  uint64_t offset_ = 0;
  Sha256 hash_;
  v1::ExportCacheResponse message_;
};

// Receives a file beside the store, verifies all of it, then makes it the cache.
class ImportCall final : public ReadCall<v1::ImportCacheRequest> {
 public:
  ImportCall(ServiceContext* service, grpc::CallbackServerContext* context, v1::Cache* response)
      : ReadCall(service, context, "ImportCache"), response_(response) {}

 private:
  absl::Status OnMessage(const v1::ImportCacheRequest& message, bool* done) override {
    if (message.has_header()) return OnHeader(message.header());
    if (!message.has_chunk()) return BadField("part", "is empty; send a header or a chunk");
    if (blob_ == nullptr) return BadField("header", "is missing: it must be the stream's first message");
    const v1::FileChunk& chunk = message.chunk();
    if (chunk.data().empty()) return BadField("chunk.data", "is empty");
    if (chunk.data().size() > kMaxChunkBytes) {
      return BadField("chunk.data", StrCat("has ", chunk.data().size(), " bytes; at most ", kMaxChunkBytes));
    }
    if (chunk.offset() != static_cast<int64_t>(blob_->size())) {
      return WithReason(absl::OutOfRangeError(StrCat("the chunk's offset is ", chunk.offset(), " and ", blob_->size(),
                                                     " was expected; send the file in order, from its beginning")),
                        "UPLOAD_OFFSET_MISMATCH", {{"committed_bytes", StrCat(blob_->size())}});
    }
    if (chunk.data().size() > static_cast<uint64_t>(header_.size_bytes()) - blob_->size()) {
      return BadField("chunk.data", StrCat("goes beyond the declared ", header_.size_bytes(), " bytes"));
    }
    hash_.Update(chunk.data());
    return blob_->Append(chunk.data());
  }

  absl::Status OnHeader(const v1::ImportHeader& header) {
    if (blob_ != nullptr) return BadField("header", "was sent twice");
    STILLHOUSE_ASSIGN_OR_RETURN(corpus_, OwnCorpus(caller(), header.parent()));
    STILLHOUSE_RETURN_IF_ERROR(CheckResourceId(header.cache_id(), "cache_id"));
    STILLHOUSE_RETURN_IF_ERROR(CheckTextField("display_name", header.display_name(), kMaxDisplayName));
    STILLHOUSE_RETURN_IF_ERROR(CheckSha256Field("sha256", header.sha256()));
    STILLHOUSE_RETURN_IF_ERROR(CheckRequestId(header.request_id()));
    if (header.size_bytes() < 0) return BadField("size_bytes", "is negative");
    STILLHOUSE_RETURN_IF_ERROR(
        service()->quota->AdmitArtifact(corpus_.tenant, static_cast<uint64_t>(header.size_bytes())));
    const absl::Status exists = service()->store->GetCorpus(corpus_.tenant, corpus_.corpus).status();
    if (!exists.ok()) return Hidden(exists, header.parent());
    // A cache that is there takes no more room: whether this is the same, the store says.
    if (absl::IsNotFound(service()->store->GetArtifact(corpus_.tenant, corpus_.corpus, header.cache_id()).status())) {
      STILLHOUSE_ASSIGN_OR_RETURN(Quota::Lease bytes,
                                  service()->quota->AdmitBytes(service()->store, corpus_.tenant, Stored::kCaches,
                                                               static_cast<uint64_t>(header.size_bytes())));
      Hold(std::move(bytes));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(blob_, service()->store->NewBlob());
    header_ = header;
    return absl::OkStatus();
  }

  absl::Status OnEnd() override {
    if (blob_ == nullptr) return BadField("header", "is missing: the stream was empty");
    if (blob_->size() != static_cast<uint64_t>(header_.size_bytes())) {
      return WithReason(absl::InvalidArgumentError(StrCat("the file ended after ", blob_->size(), " of ",
                                                          header_.size_bytes(), " bytes; send it again")),
                        "UPLOAD_INCOMPLETE");
    }
    if (hash_.FinishHex() != header_.sha256()) {
      service()->metrics->Increment(Metric::kChecksumFailures);
      return WithReason(
          absl::InvalidArgumentError(
              "the bytes received do not have the declared sha256; nothing was kept, send the file again"),
          "CHECKSUM_MISMATCH");
    }
    STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactHeader header, CheckFile());
    ArtifactSpec spec;
    spec.tenant = corpus_.tenant;
    spec.corpus_id = corpus_.corpus;
    spec.cache_id = header_.cache_id();
    spec.method = header.method;
    spec.summary_json = SummaryJson(header, header_.display_name());
    if (spec.summary_json.size() > kMaxSummary) {
      return WithReason(
          absl::InvalidArgumentError(StrCat("the file's recipe and quality report have ", spec.summary_json.size(),
                                            " bytes as JSON; at most ", kMaxSummary)),
          "INVALID_ARTIFACT");
    }
    spec.request_id = header_.request_id();
    const absl::StatusOr<ArtifactRow> row = service()->store->PutArtifact(spec, blob_.get());
    if (!row.ok()) return Hidden(row.status(), header_.parent());
    *response_ = ToProto(*service(), *row);
    return absl::OkStatus();
  }

  // Whole, undamaged, of this server's model and of this corpus.
  absl::StatusOr<ArtifactHeader> CheckFile() {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<ReadableFile> file, blob_->OpenForReading());
    const absl::StatusOr<Artifact> artifact = OpenArtifact(file);
    if (!artifact.ok()) {
      if (absl::IsDataLoss(artifact.status())) service()->metrics->Increment(Metric::kChecksumFailures);
      return WithReason(artifact.status(), "INVALID_ARTIFACT");
    }
    const ArtifactHeader& header = artifact->header();
    const absl::Status same = CheckFingerprints(header.fingerprints, service()->directory->fingerprints());
    if (!same.ok()) return WithReason(same, "FOREIGN_ARTIFACT");
    const ModelConfig& model = service()->facts.model;
    if (header.layers != model.layers || header.kv_heads != model.kv_heads || header.head_dim != model.head_dim) {
      return WithReason(
          absl::FailedPreconditionError("the file's layers or heads are not those of this server's model"),
          "FOREIGN_ARTIFACT");
    }
    // The id may have become another document's while the file came.
    const absl::StatusOr<CorpusRow> corpus = service()->store->GetCorpus(corpus_.tenant, corpus_.corpus);
    if (!corpus.ok()) return Hidden(corpus.status(), header_.parent());
    if (header.corpus_sha256 != corpus->sha256) {
      return WithReason(
          absl::FailedPreconditionError(StrCat("the file is a cache of another document than ", corpus_.ToString(),
                                               "; import it under the one whose SHA-256 is ", header.corpus_sha256)),
          "FOREIGN_DOCUMENT", {{"corpus_sha256", header.corpus_sha256}});
    }
    // A query needs a position behind it.
    if (header.logical_length >= static_cast<uint64_t>(model.context_length)) {
      return WithReason(absl::FailedPreconditionError(StrCat("the file ends at position ", header.logical_length,
                                                             " and the model's context has ", model.context_length)),
                        "FOREIGN_ARTIFACT");
    }
    return header;
  }

  v1::Cache* response_;
  v1::ImportHeader header_;
  CorpusName corpus_;
  Sha256 hash_;
  std::unique_ptr<BlobWriter> blob_;
};

class CachesService final : public v1::Caches::CallbackService {
 public:
  explicit CachesService(ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* BuildCache(grpc::CallbackServerContext* context, const v1::BuildCacheRequest* request,
                                       v1::Operation* response) override {
    return RunTenantUnary(service_, context, "BuildCache", request, response,
                          [service = service_](const Caller& caller, const auto& in, v1::Operation* out) {
                            return Build(service, caller, in, out);
                          });
  }

  grpc::ServerUnaryReactor* GetCache(grpc::CallbackServerContext* context, const v1::GetCacheRequest* request,
                                     v1::Cache* response) override {
    return RunTenantUnary(service_, context, "GetCache", request, response,
                          [service = service_](const Caller& caller, const auto& in, v1::Cache* out) -> absl::Status {
                            STILLHOUSE_ASSIGN_OR_RETURN(const CacheName name, OwnCache(caller, in.name()));
                            const absl::StatusOr<ArtifactRow> row =
                                service->store->GetArtifact(name.tenant, name.corpus, name.cache);
                            if (!row.ok()) return Hidden(row.status(), in.name());
                            *out = ToProto(*service, *row);
                            return absl::OkStatus();
                          });
  }

  grpc::ServerUnaryReactor* ListCaches(grpc::CallbackServerContext* context, const v1::ListCachesRequest* request,
                                       v1::ListCachesResponse* response) override {
    return RunTenantUnary(
        service_, context, "ListCaches", request, response,
        [service = service_](const Caller& caller, const auto& in, v1::ListCachesResponse* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const CorpusName parent, ParseCorpusNameOrAll(in.parent()));
          STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, parent.tenant, in.parent()));
          STILLHOUSE_ASSIGN_OR_RETURN(const int page_size, CheckPageSize(in.page_size()));
          if (!parent.corpus.empty()) {
            const absl::Status exists = service->store->GetCorpus(parent.tenant, parent.corpus).status();
            if (!exists.ok()) return Hidden(exists, in.parent());
          }
          STILLHOUSE_ASSIGN_OR_RETURN(
              const Page<ArtifactRow> page,
              service->store->ListArtifacts(parent.tenant, parent.corpus, {page_size, in.page_token()}));
          for (const ArtifactRow& row : page.rows) *out->add_caches() = ToProto(*service, row);
          out->set_next_page_token(page.next_page_token);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* DeleteCache(grpc::CallbackServerContext* context, const v1::DeleteCacheRequest* request,
                                        v1::DeleteCacheResponse* response) override {
    return RunTenantUnary(service_, context, "DeleteCache", request, response,
                          [service = service_](const Caller& caller, const auto& in, auto*) -> absl::Status {
                            STILLHOUSE_ASSIGN_OR_RETURN(const CacheName name, OwnCache(caller, in.name()));
                            const absl::Status status =
                                service->store->DeleteArtifact(name.tenant, name.corpus, name.cache, in.etag());
                            if (!status.ok()) return Hidden(status, in.name());
                            service->directory->Forget(name.tenant, name.corpus, name.cache);
                            return absl::OkStatus();
                          });
  }

  grpc::ServerWriteReactor<v1::ExportCacheResponse>* ExportCache(grpc::CallbackServerContext* context,
                                                                 const v1::ExportCacheRequest* request) override {
    return new ExportCall(service_, context, request);
  }

  grpc::ServerReadReactor<v1::ImportCacheRequest>* ImportCache(grpc::CallbackServerContext* context,
                                                               v1::Cache* response) override {
    return new ImportCall(service_, context, response);
  }

 private:
  static absl::Status Build(ServiceContext* service, const Caller& caller, const v1::BuildCacheRequest& in,
                            v1::Operation* out) {
    STILLHOUSE_ASSIGN_OR_RETURN(const CorpusName corpus, OwnCorpus(caller, in.parent()));
    STILLHOUSE_RETURN_IF_ERROR(CheckRequestId(in.request_id()));
    STILLHOUSE_RETURN_IF_ERROR(service->quota->AdmitEvaluation(
        corpus.tenant, static_cast<uint64_t>(in.evaluation().ByteSizeLong() + in.self_study().ByteSizeLong())));
    std::string cache_id = in.cache_id();
    if (cache_id.empty()) {
      cache_id = StrCat("cache-", DerivedSuffix(in.request_id()));
    } else {
      STILLHOUSE_RETURN_IF_ERROR(CheckResourceId(cache_id, "cache_id"));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(const BuildSpec spec, ParseBuildRequest(in, corpus.tenant, corpus.corpus, cache_id));
    const absl::StatusOr<BuildInfo> info = service->builds->Enqueue(spec, in.request_id());
    if (!info.ok()) return Hidden(info.status(), in.parent());
    *out = stillhouse::ToProto(*info);
    return absl::OkStatus();
  }

  // A repeated request must make the same id again, or it would not be the same request.
  static std::string DerivedSuffix(const std::string& request_id) {
    return request_id.empty() ? RandomSuffix(8) : Sha256Hex(request_id).substr(0, 8);
  }

  ServiceContext* service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCachesService(ServiceContext* service) {
  return std::make_unique<CachesService>(service);
}

}  // namespace stillhouse
