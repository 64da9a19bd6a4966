#ifndef STILLHOUSE_SERVER_TOKEN_UTF8_H_
#define STILLHOUSE_SERVER_TOKEN_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace stillhouse {

// The length of the well-formed UTF-8 sequence that `text` begins with (1..4), or 0. Overlong forms, surrogates and
// values above U+10FFFF are ill-formed.
size_t Utf8SequenceLength(std::string_view text);

// The length of the ill-formed part that `text` begins with: the longest beginning of a well-formed sequence, at
// least 1. `truncated` is set if the text ends inside what could still become a well-formed sequence.
size_t Utf8IllFormedLength(std::string_view text, bool* truncated);

bool IsValidUtf8(std::string_view text);

// The length of the longest well-formed beginning of `text`.
size_t ValidUtf8Prefix(std::string_view text);

// Appends `text` with every ill-formed part as U+FFFD. With `rest`, an unfinished sequence at the end goes there
// instead.
void AppendAsUtf8(std::string_view text, std::string* out, std::string* rest = nullptr);

// `text` as valid UTF-8.
std::string ToValidUtf8(std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_UTF8_H_
