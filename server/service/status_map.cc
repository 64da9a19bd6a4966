#include "server/service/status_map.h"

#include <grpcpp/support/status.h>

#include "kernels/base/logging.h"
#include "kernels/base/strings.h"
#include "server/tenancy/reason.h"
#include "server/token/utf8.h"
#include "stillhouse/v1/errors.pb.h"

namespace stillhouse {
namespace {

// Metadata is bounded by the peer (8 KiB by default for all of it): the message travels there twice.
constexpr size_t kMaxMessage = 1024;

bool IsPathCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
         c == '-' || c == '+' || c == '/';
}

std::string Bounded(std::string text) {
  if (text.size() <= kMaxMessage) return text;
  size_t end = kMaxMessage;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // not within a code point
  text.resize(end);
  return text + "…";
}

}  // namespace

std::string WithoutPaths(std::string_view message) {
  std::string out;
  for (size_t i = 0; i < message.size();) {
    const bool starts_word = i == 0 || !IsPathCharacter(message[i - 1]);
    if (message[i] != '/' || !starts_word) {
      out += message[i++];
      continue;
    }
    size_t end = i;
    while (end < message.size() && IsPathCharacter(message[end])) ++end;
    std::string_view path = message.substr(i, end - i);
    const size_t slash = path.find_last_of('/', path.size() > 1 ? path.size() - 2 : 0);
    // "/" alone, or a single "/word", gives nothing away.
    out += slash == 0 ? path : path.substr(slash + 1);
    i = end;
  }
  return out;
}

std::string PublicMessage(absl::StatusCode code, std::string_view message) {
  if (code == absl::StatusCode::kInternal || code == absl::StatusCode::kUnknown) {
    return "the server failed to do this; its log says why";
  }
  return ToValidUtf8(WithoutPaths(message));
}

const char* CodeName(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return "OK";
    case absl::StatusCode::kCancelled:
      return "Canceled";
    case absl::StatusCode::kInvalidArgument:
      return "InvalidArgument";
    case absl::StatusCode::kDeadlineExceeded:
      return "DeadlineExceeded";
    case absl::StatusCode::kNotFound:
      return "NotFound";
    case absl::StatusCode::kAlreadyExists:
      return "AlreadyExists";
    case absl::StatusCode::kPermissionDenied:
      return "PermissionDenied";
    case absl::StatusCode::kResourceExhausted:
      return "ResourceExhausted";
    case absl::StatusCode::kFailedPrecondition:
      return "FailedPrecondition";
    case absl::StatusCode::kAborted:
      return "Aborted";
    case absl::StatusCode::kOutOfRange:
      return "OutOfRange";
    case absl::StatusCode::kUnimplemented:
      return "Unimplemented";
    case absl::StatusCode::kInternal:
      return "Internal";
    case absl::StatusCode::kUnavailable:
      return "Unavailable";
    case absl::StatusCode::kDataLoss:
      return "DataLoss";
    case absl::StatusCode::kUnauthenticated:
      return "Unauthenticated";
    default:
      return "Unknown";
  }
}

std::string ReasonOf(const absl::Status& status) {
  std::string reason = GetReason(status).reason;
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status();
  if (status.code() == absl::StatusCode::kInternal || status.code() == absl::StatusCode::kUnknown) {
    STILLHOUSE_LOG(ERROR) << "a call failed: " << status;
  }
  const std::string message = Bounded(PublicMessage(status.code(), ToStd(status.message())));
  const Reason reason = GetReason(status);
  v1::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(message);
  v1::ErrorInfo info;
  info.set_reason(ReasonOf(status));
  info.set_domain("stillhouse");
  for (const auto& [key, value] : reason.facts) (*info.mutable_metadata())[key] = value;
  details.add_details()->PackFrom(info);
  if (reason.retry_after) {
    v1::RetryInfo retry;
    const int64_t nanos = absl::ToInt64Nanoseconds(*reason.retry_after);
    retry.mutable_retry_delay()->set_seconds(nanos / 1'000'000'000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
    details.add_details()->PackFrom(retry);
  }
  // The numbers of absl::StatusCode are gRPC's.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString());
}

}  // namespace stillhouse
