#include "server/service/convert.h"

#include <algorithm>

#include "absl/status/status.h"
#include "kernels/base/strings.h"
#include "server/service/artifact_summary.h"
#include "server/service/status_map.h"
#include "server/tenancy/resource_name.h"

namespace stillhouse {
namespace {

v1::OperationMetadata::Stage ToProto(BuildStage stage) {
  switch (stage) {
    case BuildStage::kQueued:
      return v1::OperationMetadata::QUEUED;
    case BuildStage::kTokenising:
      return v1::OperationMetadata::TOKENISING;
    case BuildStage::kSelfStudy:
      return v1::OperationMetadata::SELF_STUDY;
    case BuildStage::kCompacting:
      return v1::OperationMetadata::COMPACTING;
    case BuildStage::kTraining:
      return v1::OperationMetadata::TRAINING;
    case BuildStage::kEvaluating:
      return v1::OperationMetadata::EVALUATING;
    case BuildStage::kStoring:
      return v1::OperationMetadata::STORING;
    case BuildStage::kDone:
      return v1::OperationMetadata::DONE;
  }
  return v1::OperationMetadata::STAGE_UNSPECIFIED;
}

void FillError(const OperationRow& row, v1::OperationError* error) {
  const bool cancelled = row.state == OperationState::kCancelled;
  const absl::StatusCode code = row.error_code != 0 ? static_cast<absl::StatusCode>(row.error_code)
                                : cancelled         ? absl::StatusCode::kCancelled
                                                    : absl::StatusCode::kUnknown;
  error->set_code(static_cast<int>(code));
  error->set_message(!row.error_message.empty() ? PublicMessage(code, row.error_message)
                     : cancelled                ? "the build was cancelled"
                                                : "the build failed");
  error->set_reason(absl::StatusCodeToString(code));
}

}  // namespace

google::protobuf::Timestamp ToTimestamp(absl::Time time) {
  google::protobuf::Timestamp out;
  const int64_t seconds = absl::ToUnixSeconds(time);
  out.set_seconds(seconds);
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
  return out;
}

v1::Method MethodFromName(std::string_view name) {
  v1::Method method = v1::METHOD_UNSPECIFIED;
  return v1::Method_Parse(std::string(name), &method) ? method : v1::METHOD_UNSPECIFIED;
}

v1::Corpus ToProto(const CorpusRow& row) {
  v1::Corpus out;
  out.set_name(CorpusName{row.tenant, row.corpus_id}.ToString());
  out.set_display_name(row.display_name);
  out.set_media_type(row.media_type);
  out.set_size_bytes(static_cast<int64_t>(row.size));
  out.set_sha256(row.sha256);
  *out.mutable_create_time() = ToTimestamp(row.create_time);
  out.set_etag(row.etag);
  return out;
}

v1::Cache ToProto(const ArtifactRow& row, bool resident) {
  v1::Cache out;
  out.set_name(CacheName{row.tenant, row.corpus_id, row.cache_id}.ToString());
  out.set_method(MethodFromName(row.method));
  out.set_state(row.quarantined ? v1::Cache::QUARANTINED : resident ? v1::Cache::RESIDENT : v1::Cache::COLD);
  out.set_artifact_bytes(static_cast<int64_t>(row.size));
  out.set_sha256(row.sha256);
  *out.mutable_create_time() = ToTimestamp(row.create_time);
  out.set_etag(row.etag);
  FillFromSummary(row.summary_json, &out);
  return out;
}

v1::Operation ToProto(const BuildInfo& info) {
  const OperationRow& row = info.row;
  v1::Operation out;
  out.set_name(OperationName(row.operation_id));
  v1::OperationMetadata* metadata = out.mutable_metadata();
  const bool done = IsDone(row.state);
  metadata->set_stage(done ? v1::OperationMetadata::DONE : ToProto(info.progress.stage));
  metadata->set_fraction(row.state == OperationState::kSucceeded ? 1.0 : std::clamp(info.progress.fraction, 0.0, 1.0));
  if (!done && info.progress.eta_seconds >= 0) metadata->set_eta_seconds(info.progress.eta_seconds);
  const absl::StatusOr<BuildSpec> spec = BuildSpecFromJson(row.request_json);
  if (spec.ok()) metadata->set_method(MethodFromName(BuildMethodName(spec->method)));
  const std::string target = StrCat(TenantName(row.tenant), "/", row.target);
  metadata->set_target(target);
  *metadata->mutable_create_time() = ToTimestamp(row.create_time);
  if (info.progress.start_time != absl::InfinitePast()) {
    *metadata->mutable_start_time() = ToTimestamp(info.progress.start_time);
  }
  metadata->set_detail(info.progress.detail);
  metadata->set_queue_position(static_cast<int32_t>(info.queue_position));
  out.set_done(done);
  if (done) {
    if (row.end_time != absl::InfiniteFuture()) *metadata->mutable_end_time() = ToTimestamp(row.end_time);
    if (row.state == OperationState::kSucceeded) {
      out.set_cache(target);
    } else {
      FillError(row, out.mutable_error());
    }
  }
  return out;
}

v1::Tenant ToProto(const TenantRow& row) {
  v1::Tenant out;
  out.set_name(TenantName(row.tenant));
  out.set_display_name(row.display_name);
  *out.mutable_create_time() = ToTimestamp(row.create_time);
  out.set_etag(row.etag);
  return out;
}

v1::Key ToProto(const ApiKeyRow& row) {
  v1::Key out;
  out.set_name(KeyName{row.tenant, row.key_id}.ToString());
  out.set_display_name(row.label);
  *out.mutable_create_time() = ToTimestamp(row.create_time);
  if (row.revoke_time != absl::InfiniteFuture()) *out.mutable_revoke_time() = ToTimestamp(row.revoke_time);
  return out;
}

}  // namespace stillhouse
