#ifndef STILLHOUSE_SERVER_TOKEN_WORD_SPLITTER_H_
#define STILLHOUSE_SERVER_TOKEN_WORD_SPLITTER_H_

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

// The regular expression of one pre-tokenizer, compiled by PCRE2 (to machine code where the platform allows it).
// Immutable: any thread may open cursors.
class WordSplitter {
 public:
  static absl::StatusOr<std::unique_ptr<WordSplitter>> Create(PreTokenizer pre);
  ~WordSplitter();
  WordSplitter(const WordSplitter&) = delete;
  WordSplitter& operator=(const WordSplitter&) = delete;

  // Walks over texts, one thread at a time.
  class Cursor {
   public:
    explicit Cursor(const WordSplitter& splitter);
    ~Cursor();
    Cursor(const Cursor&) = delete;
    Cursor& operator=(const Cursor&) = delete;

    // Starts on `text`, which must be valid UTF-8 and outlive the walk.
    void Reset(std::string_view text);
    // The next word; empty at the end. The words put together are the text: what the expression does not match, or
    // cannot match within its limits (linear in the text), becomes words of one character.
    std::string_view Next();

   private:
    const WordSplitter& splitter_;
    void* match_data_;
    void* match_context_;
    std::string_view text_;
    size_t position_ = 0;
  };

  // All words of a text.
  std::vector<std::string_view> Split(std::string_view text) const;

 private:
  WordSplitter() = default;
  void* code_ = nullptr;
  bool jit_ = false;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_WORD_SPLITTER_H_
