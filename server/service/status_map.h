// The one place where gRPC statuses are made.
#ifndef STILLHOUSE_SERVER_SERVICE_STATUS_MAP_H_
#define STILLHOUSE_SERVER_SERVICE_STATUS_MAP_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace grpc {
class Status;
}

namespace stillhouse {

// `status` as a call ends with it: the same canonical code, a message without file paths, and details (errors.proto)
// with the reason, facts and retry hint that the status carries (tenancy/reason.h). A status without a reason gets one
// from its code. INTERNAL and UNKNOWN say nothing of their cause to the caller; the cause is logged.
grpc::Status ToGrpcStatus(const absl::Status& status);

// The name of a code as Prometheus and gRPC write it: "OK", "NotFound", …
const char* CodeName(absl::StatusCode code);

// The reason that ToGrpcStatus sends: the status's own, or its code's, such as "NOT_FOUND".
std::string ReasonOf(const absl::Status& status);

// What a caller may read of a failure: valid UTF-8 without file paths; of INTERNAL and UNKNOWN, nothing of the cause.
std::string PublicMessage(absl::StatusCode code, std::string_view message);

// `message` with every absolute path cut down to its last part.
std::string WithoutPaths(std::string_view message);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_STATUS_MAP_H_
