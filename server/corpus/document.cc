#include "server/corpus/document.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/corpus/seeds.h"
#include "server/token/utf8.h"

namespace stillhouse {
namespace {

constexpr int64_t kLeastWindow = 16;

bool EndsSentence(std::string_view bytes) {
  while (!bytes.empty() && (bytes.back() == '"' || bytes.back() == ')' || bytes.back() == '\'')) bytes.remove_suffix(1);
  return !bytes.empty() && (bytes.back() == '.' || bytes.back() == '?' || bytes.back() == '!');
}

// How good a place to cut lies before token i: 3 a blank line, 2 a line's end, 1 a sentence's end.
int BreakBefore(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int64_t i) {
  const std::string_view last = tokenizer.TokenBytes(tokens[static_cast<size_t>(i - 1)]);
  const std::string_view next = tokenizer.TokenBytes(tokens[static_cast<size_t>(i)]);
  if (!next.empty() && next.front() == '\n') return 0;  // the line's end belongs to what it ends
  if (!last.empty() && last.back() == '\n') {
    const bool blank = last.find("\n\n") != std::string_view::npos || (i >= 2 && [&] {
                         const std::string_view before = tokenizer.TokenBytes(tokens[static_cast<size_t>(i - 2)]);
                         return last == "\n" && !before.empty() && before.back() == '\n';
                       }());
    return blank ? 3 : 2;
  }
  if (EndsSentence(last) && !next.empty() && (next.front() == ' ' || next.front() == '\t')) return 1;
  return 0;
}

}  // namespace

std::vector<int32_t> Document::Framed(TokenRange range) const {
  std::vector<int32_t> ids = header;
  ids.insert(ids.end(), tokens.begin() + range.begin, tokens.begin() + range.end);
  ids.insert(ids.end(), footer.begin(), footer.end());
  return ids;
}

Document TokeniseDocument(const Tokenizer& tokenizer, const ChatTemplate& chat, std::string_view text) {
  Document document;
  document.tokens = tokenizer.Encode(text);
  document.header = chat.Opening();
  const std::vector<int32_t> system = chat.SystemHeader();
  document.header.insert(document.header.end(), system.begin(), system.end());
  document.footer = chat.TurnEnd();
  document.valid_utf8 = IsValidUtf8(text);
  return document;
}

absl::StatusOr<std::vector<TokenRange>> PlanWindows(int64_t tokens, int64_t frame, int64_t context, int64_t reserve) {
  if (tokens + frame + reserve <= context) return std::vector<TokenRange>{{0, tokens}};
  const int64_t most = std::min(context - reserve, context / 2) - frame;
  if (most < kLeastWindow) {
    return absl::InvalidArgumentError(absl::StrCat("questions and answers of up to ", reserve,
                                                   " tokens leave no room for the document in a context of ", context,
                                                   " positions: ask for shorter ones"));
  }
  const int64_t overlap = std::min<int64_t>(most / 8, 256);
  const int64_t count = (tokens - overlap + most - overlap - 1) / (most - overlap);
  const int64_t size = (tokens + (count - 1) * overlap + count - 1) / count;
  std::vector<TokenRange> windows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = std::min(i * (size - overlap), tokens - size);
    windows.push_back({begin, begin + size});
  }
  return windows;
}

std::vector<TokenRange> CutChunks(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int64_t min,
                                  int64_t max, uint64_t seed) {
  const int64_t total = static_cast<int64_t>(tokens.size());
  std::vector<TokenRange> chunks;
  int64_t begin = 0;
  for (uint64_t index = 0; begin < total; ++index) {
    const int64_t wanted = min + static_cast<int64_t>(MixDraw(seed, index) % static_cast<uint64_t>(max - min + 1));
    int64_t end = begin + wanted;
    if (total - begin <= max || total - end < min / 2) {
      // What is left is one chunk, or two of a kind.
      end = total - begin <= max ? total : begin + (total - begin) / 2;
    }
    if (end < total) {
      // The best break within a quarter of the length; the nearest of equals.
      const int64_t reach = std::max<int64_t>(1, (end - begin) / 4);
      int best = 0;
      int64_t at = end;
      for (int64_t distance = 0; distance <= reach; ++distance) {
        for (int64_t candidate : {end - distance, end + distance}) {
          if (candidate <= begin || candidate >= total) continue;
          const int quality = BreakBefore(tokenizer, tokens, candidate);
          if (quality > best) {
            best = quality;
            at = candidate;
          }
        }
      }
      end = at;
    }
    chunks.push_back({begin, end});
    begin = end;
  }
  return chunks;
}

int32_t WindowOf(const std::vector<TokenRange>& windows, TokenRange range) {
  int32_t best = 0;
  int64_t most = -1;
  for (size_t w = 0; w < windows.size(); ++w) {
    const int64_t common = std::min(range.end, windows[w].end) - std::max(range.begin, windows[w].begin);
    if (common > most) {
      most = common;
      best = static_cast<int32_t>(w);
    }
  }
  return best;
}

}  // namespace stillhouse
