#include "cache_store/embedded/page_token.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "cache_store/crc32c.h"
#include "kernels/base/strings.h"

namespace stillhouse {

std::string MakePageToken(std::string_view list, const std::vector<std::string>& last_key) {
  // No key part holds a slash: ids and numbers.
  const std::string key = absl::StrJoin(last_key, "/");
  return absl::WebSafeBase64Escape(absl::StrFormat("1%08x%s", Crc32c(key, Crc32c(list)), key));
}

absl::StatusOr<std::vector<std::string>> ReadPageToken(std::string_view list, std::string_view token, size_t parts) {
  if (token.empty()) return std::vector<std::string>(parts);
  std::string text;
  if (token.size() <= 1024 && absl::WebSafeBase64Unescape(ToAbsl(token), &text) && text.size() >= 9 && text[0] == '1') {
    const std::string key = text.substr(9);
    std::vector<std::string> values = absl::StrSplit(key, '/');
    if (values.size() == parts && text.substr(1, 8) == absl::StrFormat("%08x", Crc32c(key, Crc32c(list))))
      return values;
  }
  return absl::InvalidArgumentError("the page token is not from this list: start again without one");
}

absl::StatusOr<int> PageSize(int requested) {
  if (requested < 0) return absl::InvalidArgumentError("the page size is negative");
  return requested == 0 ? 100 : std::min(requested, 1000);
}

}  // namespace stillhouse
