#include "server/token/normalize.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
constexpr size_t kChunk = 1 << 16;  // code points after which a safe place to cut is taken

bool IsAscii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Unified ideographs and Hangul syllables never compose with what is before them.
bool IsSafeToCutBefore(utf8proc_int32_t c) { return (c >= 0x3400 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3); }

int CombiningClass(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

void AppendComposed(std::vector<utf8proc_int32_t>* points, std::string* out) {
  // utf8proc orders combining marks by neighbouring swaps, quadratic in a run of them; hostile text has long runs.
  for (size_t i = 0; i < points->size();) {
    size_t j = i;
    while (j < points->size() && CombiningClass((*points)[j]) != 0) ++j;
    if (j > i + 1) {
      std::stable_sort(points->begin() + i, points->begin() + j,
                       [](auto a, auto b) { return CombiningClass(a) < CombiningClass(b); });
    }
    i = j + 1;
  }
  const utf8proc_ssize_t n = utf8proc_normalize_utf32(points->data(), points->size(), kOptions);
  STILLHOUSE_CHECK(n >= 0) << utf8proc_errmsg(n);
  for (utf8proc_ssize_t i = 0; i < n; ++i) {
    utf8proc_uint8_t buffer[4];
    const auto bytes = utf8proc_encode_char((*points)[i], buffer);
    out->append(reinterpret_cast<const char*>(buffer), bytes);
  }
  points->clear();
}

void AppendNfc(std::string_view text, std::string* out) {
  std::vector<utf8proc_int32_t> points;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    utf8proc_int32_t c = 0;
    const utf8proc_ssize_t n = utf8proc_iterate(bytes + i, text.size() - i, &c);
    STILLHOUSE_CHECK(n > 0) << "text is valid UTF-8";
    i += n;
    if (points.size() >= kChunk && IsSafeToCutBefore(c)) AppendComposed(&points, out);
    utf8proc_int32_t parts[32];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(c, parts, 32, kOptions, &boundary);
    STILLHOUSE_CHECK(count >= 0 && count <= 32) << "decomposition of U+" << std::hex << c;
    points.insert(points.end(), parts, parts + count);
  }
  AppendComposed(&points, out);
}

}  // namespace

std::optional<std::string> ToNfc(std::string_view text) {
  std::string out;
  size_t copied = 0;  // text[0, copied) is in `out`
  bool changed = false;
  for (size_t i = 0; i < text.size();) {
    if (IsAscii(text[i])) {
      ++i;
      continue;
    }
    // A run that is not ASCII, with the ASCII character before it: a mark may compose with that one, never with the one
    // after.
    const size_t begin = i > copied ? i - 1 : i;
    bool trivial = true;  // only code points under U+0300, which are stable
    while (i < text.size() && !IsAscii(text[i])) {
      trivial &= static_cast<unsigned char>(text[i]) < 0xCC;
      ++i;
    }
    if (trivial) continue;
    const std::string_view run = text.substr(begin, i - begin);
    std::string composed;
    AppendNfc(run, &composed);
    if (composed == run) continue;
    changed = true;
    out.append(text.substr(copied, begin - copied));
    out.append(composed);
    copied = i;
  }
  if (!changed) return std::nullopt;
  out.append(text.substr(copied));
  return out;
}

}  // namespace stillhouse
