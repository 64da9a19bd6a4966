#include "server/service/validation.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"
#include "server/token/utf8.h"
#include "stillhouse/v1/inference.pb.h"

namespace stillhouse {
namespace {

enum class Low { kClosed, kOpen };

// !(a <= x): a NaN fails every comparison, so it is refused too.
absl::Status CheckRange(std::string_view field, double value, Low low_kind, double low, double high) {
  const bool above = low_kind == Low::kClosed ? low <= value : low < value;
  if (!(above && value <= high)) {
    return BadField(
        field, StrCat("is ", value, "; it must be in ", low_kind == Low::kClosed ? "[" : "(", low, ", ", high, "]"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BadField(std::string_view field, std::string_view problem) {
  return WithReason(absl::InvalidArgumentError(StrCat(field, " ", problem)), "INVALID_ARGUMENT",
                    {{"field", std::string(field)}});
}

absl::Status CheckRequestId(std::string_view request_id) {
  if (request_id.empty() || IsUuid(request_id)) return absl::OkStatus();
  return BadField("request_id", "is not a UUID, such as 123e4567-e89b-12d3-a456-426614174000");
}

absl::Status CheckTextField(std::string_view field, std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return absl::OkStatus();
  return BadField(field, StrCat("has ", text.size(), " bytes; at most ", max_bytes, " are allowed"));
}

absl::Status CheckSha256Field(std::string_view field, std::string_view hash) {
  if (IsSha256Hex(hash)) return absl::OkStatus();
  return BadField(field, "is not a SHA-256: send 64 lower-case hexadecimal digits");
}

absl::StatusOr<int> CheckPageSize(int32_t page_size) {
  if (page_size < 0) return BadField("page_size", "is negative");
  return page_size == 0 ? 50 : std::min(page_size, 1000);
}

absl::StatusOr<QuerySettings> ParseSampling(const v1::SamplingOptions& options, int64_t vocabulary) {
  QuerySettings out;
  SampleRow& row = out.row;
  if (options.has_temperature()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("temperature", options.temperature(), Low::kClosed, 0, 2));
    row.temperature = static_cast<float>(options.temperature());
  }
  if (options.has_top_p()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("top_p", options.top_p(), Low::kOpen, 0, 1));
    // A positive double may round to zero as a float.
    row.top_p = std::max(static_cast<float>(options.top_p()), 1e-9f);
  }
  if (options.has_top_k()) {
    if (options.top_k() < 1) {
      return BadField("top_k", StrCat("is ", options.top_k(), "; it must be at least 1 (leave it unset for all)"));
    }
    row.top_k = static_cast<int32_t>(std::min<int64_t>(options.top_k(), vocabulary));
  }
  if (options.has_min_p()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("min_p", options.min_p(), Low::kClosed, 0, 1));
    row.min_p = static_cast<float>(options.min_p());
  }
  if (options.has_presence_penalty()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("presence_penalty", options.presence_penalty(), Low::kClosed, -2, 2));
    row.presence_penalty = static_cast<float>(options.presence_penalty());
  }
  if (options.has_frequency_penalty()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("frequency_penalty", options.frequency_penalty(), Low::kClosed, -2, 2));
    row.frequency_penalty = static_cast<float>(options.frequency_penalty());
  }
  if (options.has_repetition_penalty()) {
    STILLHOUSE_RETURN_IF_ERROR(CheckRange("repetition_penalty", options.repetition_penalty(), Low::kOpen, 0, 2));
    row.repetition_penalty = std::max(static_cast<float>(options.repetition_penalty()), 1e-6f);
  }
  if (options.has_max_tokens()) {
    if (options.max_tokens() < 1) return BadField("max_tokens", StrCat("is ", options.max_tokens(), "; at least 1"));
    out.max_tokens = options.max_tokens();
  }
  if (options.has_logprobs()) {
    if (options.logprobs() < 0 || options.logprobs() > kMaxLogprobs) {
      return BadField("logprobs", StrCat("is ", options.logprobs(), "; it must be from 0 to ", kMaxLogprobs));
    }
    out.report_logprobs = true;
    out.top_logprobs = options.logprobs();
    row.logprobs = std::max(1, options.logprobs());  // the chosen token's own comes with the first
  }
  if (options.stop_size() > kMaxStopStrings) {
    return BadField("stop", StrCat("has ", options.stop_size(), " strings; at most ", kMaxStopStrings));
  }
  for (const std::string& stop : options.stop()) {
    if (stop.empty()) return BadField("stop", "holds an empty string; leave it out");
    if (stop.size() > kMaxStopBytes) {
      return BadField("stop", StrCat("holds a string of ", stop.size(), " bytes; at most ", kMaxStopBytes));
    }
    if (!IsValidUtf8(stop)) return BadField("stop", "holds a string that is not UTF-8");
    out.stop.push_back(stop);
  }
  if (options.has_seed()) {
    row.seed = options.seed();
  } else {
    const std::string bytes = RandomBytes(sizeof(row.seed));
    std::memcpy(&row.seed, bytes.data(), sizeof(row.seed));
  }
  out.ignore_eos = options.ignore_eos();
  return out;
}

absl::StatusOr<std::vector<ChatMessage>> ParseMessages(const v1::Messages& messages) {
  if (messages.messages_size() == 0) return BadField("messages", "is empty; send at least one user message");
  if (messages.messages_size() > kMaxMessages) {
    return BadField("messages", StrCat("has ", messages.messages_size(), " turns; at most ", kMaxMessages));
  }
  std::vector<ChatMessage> out;
  for (const v1::Message& message : messages.messages()) {
    const std::string& role = message.role();
    if (role != "system" && role != "user" && role != "assistant") {
      return BadField("messages.role", "must be system, user or assistant");
    }
    if (role == "system" && !out.empty()) return BadField("messages", "has a system message that is not the first");
    if (!IsValidUtf8(message.content())) return BadField("messages.content", "is not UTF-8");
    out.push_back({role, message.content()});
  }
  if (out.back().role != "user") return BadField("messages", "must end with a user message");
  return out;
}

absl::StatusOr<std::vector<int32_t>> RenderPrompt(const ChatTemplate& chat, const std::vector<ChatMessage>& messages,
                                                  bool after_memory, size_t max_ids) {
  if (!after_memory) return chat.Render(messages, true, max_ids);
  std::vector<int32_t> ids;
  const auto append = [&ids](const std::vector<int32_t>& more) { ids.insert(ids.end(), more.begin(), more.end()); };
  for (const ChatMessage& message : messages) {
    const size_t left = max_ids - std::min(max_ids, ids.size());
    if (message.role == "system") {
      append(chat.EncodeSystem(message.content, left));
      continue;
    }
    STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<int32_t> turn, chat.EncodeTurn(message.role, message.content, left));
    append(turn);
  }
  append(chat.GenerationPrompt());
  return ids;
}

absl::StatusOr<std::vector<int32_t>> EncodeRawPrompt(const Tokenizer& tokenizer, std::string_view prompt,
                                                     bool after_memory, size_t max_ids) {
  if (prompt.empty()) return BadField("prompt", "is empty; write at least one character");
  if (!IsValidUtf8(prompt)) return BadField("prompt", "is not UTF-8");
  std::vector<int32_t> ids = tokenizer.Encode(prompt, /*parse_control=*/false, max_ids);
  if (ids.empty()) return BadField("prompt", "has no tokens: the model's vocabulary lacks its bytes");
  if (!after_memory && tokenizer.add_bos() && tokenizer.bos()) ids.insert(ids.begin(), *tokenizer.bos());
  return ids;
}

}  // namespace stillhouse
