// Requests as callers send them, checked field by field before anything is done.
#ifndef STILLHOUSE_SERVER_SERVICE_VALIDATION_H_
#define STILLHOUSE_SERVER_SERVICE_VALIDATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/sample.h"
#include "server/token/chat_template.h"

namespace stillhouse {

namespace v1 {
class Messages;
class SamplingOptions;
}  // namespace v1

inline constexpr int kMaxStopStrings = 16;
inline constexpr int kMaxStopBytes = 256;
inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxCachesPerQuery = 8;
inline constexpr int kMaxMessages = 1024;
inline constexpr int kMaxDisplayName = 256;
inline constexpr int kMaxMediaType = 128;
inline constexpr int kMaxChunkBytes = 1 << 20;
inline constexpr int64_t kDefaultMaxTokens = 256;

// INVALID_ARGUMENT that names the field.
absl::Status BadField(std::string_view field, std::string_view problem);

// Empty, or a UUID.
absl::Status CheckRequestId(std::string_view request_id);
absl::Status CheckTextField(std::string_view field, std::string_view text, size_t max_bytes);
// 64 lower-case hex digits.
absl::Status CheckSha256Field(std::string_view field, std::string_view hash);
// Default 50, more than 1000 is 1000; negative is INVALID_ARGUMENT.
absl::StatusOr<int> CheckPageSize(int32_t page_size);

// Sampling as the engine takes it, and what the service does itself.
struct QuerySettings {
  SampleRow row;
  int64_t max_tokens = kDefaultMaxTokens;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool report_logprobs = false;  // the chosen token's
  int top_logprobs = 0;          // and of so many likeliest
};
// `vocabulary` clamps top_k. A seed that is not given is drawn.
absl::StatusOr<QuerySettings> ParseSampling(const v1::SamplingOptions& options, int64_t vocabulary);

// Roles and their order: a system message first or not at all, the last one the user's.
absl::StatusOr<std::vector<ChatMessage>> ParseMessages(const v1::Messages& messages);

// Token ids of a conversation. After memories, which hold the conversation's opening, only the turns themselves.
// Of more than `max_ids` they give more than that, but not all.
absl::StatusOr<std::vector<int32_t>> RenderPrompt(const ChatTemplate& chat, const std::vector<ChatMessage>& messages,
                                                  bool after_memory, size_t max_ids = SIZE_MAX);
// Token ids of a raw prompt. INVALID_ARGUMENT if it is empty.
absl::StatusOr<std::vector<int32_t>> EncodeRawPrompt(const Tokenizer& tokenizer, std::string_view prompt,
                                                     bool after_memory, size_t max_ids = SIZE_MAX);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_VALIDATION_H_
