#ifndef STILLHOUSE_SERVER_TOKEN_TOKENIZER_H_
#define STILLHOUSE_SERVER_TOKEN_TOKENIZER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace stillhouse {

// How text is cut into words before byte-pair merging; a property of the model, named by `tokenizer.ggml.pre` in a GGUF
// file.
enum class PreTokenizer {
  kGpt2,      // the GPT-2 expression ("gpt-2", "default")
  kSmolLm,    // every digit alone, then the GPT-2 expression ("smollm")
  kLlamaBpe,  // Llama-3: digits in groups of up to three; whole words of the vocabulary skip the merges ("llama-bpe")
  kQwen2,     // Qwen2 and Qwen3: NFC, digits alone ("qwen2")
};

// By the GGUF name; UNIMPLEMENTED names an unknown one and lists what is supported.
absl::StatusOr<PreTokenizer> PreTokenizerFromName(std::string_view name);
std::string_view PreTokenizerName(PreTokenizer pre);

// Values are those of `tokenizer.ggml.token_type`.
enum class TokenType : uint8_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,  // text is "<0xNN>"
};

// What a tokenizer is made of. Normal tokens and merges are spelled in the GPT-2 byte alphabet (a space is "Ġ"),
// control and user-defined tokens as they read.
struct TokenizerData {
  std::vector<std::string> tokens;
  std::vector<TokenType> types;  // empty: all normal; else one per token
  std::vector<std::pair<std::string, std::string>> merges;
  PreTokenizer pre = PreTokenizer::kGpt2;
  std::optional<int32_t> bos;
  std::optional<int32_t> eos;
  std::optional<int32_t> pad;
  bool add_bos = false;
};

// A byte-level BPE tokenizer. Immutable after Create: any number of threads may call any method at once.
//
// Encode is total: every byte string has ids. Text is cut into maximal runs of valid UTF-8 and runs of bytes that
// belong to no valid sequence. A valid run is normalised (Qwen2 only) and cut into words by the model's expression; an
// invalid run is one word. Words are merged at the byte level, so invalid bytes come back from Decode as they were.
// Bytes that have no token in the vocabulary vanish, before merging, as they do in the reference implementation: a
// round trip is not promised.
//
// A plain Encode never yields a control token, whatever the text spells; user-defined tokens are text and are always
// recognised.
class Tokenizer {
 public:
  // INVALID_ARGUMENT for an empty vocabulary, type or special ids that do not fit it, or merges that name no token.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(TokenizerData data);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ids of `text`, without BOS. With `parse_control`, spellings of control tokens become these tokens: only for text
  // that the server or an operator wrote. Time is O(n log n) in the longest word; memory beside the result is bounded
  // by a constant (words of more than 1 MiB are merged in overlapping windows of that size) plus, for Qwen2, the
  // normalised text.
  // With more than `max_ids` ids it stops within a word of the first that is too many.
  std::vector<int32_t> Encode(std::string_view text, bool parse_control = false, size_t max_ids = SIZE_MAX) const;

  // Bytes of text that one id of a plain Encode takes at most: a text of more than n times as many has more than n ids.
  // 0: no such bound, for there are bytes that have no token.
  size_t max_bytes_per_id() const;

  // The raw bytes of the ids, not necessarily UTF-8 (StreamDecoder makes them so). Ids outside the vocabulary add
  // nothing.
  std::string Decode(absl::Span<const int32_t> ids, bool skip_control = false) const;

  // The bytes that one id stands for; empty for an id outside the vocabulary. Lives as long as the tokenizer.
  std::string_view TokenBytes(int32_t id) const;
  bool IsControl(int32_t id) const;
  // The control token with exactly this spelling.
  std::optional<int32_t> FindControl(std::string_view text) const;

  int32_t vocab_size() const;
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> pad() const;
  // Whether the model expects BOS before a text.
  bool add_bos() const;
  // Ids that end an answer: EOS and the end-of-turn and end-of-text markers that the vocabulary has. Sorted, without
  // repeats.
  const std::vector<int32_t>& end_of_generation() const;
  bool IsEndOfGeneration(int32_t id) const;
  PreTokenizer pre() const;

  // SHA-256 (lower-case hex) over vocabulary, types, merges, pre-tokenizer and special ids: two tokenizers with one
  // fingerprint give every text the same ids.
  const std::string& Fingerprint() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_TOKENIZER_H_
