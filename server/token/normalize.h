#ifndef STILLHOUSE_SERVER_TOKEN_NORMALIZE_H_
#define STILLHOUSE_SERVER_TOKEN_NORMALIZE_H_

#include <optional>
#include <string>
#include <string_view>

namespace stillhouse {

// Unicode normalisation form C of valid UTF-8; no value if the text is in that form already. O(n log n) for any text,
// also for long runs of combining marks.
std::optional<std::string> ToNfc(std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_NORMALIZE_H_
