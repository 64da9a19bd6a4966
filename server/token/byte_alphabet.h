#ifndef STILLHOUSE_SERVER_TOKEN_BYTE_ALPHABET_H_
#define STILLHOUSE_SERVER_TOKEN_BYTE_ALPHABET_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace stillhouse {

// The GPT-2 byte alphabet, in which vocabularies of byte-level BPE are spelled: printable Latin-1 bytes are themselves,
// the other 68 are U+0100 and up in byte order (a space is U+0120 "Ġ").
std::string ByteToAlphabet(uint8_t byte);
std::string BytesToAlphabet(std::string_view bytes);

// No value if `text` holds a character outside the alphabet.
std::optional<std::string> AlphabetToBytes(std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_BYTE_ALPHABET_H_
