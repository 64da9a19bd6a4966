#include "server/token/chat_template.h"

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr std::string_view kLineEnd = "\n";
constexpr std::string_view kLlama3Gap = "\n\n";
// Llama-3.1's own defaults. The date is fixed: a prompt must not change from day to day under a stored memory.
constexpr std::string_view kLlama31Preamble = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";

bool IsKnownRole(std::string_view role) { return role == "system" || role == "user" || role == "assistant"; }

absl::Status UnknownRole(std::string_view role) {
  return absl::InvalidArgumentError(
      StrCat("unknown role '", absl::CHexEscape(ToAbsl(role.substr(0, 32))), "'; use system, user or assistant"));
}

// The literal system message that a ChatML template writes of its own accord, if it has one.
std::optional<std::string> LiteralSystemMessage(std::string_view source) {
  constexpr std::string_view kBegin = "<|im_start|>system";
  constexpr std::string_view kEnd = "<|im_end|>";
  for (size_t at = source.find(kBegin); at != std::string_view::npos; at = source.find(kBegin, at + 1)) {
    std::string_view rest = source.substr(at + kBegin.size());
    // A line end as itself, or as a string literal of the template spells it.
    if (rest.starts_with("\n")) {
      rest.remove_prefix(1);
    } else if (rest.starts_with("\\n")) {
      rest.remove_prefix(2);
    } else {
      continue;
    }
    const std::string_view message = rest.substr(0, rest.find(kEnd));
    if (message.size() == rest.size() || message.empty() || message.size() > 1024) continue;
    if (message.find_first_of("'\"{}\\") != std::string_view::npos) continue;  // a piece of program, not of text
    return std::string(message);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(const Tokenizer* tokenizer,
                                                                   std::string_view source) {
  auto chat = absl::WrapUnique(new ChatTemplate(tokenizer));
  const auto find = [&](std::string_view marker) { return tokenizer->FindControl(marker).value_or(-1); };
  const auto has = [&](std::string_view piece) { return source.find(piece) != std::string_view::npos; };
  const std::string beginning = absl::CHexEscape(ToAbsl(source.substr(0, 80)));

  if (has("<|start_header_id|>") && has("<|end_header_id|>") && has("<|eot_id|>")) {
    chat->format_ = ChatFormat::kLlama3;
    chat->name_ = has("Cutting Knowledge Date") ? "llama3.1" : "llama3";
    chat->header_begin_ = find("<|start_header_id|>");
    chat->header_end_ = find("<|end_header_id|>");
    chat->end_of_turn_ = find("<|eot_id|>");
    chat->add_bos_ = tokenizer->bos().has_value();
    if (chat->name_ == "llama3.1") {
      chat->system_preamble_ = kLlama31Preamble;
      chat->default_system_message_ = "";
    }
    if (chat->header_begin_ < 0 || chat->header_end_ < 0 || chat->end_of_turn_ < 0) {
      return absl::FailedPreconditionError(
          "the model's chat template is Llama-3's, but its vocabulary lacks <|start_header_id|>, <|end_header_id|> or "
          "<|eot_id|>");
    }
  } else {
    chat->header_begin_ = find("<|im_start|>");
    chat->end_of_turn_ = find("<|im_end|>");
    chat->add_bos_ = tokenizer->add_bos();
    if (chat->header_begin_ < 0 || chat->end_of_turn_ < 0 || has("<|im_sep|>")) {
      return absl::FailedPreconditionError(
          source.empty() ? std::string("the model has no chat template and no ChatML markers; send untemplated prompts")
                         : StrCat("the model's chat template is not known here and is not ChatML (it begins \"",
                                  beginning, "\"); send untemplated prompts"));
    }
    if (has("<|im_start|>")) chat->default_system_message_ = LiteralSystemMessage(source);
    if (has("enable_thinking")) {
      chat->name_ = "qwen3";
    } else if (has("named SmolLM")) {
      chat->name_ = "smollm2";
    } else if (has("created by Alibaba Cloud")) {
      chat->name_ = "qwen2.5";
    } else if (chat->default_system_message_.has_value() &&
               chat->default_system_message_->starts_with("You are a helpful assistant")) {
      chat->name_ = "qwen2";
    } else {
      chat->name_ = "chatml";
    }
  }

  Sha256 sha;
  sha.UpdateField("stillhouse chat template 1");
  sha.UpdateNumber(static_cast<int>(chat->format_));
  sha.UpdateNumber(chat->default_system_message_.has_value());
  sha.UpdateField(chat->default_system_message_.value_or(""));
  sha.UpdateField(chat->system_preamble_);
  sha.UpdateNumber(chat->add_bos_);
  sha.UpdateNumber(chat->header_begin_);
  sha.UpdateNumber(chat->header_end_);
  sha.UpdateNumber(chat->end_of_turn_);
  chat->fingerprint_ = sha.FinishHex();
  return chat;
}

// Role, line end and text are encoded as one piece, as the reference does: words may merge across the line end.
void ChatTemplate::AppendHeader(std::string_view role, std::string_view text, size_t max_ids,
                                std::vector<int32_t>* ids) const {
  const auto append = [&](std::string_view piece) {
    const size_t left = max_ids - std::min(max_ids, ids->size());
    const std::vector<int32_t> more = tokenizer_->Encode(piece, /*parse_control=*/false, left);
    ids->insert(ids->end(), more.begin(), more.end());
  };
  const std::string_view preamble = role == "system" ? std::string_view(system_preamble_) : std::string_view();
  ids->push_back(header_begin_);
  if (format_ == ChatFormat::kChatMl) {
    append(StrCat(role, kLineEnd, preamble, text));
  } else {
    append(role);
    ids->push_back(header_end_);
    append(StrCat(kLlama3Gap, preamble, text));
  }
}

void ChatTemplate::AppendEnd(std::vector<int32_t>* ids) const {
  ids->push_back(end_of_turn_);
  if (format_ == ChatFormat::kChatMl) {
    const std::vector<int32_t> line_end = tokenizer_->Encode(kLineEnd);
    ids->insert(ids->end(), line_end.begin(), line_end.end());
  }
}

void ChatTemplate::AppendTurn(std::string_view role, std::string_view text, size_t max_ids,
                              std::vector<int32_t>* ids) const {
  if (format_ == ChatFormat::kLlama3)
    text = ToStd(absl::StripAsciiWhitespace(ToAbsl(text)));  // its template trims every content
  AppendHeader(role, text, max_ids, ids);
  AppendEnd(ids);
}

absl::StatusOr<std::vector<int32_t>> ChatTemplate::Render(absl::Span<const ChatMessage> messages,
                                                          bool add_generation_prompt, size_t max_ids) const {
  if (messages.empty()) return absl::InvalidArgumentError("a conversation needs at least one message");
  std::vector<int32_t> ids = Opening();
  if (messages[0].role != "system" && default_system_message_.has_value()) {
    AppendTurn("system", *default_system_message_, max_ids, &ids);
  }
  for (const ChatMessage& message : messages) {
    if (!IsKnownRole(message.role)) return UnknownRole(message.role);
    AppendTurn(message.role, message.content, max_ids, &ids);
  }
  if (add_generation_prompt) AppendHeader("assistant", "", SIZE_MAX, &ids);
  return ids;
}

std::vector<int32_t> ChatTemplate::Opening() const {
  std::vector<int32_t> ids;
  if (add_bos_) ids.push_back(*tokenizer_->bos());
  return ids;
}

std::vector<int32_t> ChatTemplate::EncodeSystem(std::string_view text, size_t max_ids) const {
  std::vector<int32_t> ids;
  AppendTurn("system", text, max_ids, &ids);
  return ids;
}

absl::StatusOr<std::vector<int32_t>> ChatTemplate::EncodeTurn(std::string_view role, std::string_view text,
                                                              size_t max_ids) const {
  if (!IsKnownRole(role)) return UnknownRole(role);
  std::vector<int32_t> ids;
  AppendTurn(role, text, max_ids, &ids);
  return ids;
}

std::vector<int32_t> ChatTemplate::GenerationPrompt() const {
  std::vector<int32_t> ids;
  AppendHeader("assistant", "", SIZE_MAX, &ids);
  return ids;
}

std::vector<int32_t> ChatTemplate::SystemHeader() const {
  std::vector<int32_t> ids;
  AppendHeader("system", "", SIZE_MAX, &ids);
  return ids;
}

std::vector<int32_t> ChatTemplate::TurnEnd() const {
  std::vector<int32_t> ids;
  AppendEnd(&ids);
  return ids;
}

}  // namespace stillhouse
