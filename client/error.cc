#include "client/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "stillhouse/v1/errors.pb.h"

namespace stillhouse::client {
namespace {

constexpr char kOriginUrl[] = "stillhouse.client/origin";
constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";

std::optional<v1::ErrorInfo> InfoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorInfoUrl);
  v1::ErrorInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return info;
}

}  // namespace

Origin OriginOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kOriginUrl);
  if (!payload) return Origin::kLocal;
  return *payload == "server" ? Origin::kServer : Origin::kTransport;
}

std::string Reason(const absl::Status& status) {
  const auto info = InfoOf(status);
  return info ? info->reason() : std::string();
}

std::optional<std::string> Fact(const absl::Status& status, absl::string_view key) {
  const auto info = InfoOf(status);
  if (!info) return std::nullopt;
  const auto it = info->metadata().find(std::string(key));
  if (it == info->metadata().end()) return std::nullopt;
  return it->second;
}

std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfoUrl);
  v1::RetryInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload)) || !info.has_retry_delay()) return std::nullopt;
  const absl::Duration delay =
      absl::Seconds(info.retry_delay().seconds()) + absl::Nanoseconds(info.retry_delay().nanos());
  return delay < absl::ZeroDuration() ? absl::ZeroDuration() : delay;
}

bool IsTransient(const absl::Status& status) {
  if (OriginOf(status) == Origin::kLocal) return false;
  if (RetryDelay(status)) return absl::IsUnavailable(status) || absl::IsResourceExhausted(status);
  return absl::IsUnavailable(status);
}

absl::Status FromRpc(int code, absl::string_view message, absl::string_view details, bool connected) {
  if (code == 0) return absl::OkStatus();
  v1::Status rich;
  std::optional<v1::ErrorInfo> info;
  std::optional<v1::RetryInfo> retry;
  if (!details.empty() && rich.ParseFromArray(details.data(), static_cast<int>(details.size()))) {
    for (const auto& any : rich.details()) {
      if (absl::EndsWith(any.type_url(), ".ErrorInfo")) {
        v1::ErrorInfo parsed;
        if (parsed.ParseFromString(any.value())) info = std::move(parsed);
      } else if (absl::EndsWith(any.type_url(), ".RetryInfo")) {
        v1::RetryInfo parsed;
        if (parsed.ParseFromString(any.value())) retry = std::move(parsed);
      }
    }
  }
  const bool known = code > 0 && code <= 16;
  absl::Status status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      message.empty() ? absl::StrCat("the call ended with ", CodeName(code)) : std::string(message));
  // gRPC itself reports a lost or refused connection as UNAVAILABLE, without details.
  const bool transport = !info && (status.code() == absl::StatusCode::kUnavailable ||
                                   (!connected && (status.code() == absl::StatusCode::kDeadlineExceeded ||
                                                   status.code() == absl::StatusCode::kUnknown)));
  status.SetPayload(kOriginUrl, absl::Cord(transport ? "transport" : "server"));
  if (info) status.SetPayload(kErrorInfoUrl, absl::Cord(info->SerializeAsString()));
  if (retry) status.SetPayload(kRetryInfoUrl, absl::Cord(retry->SerializeAsString()));
  return status;
}

absl::Status FromOperation(int code, absl::string_view message, absl::string_view reason) {
  if (code == 0) return absl::OkStatus();
  const bool known = code > 0 && code <= 16;
  absl::Status status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      message.empty() ? absl::StrCat("the operation ended with ", CodeName(code)) : std::string(message));
  status.SetPayload(kOriginUrl, absl::Cord("server"));
  if (!reason.empty()) {
    v1::ErrorInfo info;
    info.set_reason(std::string(reason));
    info.set_domain("stillhouse");
    status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  }
  return status;
}

std::string CodeName(int code) {
  if (code < 0 || code > 16) return absl::StrCat("CODE_", code);
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::string Describe(const absl::Status& status) {
  if (status.ok()) return "OK";
  if (OriginOf(status) == Origin::kLocal) return std::string(status.message());
  std::string text = absl::StrCat(CodeName(static_cast<int>(status.code())), ": ", status.message());
  if (const std::string reason = Reason(status); !reason.empty()) absl::StrAppend(&text, " (", reason, ")");
  return text;
}

std::string Hint(const absl::Status& status, absl::string_view address) {
  const Origin origin = OriginOf(status);
  if (origin == Origin::kTransport) {
    const absl::string_view message = status.message();
    if (absl::StrContains(message, "certificate verify failed")) {
      return "The server's certificate is of no authority that is trusted here: name its authority with --ca-file.";
    }
    if (absl::StrContains(message, "is not in peer certificate")) {
      return "The server's certificate is for another name: say which with --server-name.";
    }
    if (absl::StrContains(message, "wrong version number")) {
      return absl::StrCat("The server at ", address,
                          " does not speak TLS: leave out --tls, --ca-file and --cert-file.");
    }
    if (absl::StrContains(message, "Socket closed")) {
      return absl::StrCat("The connection to ", address,
                          " ended: the server stopped, or it speaks TLS (--tls, --ca-file) or asks for a certificate "
                          "(--cert-file) and got none.");
    }
    return absl::StrCat("Is the server running at ", address,
                        "? Start it with `stillhouse-server`, or name another with --address or STILLHOUSE_ADDRESS "
                        "(and --tls where it speaks TLS).");
  }
  if (origin == Origin::kLocal) return "";
  if (Reason(status) == "NO_CACHE") return "`stillhouse cache build CORPUS` builds one.";
  if (Reason(status) == "CORPUS_IN_USE") return "`stillhouse corpus delete --force` deletes its memories too.";
  switch (status.code()) {
    case absl::StatusCode::kUnauthenticated:
      return "Give the tenant's key in STILLHOUSE_KEY or with --key-file.";
    case absl::StatusCode::kPermissionDenied:
      return "This call needs another key; `stillhouse tenant` needs the admin key.";
    case absl::StatusCode::kNotFound:
      return "`stillhouse corpus list` and `stillhouse cache list` show what there is.";
    case absl::StatusCode::kDeadlineExceeded:
      return "Allow more time with --timeout.";
    case absl::StatusCode::kUnimplemented:
      return "The server is older than this program, or its backend lacks this; see `stillhouse server info`.";
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
      if (const auto delay = RetryDelay(status)) {
        return absl::StrCat("Try again in ", absl::FormatDuration(absl::Ceil(*delay, absl::Seconds(1))), ".");
      }
      return "";
    default:
      return "";
  }
}

}  // namespace stillhouse::client
