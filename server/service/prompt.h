// What a query or a score reads, as tokens, in time that its context bounds.
#ifndef STILLHOUSE_SERVER_SERVICE_PROMPT_H_
#define STILLHOUSE_SERVER_SERVICE_PROMPT_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/service/pinned_caches.h"
#include "server/service/service_context.h"
#include "server/service/validation.h"

namespace stillhouse {

// Positions that a sequence has after the memories.
int64_t RoomAfter(const ServiceContext& service, const PinnedCaches& pinned);

// The ids of a conversation, or of a raw prompt where `messages` is empty. OUT_OF_RANGE (PROMPT_TOO_LONG) for what
// cannot fit the room behind the memories: by its bytes, before it is tokenised, and by its tokens, which are counted
// up to twice the room. Less than that is the engine's to refuse, with the exact number.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const ServiceContext& service, const PinnedCaches& pinned,
                                                  const std::vector<ChatMessage>& messages, std::string_view prompt);
// The same for a text that is only read.
absl::StatusOr<std::vector<int32_t>> EncodeText(const ServiceContext& service, std::string_view what,
                                                std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_PROMPT_H_
