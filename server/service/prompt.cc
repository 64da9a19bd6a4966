#include "server/service/prompt.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/tenancy/reason.h"
#include "server/token/tokenizer.h"

namespace stillhouse {
namespace {

absl::Status TooLong(std::string_view what, std::string_view how_long, int64_t room) {
  return WithReason(
      absl::OutOfRangeError(StrCat(what, " has ", how_long, ", and the context has room for ", room, ": shorten it")),
      "PROMPT_TOO_LONG");
}

// Encodes texts of `bytes` in all with `encode(max_ids)`, unless they are too long for `room` positions.
template <typename EncodeFn>
absl::StatusOr<std::vector<int32_t>> EncodeWithin(const Tokenizer& tokenizer, std::string_view what, size_t bytes,
                                                  int64_t room, EncodeFn encode) {
  room = std::max<int64_t>(room, 0);
  const size_t per_id = tokenizer.max_bytes_per_id();
  if (per_id > 0 && bytes / per_id > static_cast<size_t>(room)) {
    return TooLong(what, StrCat(bytes, " bytes, at least ", bytes / per_id, " tokens whatever they are"), room);
  }
  const size_t most = 2 * static_cast<size_t>(room);
  STILLHOUSE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, encode(most));
  if (ids.size() > most) return TooLong(what, StrCat("more than ", most, " tokens"), room);
  return ids;
}

}  // namespace

int64_t RoomAfter(const ServiceContext& service, const PinnedCaches& pinned) {
  int64_t room = service.facts.context_tokens;
  for (const auto& memory : pinned.memories) room -= memory->next_position;
  return room;
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const ServiceContext& service, const PinnedCaches& pinned,
                                                  const std::vector<ChatMessage>& messages, std::string_view prompt) {
  size_t bytes = prompt.size();
  // Templates may trim what is said.
  for (const ChatMessage& message : messages) bytes += absl::StripAsciiWhitespace(message.content).size();
  const bool after_memory = !pinned.memories.empty();
  return EncodeWithin(*service.tokenizer, "the prompt", bytes, RoomAfter(service, pinned), [&](size_t max_ids) {
    return messages.empty() ? EncodeRawPrompt(*service.tokenizer, prompt, after_memory, max_ids)
                            : RenderPrompt(*service.chat, messages, after_memory, max_ids);
  });
}

absl::StatusOr<std::vector<int32_t>> EncodeText(const ServiceContext& service, std::string_view what,
                                                std::string_view text) {
  return EncodeWithin(*service.tokenizer, what, text.size(), service.facts.context_tokens,
                      [&](size_t max_ids) -> absl::StatusOr<std::vector<int32_t>> {
                        return service.tokenizer->Encode(text, /*parse_control=*/false, max_ids);
                      });
}

}  // namespace stillhouse
