#include "server/load/tokenizer_from_gguf.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr size_t kMaxTemplateBytes = 256 << 10;

absl::StatusOr<std::optional<int32_t>> SpecialId(const GgufFile& file, std::string_view key) {
  if (!file.Has(key)) return std::optional<int32_t>();
  STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t id, file.GetUnsigned(key));
  if (id == UINT32_MAX) return std::optional<int32_t>();  // some converters write -1 for "none"
  if (id > INT32_MAX) return absl::InvalidArgumentError(StrCat(key, " is ", id, ", outside any vocabulary"));
  return std::optional<int32_t>(static_cast<int32_t>(id));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromGguf(const GgufFile& file) {
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view model, file.GetString("tokenizer.ggml.model"));
  if (model != "gpt2") {
    return absl::UnimplementedError(StrCat("the model's tokenizer is of the kind '",
                                           absl::CHexEscape(ToAbsl(model.substr(0, 32))),
                                           "'; only byte-level BPE ('gpt2') is supported"));
  }
  TokenizerData data;
  // Files without the key come from converters that knew GPT-2's expression alone.
  std::string_view pre = "default";
  if (file.Has("tokenizer.ggml.pre")) {
    STILLHOUSE_ASSIGN_OR_RETURN(pre, file.GetString("tokenizer.ggml.pre"));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(data.pre, PreTokenizerFromName(pre));
  STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens, file.GetStrings("tokenizer.ggml.tokens"));
  data.tokens.assign(tokens.begin(), tokens.end());
  if (file.Has("tokenizer.ggml.token_type")) {
    STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<int64_t> types, file.GetIntegers("tokenizer.ggml.token_type"));
    data.types.reserve(types.size());
    for (size_t i = 0; i < types.size(); ++i) {
      if (types[i] < 1 || types[i] > 6) {
        return absl::InvalidArgumentError(StrCat("token ", i, " has the unknown type ", types[i]));
      }
      data.types.push_back(static_cast<TokenType>(types[i]));
    }
    if (types.empty() && !tokens.empty()) return absl::InvalidArgumentError("tokenizer.ggml.token_type is empty");
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<std::string_view> merges, file.GetStrings("tokenizer.ggml.merges"));
  data.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const size_t space = merges[i].find(' ');
    if (space == std::string_view::npos || merges[i].find(' ', space + 1) != std::string_view::npos) {
      return absl::InvalidArgumentError(StrCat("merge ", i, " is not two tokens with a space between them"));
    }
    data.merges.emplace_back(merges[i].substr(0, space), merges[i].substr(space + 1));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(data.bos, SpecialId(file, "tokenizer.ggml.bos_token_id"));
  STILLHOUSE_ASSIGN_OR_RETURN(data.eos, SpecialId(file, "tokenizer.ggml.eos_token_id"));
  STILLHOUSE_ASSIGN_OR_RETURN(data.pad, SpecialId(file, "tokenizer.ggml.padding_token_id"));
  if (file.Has("tokenizer.ggml.add_bos_token")) {
    STILLHOUSE_ASSIGN_OR_RETURN(data.add_bos, file.GetBool("tokenizer.ggml.add_bos_token"));
  } else {
    data.add_bos = data.pre == PreTokenizer::kLlamaBpe && data.bos.has_value();
  }
  return Tokenizer::Create(std::move(data));
}

absl::StatusOr<std::string> ChatTemplateFromGguf(const GgufFile& file) {
  if (!file.Has("tokenizer.chat_template")) return std::string();
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view text, file.GetString("tokenizer.chat_template"));
  if (text.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(
        StrCat("tokenizer.chat_template is ", text.size(), " bytes long; at most ", kMaxTemplateBytes));
  }
  return std::string(text);
}

}  // namespace stillhouse
