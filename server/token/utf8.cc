#include "server/token/utf8.h"

#include <cstdint>
#include <cstring>

namespace stillhouse {
namespace {

struct Lead {
  size_t length;            // 0: not a lead byte
  unsigned char low, high;  // range of the second byte (Unicode Standard, table 3-7)
};

Lead LeadOf(unsigned char c) {
  if (c < 0x80) return {1, 0, 0};
  if (c < 0xC2) return {0, 0, 0};
  if (c < 0xE0) return {2, 0x80, 0xBF};
  if (c == 0xE0) return {3, 0xA0, 0xBF};
  if (c == 0xED) return {3, 0x80, 0x9F};
  if (c < 0xF0) return {3, 0x80, 0xBF};
  if (c == 0xF0) return {4, 0x90, 0xBF};
  if (c < 0xF4) return {4, 0x80, 0xBF};
  if (c == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// The number of bytes at the beginning of `text` that fit one well-formed sequence; `length` is what the whole sequence
// needs.
size_t MatchingBytes(std::string_view text, size_t* length) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const Lead lead = LeadOf(at(0));
  *length = lead.length;
  if (lead.length <= 1) return lead.length;
  size_t n = 1;
  if (n < text.size() && at(n) >= lead.low && at(n) <= lead.high) {
    ++n;
    while (n < lead.length && n < text.size() && (at(n) & 0xC0) == 0x80) ++n;
  }
  return n;
}

}  // namespace

size_t Utf8SequenceLength(std::string_view text) {
  if (text.empty()) return 0;
  size_t length = 0;
  const size_t n = MatchingBytes(text, &length);
  return n == length ? length : 0;
}

size_t Utf8IllFormedLength(std::string_view text, bool* truncated) {
  size_t length = 0;
  const size_t n = MatchingBytes(text, &length);
  *truncated = n > 0 && n == text.size() && n < length;
  return n == 0 ? 1 : n;
}

size_t ValidUtf8Prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t eight;
    if (i + sizeof(eight) <= text.size()) {
      std::memcpy(&eight, text.data() + i, sizeof(eight));
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof(eight);
        continue;
      }
    }
    const size_t n = Utf8SequenceLength(text.substr(i));
    if (n == 0) break;
    i += n;
  }
  return i;
}

bool IsValidUtf8(std::string_view text) { return ValidUtf8Prefix(text) == text.size(); }

void AppendAsUtf8(std::string_view text, std::string* out, std::string* rest) {
  if (rest != nullptr) rest->clear();
  while (!text.empty()) {
    const size_t valid = ValidUtf8Prefix(text);
    out->append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) return;
    bool truncated = false;
    const size_t bad = Utf8IllFormedLength(text, &truncated);
    if (truncated && rest != nullptr) {
      rest->assign(text);
      return;
    }
    out->append("\xEF\xBF\xBD");
    text.remove_prefix(bad);
  }
}

std::string ToValidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  AppendAsUtf8(text, &out);
  return out;
}

}  // namespace stillhouse
