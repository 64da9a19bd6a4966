// A corpus as tokens: the windows in which a model can see it, and the chunks that questions are asked about.
#ifndef STILLHOUSE_SERVER_CORPUS_DOCUMENT_H_
#define STILLHOUSE_SERVER_CORPUS_DOCUMENT_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

struct TokenRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// The tokens of a corpus, and the frame that a memory of it has: [Opening][SystemHeader] tokens [TurnEnd].
struct Document {
  std::vector<int32_t> tokens;  // of the text alone
  std::vector<int32_t> header, footer;
  bool valid_utf8 = true;

  int64_t frame() const { return static_cast<int64_t>(header.size() + footer.size()); }
  // Of the whole document in its frame.
  int64_t framed_tokens() const { return static_cast<int64_t>(tokens.size()) + frame(); }
  std::vector<int32_t> Framed(TokenRange range) const;
};

Document TokeniseDocument(const Tokenizer& tokenizer, const ChatTemplate& chat, std::string_view text);

// One range if the framed document leaves `reserve` of the context's positions, else equal overlapping windows of at
// most half the context, in order. INVALID_ARGUMENT if not even a window of 16 tokens fits.
absl::StatusOr<std::vector<TokenRange>> PlanWindows(int64_t tokens, int64_t frame, int64_t context, int64_t reserve);

// Cuts [0, tokens) into consecutive chunks whose lengths are drawn uniformly from [min, max], each moved to the best
// break near by: a blank line, a line's end, a sentence's end. The last two are evened out if the rest is short.
// Deterministic in `seed`.
std::vector<TokenRange> CutChunks(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int64_t min,
                                  int64_t max, uint64_t seed);

// The window that holds most of the range; the earlier of two equal ones.
int32_t WindowOf(const std::vector<TokenRange>& windows, TokenRange range);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_DOCUMENT_H_
