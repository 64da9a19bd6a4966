#ifndef STILLHOUSE_CACHE_STORE_EMBEDDED_PAGE_TOKEN_H_
#define STILLHOUSE_CACHE_STORE_EMBEDDED_PAGE_TOKEN_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace stillhouse {

// Where a list went on: the last row's key, bound by a checksum to the list and filter (`list`) that it was made for.
std::string MakePageToken(std::string_view list, const std::vector<std::string>& last_key);

// The key's `parts` parts; as many empty ones for an empty token. INVALID_ARGUMENT for anything that MakePageToken did
// not make for this list.
absl::StatusOr<std::vector<std::string>> ReadPageToken(std::string_view list, std::string_view token, size_t parts);

// The page size to use. INVALID_ARGUMENT if negative.
absl::StatusOr<int> PageSize(int requested);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_EMBEDDED_PAGE_TOKEN_H_
