#ifndef STILLHOUSE_CLIENT_CLI_JSON_H_
#define STILLHOUSE_CLIENT_CLI_JSON_H_

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace stillhouse::client {

using Json = nlohmann::ordered_json;

// A message as JSON: field names as in the .proto, integers as numbers, enums by name, times as RFC 3339 text,
// durations in seconds. Fields without presence are always there; optional and message fields only where set. Bytes
// that are no UTF-8 are shown with U+FFFD when dumped.
Json ToJson(const google::protobuf::Message& message);

// {"error": {"code", "message", "origin", "reason"?, "retry_seconds"?}}; origin: client, server or transport
Json ErrorJson(const absl::Status& status);

// One line, never throws on bad UTF-8.
std::string Dump(const Json& json);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_JSON_H_
