#include "server/token/byte_alphabet.h"

#include <array>

#include "server/token/utf8.h"

namespace stillhouse {
namespace {

constexpr bool IsItself(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

constexpr std::array<uint16_t, 256> MakeCodePoints() {
  std::array<uint16_t, 256> points = {};
  uint16_t next = 0x100;
  for (int b = 0; b < 256; ++b) points[b] = IsItself(b) ? static_cast<uint16_t>(b) : next++;
  return points;
}

constexpr std::array<uint16_t, 256> kCodePoints = MakeCodePoints();

constexpr std::array<int16_t, 0x144> MakeBytes() {
  std::array<int16_t, 0x144> bytes = {};
  for (auto& b : bytes) b = -1;
  for (int b = 0; b < 256; ++b) bytes[kCodePoints[b]] = static_cast<int16_t>(b);
  return bytes;
}

constexpr std::array<int16_t, 0x144> kBytes = MakeBytes();

}  // namespace

std::string ByteToAlphabet(uint8_t byte) {
  const uint16_t c = kCodePoints[byte];
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xC0 | (c >> 6)), static_cast<char>(0x80 | (c & 0x3F))};
}

std::string BytesToAlphabet(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += ByteToAlphabet(static_cast<uint8_t>(c));
  return out;
}

std::optional<std::string> AlphabetToBytes(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t n = Utf8SequenceLength(text);
    if (n == 0 || n > 2) return std::nullopt;
    const auto first = static_cast<unsigned char>(text[0]);
    const unsigned c = n == 1 ? first : ((first & 0x1Fu) << 6) | (static_cast<unsigned char>(text[1]) & 0x3Fu);
    if (c >= kBytes.size() || kBytes[c] < 0) return std::nullopt;
    out.push_back(static_cast<char>(kBytes[c]));
    text.remove_prefix(n);
  }
  return out;
}

}  // namespace stillhouse
