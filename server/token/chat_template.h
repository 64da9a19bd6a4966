#ifndef STILLHOUSE_SERVER_TOKEN_CHAT_TEMPLATE_H_
#define STILLHOUSE_SERVER_TOKEN_CHAT_TEMPLATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

enum class ChatFormat {
  kChatMl,  // <|im_start|>role\n…<|im_end|>\n
  kLlama3,  // <|start_header_id|>role<|end_header_id|>\n\n…<|eot_id|>
};

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

// Renders conversations straight to token ids. Template text inside a model file is a program from a stranger: it is
// compared with the families known here and never run. Markers are control tokens; roles and contents are data, so that
// a message which spells
// "<|im_end|>" cannot end its turn.
//
// A rendering is the concatenation of its pieces: Opening, EncodeSystem, one EncodeTurn per message, GenerationPrompt.
// A memory holds Opening + SystemHeader + corpus + TurnEnd, and a query goes on with EncodeTurn("user", …) +
// GenerationPrompt.
//
// Immutable: any number of threads may call any method. The tokenizer must outlive it.
class ChatTemplate {
 public:
  // `source` is the model's template text, possibly empty. A text of no known family is served as ChatML where the
  // vocabulary has the markers of ChatML as control tokens; otherwise FAILED_PRECONDITION, with the beginning of the
  // text.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Create(const Tokenizer* tokenizer, std::string_view source);

  // The whole prompt. The first message may be a system one; without it the default system message is rendered, if the
  // model has one. INVALID_ARGUMENT for no messages or an unknown role. Of more than `max_ids` it gives more than
  // that, but not all.
  absl::StatusOr<std::vector<int32_t>> Render(absl::Span<const ChatMessage> messages, bool add_generation_prompt,
                                              size_t max_ids = SIZE_MAX) const;

  // What a conversation begins with, before any turn: BOS or nothing.
  std::vector<int32_t> Opening() const;
  // A whole system turn, without Opening.
  std::vector<int32_t> EncodeSystem(std::string_view text, size_t max_ids = SIZE_MAX) const;
  // A whole turn. INVALID_ARGUMENT for an unknown role.
  absl::StatusOr<std::vector<int32_t>> EncodeTurn(std::string_view role, std::string_view text,
                                                  size_t max_ids = SIZE_MAX) const;
  // The assistant's header, after which the model speaks.
  std::vector<int32_t> GenerationPrompt() const;

  // Pieces of a system turn around ids that the caller already has (a window of a corpus): EncodeSystem(text) is
  // SystemHeader + ids of the text + TurnEnd, except that words may merge across the header's line end where the text
  // begins with white space.
  std::vector<int32_t> SystemHeader() const;
  std::vector<int32_t> TurnEnd() const;
  // The control token that ends a turn; also one of the tokenizer's end_of_generation.
  int32_t end_of_turn() const { return end_of_turn_; }

  // The system message of a conversation that gives none; no value if the model has none.
  const std::optional<std::string>& default_system_message() const { return default_system_message_; }

  ChatFormat format() const { return format_; }
  // "smollm2", "qwen2", "qwen2.5", "qwen3", "chatml" or "llama3", "llama3.1".
  const std::string& name() const { return name_; }

  // SHA-256 (lower-case hex) of everything that decides a rendering, the tokenizer's fingerprint excepted.
  const std::string& Fingerprint() const { return fingerprint_; }

 private:
  explicit ChatTemplate(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}
  void AppendTurn(std::string_view role, std::string_view text, size_t max_ids, std::vector<int32_t>* ids) const;
  void AppendHeader(std::string_view role, std::string_view after, size_t max_ids, std::vector<int32_t>* ids) const;
  void AppendEnd(std::vector<int32_t>* ids) const;

  const Tokenizer* tokenizer_;
  ChatFormat format_ = ChatFormat::kChatMl;
  std::string name_;
  std::optional<std::string> default_system_message_;
  std::string system_preamble_;  // written before every system message (Llama-3.1's dates)
  bool add_bos_ = false;
  int32_t header_begin_ = -1;  // <|im_start|> or <|start_header_id|>
  int32_t header_end_ = -1;    // Llama-3 only
  int32_t end_of_turn_ = -1;   // <|im_end|> or <|eot_id|>
  std::string fingerprint_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_CHAT_TEMPLATE_H_
