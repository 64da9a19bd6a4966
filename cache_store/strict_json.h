#ifndef STILLHOUSE_CACHE_STORE_STRICT_JSON_H_
#define STILLHOUSE_CACHE_STORE_STRICT_JSON_H_

#include <cstddef>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace stillhouse {

struct JsonLimits {
  size_t bytes = 4u << 20;
  size_t depth = 32;  // nested arrays and objects
  size_t values = 1u << 20;
};

// Parses one JSON value that fills `text`, from an untrusted source. INVALID_ARGUMENT for anything else: bad syntax or
// UTF-8, NUL bytes, duplicate keys at any level, numbers that overflow a double, or more than the limits. Never throws.
absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view text, const JsonLimits& limits = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_STRICT_JSON_H_
