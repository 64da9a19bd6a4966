#ifndef STILLHOUSE_SERVER_TOKEN_STREAM_DECODER_H_
#define STILLHOUSE_SERVER_TOKEN_STREAM_DECODER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

// Turns generated ids into text that may be sent at once. Every returned piece is valid UTF-8: a code point whose bytes
// are still coming is held back, bytes that can no longer become one are U+FFFD (one per maximal ill-formed part, as
// the Unicode Standard recommends). Text that may be the beginning of a stop string is held back until it is one (then
// it and all that follows is dropped) or is not. The concatenation of all pieces, Finish included, is the whole answer
// and does not depend on where tokens end.
//
// With several stop strings the one that is complete first wins, and the longest of those that end together.
//
// One sequence, one thread at a time. The tokenizer must outlive it.
class StreamDecoder {
 public:
  struct Options {
    std::vector<std::string> stop;
    bool skip_control = true;  // control tokens add no text
  };

  // INVALID_ARGUMENT for a stop string that is empty or not UTF-8.
  static absl::StatusOr<StreamDecoder> Create(const Tokenizer* tokenizer, Options options);
  static absl::StatusOr<StreamDecoder> Create(const Tokenizer* tokenizer);

  // The text that this id makes final, often empty. Once stopped() or after Finish it stays empty.
  std::string Push(int32_t id);

  // The end of the sequence: what was held back. An unfinished code point becomes U+FFFD.
  std::string Finish();

  // Whether a stop string was met (also in Finish), and which.
  bool stopped() const { return stopped_; }
  std::string_view stop_string() const { return stopped_ ? options_.stop[stop_index_] : std::string_view(); }

 private:
  StreamDecoder(const Tokenizer* tokenizer, Options options);
  std::string Release(bool at_end);

  const Tokenizer* tokenizer_;
  Options options_;
  std::string bytes_;  // the beginning of a code point, at most 3 bytes
  std::string text_;   // valid UTF-8 that may begin a stop string
  bool stopped_ = false;
  bool finished_ = false;
  size_t stop_index_ = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_STREAM_DECODER_H_
