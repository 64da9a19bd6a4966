#define PCRE2_CODE_UNIT_WIDTH 8
#include "server/token/word_splitter.h"

#include <pcre2.h>

#include <algorithm>
#include <string>

#include "absl/memory/memory.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/logging.h"
#include "kernels/base/strings.h"
#include "server/token/utf8.h"

namespace stillhouse {
namespace {

// White space as the reference implementations have it (Unicode White_Space). PCRE2's own \s has U+180E as well.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// %W stands for the inside of the class of white space.
std::string_view PatternOf(PreTokenizer pre) {
  switch (pre) {
    case PreTokenizer::kGpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^%W\p{L}\p{N}]+|[%W]+(?![^%W])|[%W]+)";
    case PreTokenizer::kSmolLm:
      // The reference cuts at every digit first, and runs the GPT-2 expression on what lies between: a digit ends white
      // space as the end of the text does, and never joins a space before it.
      return R"(\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^%W\p{L}\p{N}]+|[%W]+(?![^%W\p{N}])|[%W]+)";
    case PreTokenizer::kLlamaBpe:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^%W\p{L}\p{N}]+[\r\n]*|[%W]*[\r\n]+)"
             R"(|[%W]+(?![^%W])|[%W]+)";
    case PreTokenizer::kQwen2:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^%W\p{L}\p{N}]+[\r\n]*|[%W]*[\r\n]+)"
             R"(|[%W]+(?![^%W])|[%W]+)";
  }
  return "";
}

// The cost of one match is linear in the text (the longest is a run of white space that is walked back from its end).
constexpr size_t kMinMatchLimit = 1 << 20;
constexpr uint32_t kHeapLimitKib = 64 << 10;

}  // namespace

absl::StatusOr<std::unique_ptr<WordSplitter>> WordSplitter::Create(PreTokenizer pre) {
  const std::string pattern = absl::StrReplaceAll(ToAbsl(PatternOf(pre)), {{"%W", ToAbsl(kSpace)}});
  // Anchored: a match begins where the last one ended, or the character there is a word of its own.
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto splitter = absl::WrapUnique(new WordSplitter());
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF | PCRE2_ANCHORED, &error, &offset,
                                   /*ccontext=*/nullptr);
  if (code == nullptr) {
    return absl::UnimplementedError(StrCat("the PCRE2 library of this system cannot compile the pre-tokenizer '",
                                           PreTokenizerName(pre), "' (error ", error, " at ", offset,
                                           "); install one built with Unicode support"));
  }
  splitter->code_ = code;
  splitter->jit_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
  return splitter;
}

WordSplitter::~WordSplitter() { pcre2_code_free(static_cast<pcre2_code*>(code_)); }

WordSplitter::Cursor::Cursor(const WordSplitter& splitter) : splitter_(splitter) {
  match_data_ = pcre2_match_data_create(/*ovecsize=*/1, nullptr);
  match_context_ = pcre2_match_context_create(nullptr);
  STILLHOUSE_CHECK(match_data_ != nullptr && match_context_ != nullptr) << "out of memory";
}

WordSplitter::Cursor::~Cursor() {
  pcre2_match_data_free(static_cast<pcre2_match_data*>(match_data_));
  pcre2_match_context_free(static_cast<pcre2_match_context*>(match_context_));
}

void WordSplitter::Cursor::Reset(std::string_view text) {
  text_ = text;
  position_ = 0;
  auto* context = static_cast<pcre2_match_context*>(match_context_);
  const size_t limit = std::max(kMinMatchLimit, std::min<size_t>(text.size(), UINT32_MAX / 8) * 8);
  pcre2_set_match_limit(context, static_cast<uint32_t>(limit));
  pcre2_set_heap_limit(context, kHeapLimitKib);
}

std::string_view WordSplitter::Cursor::Next() {
  if (position_ == text_.size()) return {};
  const auto* code = static_cast<const pcre2_code*>(splitter_.code_);
  auto* data = static_cast<pcre2_match_data*>(match_data_);
  auto* context = static_cast<pcre2_match_context*>(match_context_);
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
  const int rc = splitter_.jit_
                     ? pcre2_jit_match(code, subject, text_.size(), position_, 0, data, context)
                     : pcre2_match(code, subject, text_.size(), position_, PCRE2_NO_UTF_CHECK, data, context);
  size_t begin = text_.size();
  size_t end = text_.size();
  if (rc > 0) {
    const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer(data);
    begin = ovector[0];
    end = ovector[1];
  }
  if (begin != position_ || end <= begin) {
    end = position_ + std::max<size_t>(1, Utf8SequenceLength(text_.substr(position_, 4)));
  }
  const std::string_view word = text_.substr(position_, end - position_);
  position_ = end;
  return word;
}

std::vector<std::string_view> WordSplitter::Split(std::string_view text) const {
  Cursor cursor(*this);
  cursor.Reset(text);
  std::vector<std::string_view> words;
  for (std::string_view word = cursor.Next(); !word.empty(); word = cursor.Next()) words.push_back(word);
  return words;
}

}  // namespace stillhouse
