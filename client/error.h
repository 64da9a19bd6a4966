#ifndef STILLHOUSE_CLIENT_ERROR_H_
#define STILLHOUSE_CLIENT_ERROR_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

// What went wrong with a call, as an absl::Status that also carries what the server attached to it: the ErrorInfo (a
// stable UPPER_SNAKE reason and facts) and the RetryInfo. No gRPC types. All functions are pure and thread-safe.
namespace stillhouse::client {

// Who said no.
enum class Origin {
  kLocal,      // this program: a bad flag, a file that cannot be read
  kServer,     // the server, in words of its own
  kTransport,  // nobody answered: connection, TLS, or a deadline before any connection
};

Origin OriginOf(const absl::Status& status);

// The server's reason, such as "CACHE_NOT_FOUND"; empty when there is none.
std::string Reason(const absl::Status& status);

// A fact of the ErrorInfo, such as Fact(status, "committed_bytes").
std::optional<std::string> Fact(const absl::Status& status, absl::string_view key);

// The earliest time at which a retry may succeed, as the server said; absent when it said nothing.
std::optional<absl::Duration> RetryDelay(const absl::Status& status);

// True where sending the same call again may help without anybody changing anything.
bool IsTransient(const absl::Status& status);

// From a call's code, message and `grpc-status-details-bin`. `connected` says whether the channel ever reached a
// server; it decides what an UNAVAILABLE or DEADLINE_EXCEEDED without details means. Details that cannot be parsed are
// ignored.
absl::Status FromRpc(int code, absl::string_view message, absl::string_view details, bool connected);

// As FromRpc, for the error of a finished operation.
absl::Status FromOperation(int code, absl::string_view message, absl::string_view reason);

// One line: "NOT_FOUND: There is no cache … (CACHE_NOT_FOUND)".
std::string Describe(const absl::Status& status);

// A sentence on what to do next; empty when the message says it already. `address` is the server's.
std::string Hint(const absl::Status& status, absl::string_view address);

// "NOT_FOUND" and so on; "CODE_<n>" for numbers outside the canonical codes.
std::string CodeName(int code);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_ERROR_H_
