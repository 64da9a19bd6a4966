// std::string_view with Abseil. Distributions build Abseil with its own absl::string_view or with an alias of the
// standard one; code that converts here compiles with both.
#ifndef STILLHOUSE_KERNELS_BASE_STRINGS_H_
#define STILLHOUSE_KERNELS_BASE_STRINGS_H_

#include <functional>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace stillhouse {

inline absl::string_view ToAbsl(std::string_view text) { return absl::string_view(text.data(), text.size()); }
inline std::string_view ToStd(absl::string_view text) { return std::string_view(text.data(), text.size()); }

namespace internal {
template <typename T>
decltype(auto) StrCatPiece(const T& piece) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return ToAbsl(piece);
  } else {
    return (piece);
  }
}
}  // namespace internal

// absl::StrCat that also takes std::string_view.
template <typename... Pieces>
std::string StrCat(const Pieces&... pieces) {
  return absl::StrCat(internal::StrCatPiece(pieces)...);
}

// For hash maps with keys of std::string or std::string_view that are searched with either.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_BASE_STRINGS_H_
