#include "server/service/corpora_service.h"

#include <cstdint>
#include <map>
#include <string>

#include "absl/synchronization/mutex.h"
#include "cache_store/store.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/corpus/build_queue.h"
#include "server/metrics/metrics.h"
#include "server/service/convert.h"
#include "server/service/read_call.h"
#include "server/service/validation.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"
#include "server/token/tokenizer.h"
#include "stillhouse/v1/corpora.grpc.pb.h"

namespace stillhouse {
namespace {

// Documents above this are not tokenised just to be counted, nor more than this in one call.
constexpr uint64_t kMaxCountedBytes = 4 << 20;
constexpr size_t kMaxRememberedCounts = 4096;

// Token counts by content, remembered. Thread-safe.
class TokenCounts {
 public:
  int64_t Count(const ServiceContext& service, const CorpusRow& row) {
    uint64_t bytes = kMaxCountedBytes;
    return Count(service, row, &bytes);
  }

  // Tokenises only what fits in `bytes`, which it lessens; 0 for a document that was never counted and does not.
  int64_t Count(const ServiceContext& service, const CorpusRow& row, uint64_t* bytes) {
    if (service.tokenizer == nullptr) return 0;
    {
      absl::MutexLock lock(&mutex_);
      const auto it = counts_.find(row.sha256);
      if (it != counts_.end()) return it->second;
    }
    if (row.size > *bytes) return 0;
    *bytes -= row.size;
    const absl::StatusOr<std::string> text = service.store->ReadCorpus(row.tenant, row.corpus_id);
    if (!text.ok()) return 0;
    const int64_t count = static_cast<int64_t>(service.tokenizer->Encode(*text).size());
    absl::MutexLock lock(&mutex_);
    if (counts_.size() >= kMaxRememberedCounts) counts_.clear();
    counts_[row.sha256] = count;
    return count;
  }

 private:
  absl::Mutex mutex_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mutex_);
};

// The upload that a header stands for: whoever sends an equal header continues it.
absl::StatusOr<UploadSpec> ParseHeader(const Caller& caller, const Quota& quota, const v1::UploadHeader& header) {
  UploadSpec spec;
  STILLHOUSE_ASSIGN_OR_RETURN(spec.tenant, ResolveParent(caller, header.parent()));
  STILLHOUSE_RETURN_IF_ERROR(CheckResourceId(header.corpus_id(), "corpus_id"));
  STILLHOUSE_RETURN_IF_ERROR(CheckTextField("display_name", header.display_name(), kMaxDisplayName));
  STILLHOUSE_RETURN_IF_ERROR(CheckTextField("media_type", header.media_type(), kMaxMediaType));
  STILLHOUSE_RETURN_IF_ERROR(CheckSha256Field("sha256", header.sha256()));
  STILLHOUSE_RETURN_IF_ERROR(CheckRequestId(header.request_id()));
  if (header.size_bytes() < 0) return BadField("size_bytes", "is negative");
  STILLHOUSE_RETURN_IF_ERROR(quota.AdmitCorpus(spec.tenant, static_cast<uint64_t>(header.size_bytes())));
  spec.corpus_id = header.corpus_id();
  spec.display_name = header.display_name();
  spec.media_type = header.media_type().empty() ? "text/plain" : header.media_type();
  spec.size = static_cast<uint64_t>(header.size_bytes());
  spec.sha256 = header.sha256();
  spec.request_id = header.request_id();
  spec.upload_id = Sha256Hex(
      StrCat(spec.corpus_id, "\n", spec.size, "\n", spec.sha256, "\n", spec.media_type, "\n", spec.display_name));
  return spec;
}

v1::Upload ToProto(const UploadSpec& spec, const UploadState& state) {
  v1::Upload out;
  out.set_name(CorpusName{spec.tenant, spec.corpus_id}.ToString());
  out.set_size_bytes(static_cast<int64_t>(spec.size));
  out.set_sha256(spec.sha256);
  out.set_committed_bytes(static_cast<int64_t>(state.received));
  if (state.corpus) *out.mutable_corpus() = ToProto(*state.corpus);
  return out;
}

class UploadCall final : public ReadCall<v1::UploadCorpusRequest> {
 public:
  UploadCall(ServiceContext* service, grpc::CallbackServerContext* context, TokenCounts* counts, v1::Corpus* response)
      : ReadCall(service, context, "UploadCorpus"), counts_(counts), response_(response) {}

 private:
  absl::Status OnMessage(const v1::UploadCorpusRequest& message, bool* done) override {
    if (message.has_header()) return OnHeader(message.header(), done);
    if (!message.has_chunk()) return BadField("part", "is empty; send a header or a chunk");
    if (spec_.upload_id.empty()) return BadField("header", "is missing: it must be the stream's first message");
    const v1::UploadChunk& chunk = message.chunk();
    if (chunk.offset() < 0) return BadField("chunk.offset", "is negative");
    if (chunk.data().empty()) return BadField("chunk.data", "is empty");
    if (chunk.data().size() > kMaxChunkBytes) {
      return BadField("chunk.data", StrCat("has ", chunk.data().size(), " bytes; at most ", kMaxChunkBytes));
    }
    const absl::StatusOr<uint64_t> received = service()->store->WriteChunk(
        spec_.tenant, spec_.upload_id, static_cast<uint64_t>(chunk.offset()), chunk.data());
    if (!received.ok()) return OffsetReason(received.status());
    service()->metrics->Increment(Metric::kUploadBytes, {}, static_cast<double>(chunk.data().size()));
    return absl::OkStatus();
  }

  absl::Status OnHeader(const v1::UploadHeader& header, bool* done) {
    if (!spec_.upload_id.empty()) return BadField("header", "was sent twice");
    STILLHOUSE_ASSIGN_OR_RETURN(spec_, ParseHeader(caller(), *service()->quota, header));
    STILLHOUSE_ASSIGN_OR_RETURN(const Quota::Lease bytes, AdmitBytes());  // until the store counts them
    STILLHOUSE_ASSIGN_OR_RETURN(const UploadState state, service()->store->BeginUpload(spec_));
    if (state.corpus) {
      *done = true;
      Respond(*state.corpus);
    }
    return absl::OkStatus();
  }

  // An upload that goes on takes no more room, nor does a corpus that is there: what becomes of it is the store's to
  // say.
  absl::StatusOr<Quota::Lease> AdmitBytes() {
    Store* const store = service()->store;
    if (!absl::IsNotFound(store->GetUpload(spec_.tenant, spec_.upload_id).status()) ||
        !absl::IsNotFound(store->GetCorpus(spec_.tenant, spec_.corpus_id).status())) {
      return Quota::Lease();
    }
    return service()->quota->AdmitBytes(store, spec_.tenant, Stored::kCorpora, spec_.size);
  }

  absl::Status OnEnd() override {
    if (spec_.upload_id.empty()) return BadField("header", "is missing: the stream was empty");
    absl::StatusOr<CorpusRow> row = service()->store->Seal(spec_.tenant, spec_.upload_id);
    if (!row.ok()) {
      if (absl::IsFailedPrecondition(row.status())) return OffsetReason(row.status());
      if (absl::IsInvalidArgument(row.status())) {
        service()->metrics->Increment(Metric::kChecksumFailures);
        return WithReason(row.status(), "CHECKSUM_MISMATCH");
      }
      return row.status();
    }
    Respond(*row);
    return absl::OkStatus();
  }

  // Tells the caller where to go on.
  absl::Status OffsetReason(const absl::Status& status) {
    if (!absl::IsOutOfRange(status) && !absl::IsFailedPrecondition(status)) return status;
    const absl::StatusOr<UploadState> state = service()->store->GetUpload(spec_.tenant, spec_.upload_id);
    if (!state.ok()) return status;
    return WithReason(status, absl::IsOutOfRange(status) ? "UPLOAD_OFFSET_MISMATCH" : "UPLOAD_INCOMPLETE",
                      {{"committed_bytes", StrCat(state->received)}});
  }

  void Respond(const CorpusRow& row) {
    *response_ = stillhouse::ToProto(row);
    response_->set_token_count(counts_->Count(*service(), row));
  }

  TokenCounts* counts_;
  v1::Corpus* response_;
  UploadSpec spec_;  // upload_id is empty before the header
};

class CorporaService final : public v1::Corpora::CallbackService {
 public:
  explicit CorporaService(ServiceContext* service) : service_(service) {}

  grpc::ServerReadReactor<v1::UploadCorpusRequest>* UploadCorpus(grpc::CallbackServerContext* context,
                                                                 v1::Corpus* response) override {
    return new UploadCall(service_, context, &counts_, response);
  }

  grpc::ServerUnaryReactor* GetUpload(grpc::CallbackServerContext* context, const v1::GetUploadRequest* request,
                                      v1::Upload* response) override {
    return RunTenantUnary(
        service_, context, "GetUpload", request, response,
        [service = service_, counts = &counts_](const Caller& caller, const auto& in, v1::Upload* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const UploadSpec spec, ParseHeader(caller, *service->quota, in.header()));
          const absl::StatusOr<UploadState> state = service->store->GetUpload(spec.tenant, spec.upload_id);
          if (absl::IsNotFound(state.status())) return NoUpload();
          STILLHOUSE_RETURN_IF_ERROR(state.status());
          *out = ToProto(spec, *state);
          if (state->corpus) out->mutable_corpus()->set_token_count(counts->Count(*service, *state->corpus));
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* AbortUpload(grpc::CallbackServerContext* context, const v1::AbortUploadRequest* request,
                                        v1::AbortUploadResponse* response) override {
    return RunTenantUnary(service_, context, "AbortUpload", request, response,
                          [service = service_](const Caller& caller, const auto& in, auto*) -> absl::Status {
                            STILLHOUSE_ASSIGN_OR_RETURN(const UploadSpec spec,
                                                        ParseHeader(caller, *service->quota, in.header()));
                            const absl::Status status = service->store->AbortUpload(spec.tenant, spec.upload_id);
                            return absl::IsNotFound(status) ? NoUpload() : status;
                          });
  }

  grpc::ServerUnaryReactor* GetCorpus(grpc::CallbackServerContext* context, const v1::GetCorpusRequest* request,
                                      v1::Corpus* response) override {
    return RunTenantUnary(
        service_, context, "GetCorpus", request, response,
        [service = service_, counts = &counts_](const Caller& caller, const auto& in, v1::Corpus* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const CorpusName name, ParseCorpusName(in.name()));
          STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, name.tenant, in.name()));
          const absl::StatusOr<CorpusRow> row = service->store->GetCorpus(name.tenant, name.corpus);
          if (absl::IsNotFound(row.status())) return NotFound(in.name());
          STILLHOUSE_RETURN_IF_ERROR(row.status());
          *out = ToProto(*row);
          out->set_token_count(counts->Count(*service, *row));
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ListCorpora(grpc::CallbackServerContext* context, const v1::ListCorporaRequest* request,
                                        v1::ListCorporaResponse* response) override {
    return RunTenantUnary(service_, context, "ListCorpora", request, response,
                          [service = service_, counts = &counts_](const Caller& caller, const auto& in,
                                                                  v1::ListCorporaResponse* out) -> absl::Status {
                            STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ResolveParent(caller, in.parent()));
                            STILLHOUSE_ASSIGN_OR_RETURN(const int page_size, CheckPageSize(in.page_size()));
                            STILLHOUSE_ASSIGN_OR_RETURN(
                                const Page<CorpusRow> page,
                                service->store->ListCorpora(tenant, {page_size, in.page_token()}));
                            uint64_t bytes = kMaxCountedBytes;
                            for (const CorpusRow& row : page.rows) {
                              v1::Corpus* corpus = out->add_corpora();
                              *corpus = ToProto(row);
                              corpus->set_token_count(counts->Count(*service, row, &bytes));
                            }
                            out->set_next_page_token(page.next_page_token);
                            return absl::OkStatus();
                          });
  }

  grpc::ServerUnaryReactor* DeleteCorpus(grpc::CallbackServerContext* context, const v1::DeleteCorpusRequest* request,
                                         v1::DeleteCorpusResponse* response) override {
    return RunTenantUnary(service_, context, "DeleteCorpus", request, response,
                          [service = service_](const Caller& caller, const auto& in, auto*) -> absl::Status {
                            STILLHOUSE_ASSIGN_OR_RETURN(const CorpusName name, ParseCorpusName(in.name()));
                            STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, name.tenant, in.name()));
                            return Delete(service, name, in.name(), in.force(), in.etag());
                          });
  }

 private:
  static absl::Status NoUpload() {
    return WithReason(absl::NotFoundError("there is no unfinished upload with this header; start it with UploadCorpus"),
                      "NOT_FOUND");
  }

  static absl::Status Delete(ServiceContext* service, const CorpusName& name, const std::string& as_written, bool force,
                             const std::string& etag) {
    // Existence first: what is missing must look missing, whatever else is true.
    const absl::Status exists = service->store->GetCorpus(name.tenant, name.corpus).status();
    if (absl::IsNotFound(exists)) return NotFound(as_written);
    STILLHOUSE_RETURN_IF_ERROR(exists);
    STILLHOUSE_RETURN_IF_ERROR(EndBuilds(service, name, force));
    const absl::Status status = service->store->DeleteCorpus(name.tenant, name.corpus, force, etag);
    if (absl::IsNotFound(status)) return NotFound(as_written);
    if (absl::IsFailedPrecondition(status)) {
      return WithReason(
          absl::FailedPreconditionError(StrCat(as_written, " has caches; delete them first, or set force")),
          "CORPUS_IN_USE");
    }
    STILLHOUSE_RETURN_IF_ERROR(status);
    service->directory->Forget(name.tenant, name.corpus, "");
    return absl::OkStatus();
  }

  // Cancels the corpus' unfinished builds; without `force`, refuses while there are any.
  static absl::Status EndBuilds(ServiceContext* service, const CorpusName& name, bool force) {
    const std::string prefix = StrCat("corpora/", name.corpus, "/");
    OperationFilter filter;
    filter.done = false;
    PageRequest page{1000, ""};
    do {
      STILLHOUSE_ASSIGN_OR_RETURN(const Page<BuildInfo> found, service->builds->List(name.tenant, filter, page));
      for (const BuildInfo& info : found.rows) {
        if (info.row.target.compare(0, prefix.size(), prefix) != 0) continue;
        if (!force) {
          return WithReason(absl::FailedPreconditionError(
                                StrCat(name.ToString(), " is being built into ", info.row.target, "; cancel ",
                                       OperationName(info.row.operation_id), " first, or set force")),
                            "CORPUS_IN_USE");
        }
        const absl::Status cancelled = service->builds->Cancel(name.tenant, info.row.operation_id).status();
        if (!cancelled.ok() && !absl::IsNotFound(cancelled)) return cancelled;
      }
      page.page_token = found.next_page_token;
    } while (!page.page_token.empty());
    return absl::OkStatus();
  }

  ServiceContext* service_;
  TokenCounts counts_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeCorporaService(ServiceContext* service) {
  return std::make_unique<CorporaService>(service);
}

}  // namespace stillhouse
