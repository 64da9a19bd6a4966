#include "server/token/tokenizer.h"

#include <algorithm>
#include <array>
#include <functional>

#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/token/bpe.h"
#include "server/token/byte_alphabet.h"
#include "server/token/normalize.h"
#include "server/token/special_tokens.h"
#include "server/token/utf8.h"
#include "server/token/word_cache.h"
#include "server/token/word_splitter.h"

namespace stillhouse {
namespace {

// A text has at most so many times the bytes of its NFC: 3.5 times, where U+1FBE U+0308 U+0301 become U+0390.
constexpr size_t kMaxNfcShrinking = 4;

constexpr size_t kMaxTokens = 1 << 22;
constexpr size_t kMaxMerges = 1 << 22;
constexpr size_t kMaxTokenBytes = 1 << 16;

// Ends of an answer, whatever the file says they are.
constexpr std::string_view kEndMarkers[] = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>",
                                            "<|end_of_text|>"};
// Converters sometimes leave the structural markers of a template as plain or user-defined tokens; a message could then
// forge turns.
constexpr std::string_view kMarkers[] = {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>",
                                         "<|begin_of_text|>"};

bool IsMarker(std::string_view text) {
  const auto among = [&](const auto& list) {
    return std::find(std::begin(list), std::end(list), text) != std::end(list);
  };
  return among(kEndMarkers) || among(kMarkers);
}

// Nothing that a file says is printed as it is.
std::string Quoted(std::string_view text) {
  return StrCat("'", absl::CHexEscape(ToAbsl(text.substr(0, 64))), text.size() > 64 ? "…'" : "'");
}

// "<0xNN>" or nothing.
std::optional<uint8_t> ByteOfText(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return std::nullopt;
  uint32_t value = 0;
  if (!absl::SimpleHexAtoi(ToAbsl(text.substr(3, 2)), &value)) return std::nullopt;
  return static_cast<uint8_t>(value);
}

std::string FingerprintOf(const TokenizerData& data) {
  Sha256 sha;
  sha.UpdateField("stillhouse tokenizer 1");
  sha.UpdateField(PreTokenizerName(data.pre));
  sha.UpdateNumber(data.tokens.size());
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    sha.UpdateField(data.tokens[i]);
    sha.UpdateNumber(static_cast<int>(data.types[i]));
  }
  sha.UpdateNumber(data.merges.size());
  for (const auto& [left, right] : data.merges) {
    sha.UpdateField(left);
    sha.UpdateField(right);
  }
  for (const auto& id : {data.bos, data.eos, data.pad}) sha.UpdateNumber(id.value_or(-1));
  sha.UpdateNumber(data.add_bos);
  return sha.FinishHex();
}

absl::Status CheckData(const TokenizerData& data) {
  if (data.tokens.empty()) return absl::InvalidArgumentError("the vocabulary is empty");
  if (data.tokens.size() > kMaxTokens) {
    return absl::InvalidArgumentError(
        StrCat("the vocabulary has ", data.tokens.size(), " tokens; at most ", kMaxTokens));
  }
  if (data.merges.size() > kMaxMerges) {
    return absl::InvalidArgumentError(
        StrCat("the tokenizer has ", data.merges.size(), " merges; at most ", kMaxMerges));
  }
  if (!data.types.empty() && data.types.size() != data.tokens.size()) {
    return absl::InvalidArgumentError(
        StrCat("there are ", data.tokens.size(), " tokens but ", data.types.size(), " token types"));
  }
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    if (data.tokens[i].size() > kMaxTokenBytes) {
      return absl::InvalidArgumentError(StrCat("token ", i, " is longer than ", kMaxTokenBytes, " bytes"));
    }
  }
  for (size_t i = 0; i < data.types.size(); ++i) {
    const int type = static_cast<int>(data.types[i]);
    if (type < 1 || type > 6) return absl::InvalidArgumentError(StrCat("token ", i, " has the unknown type ", type));
  }
  const std::pair<std::string_view, std::optional<int32_t>> specials[] = {
      {"BOS", data.bos}, {"EOS", data.eos}, {"padding", data.pad}};
  for (const auto& [name, id] : specials) {
    if (id.has_value() && (*id < 0 || static_cast<size_t>(*id) >= data.tokens.size())) {
      return absl::InvalidArgumentError(
          StrCat("the ", name, " token ", *id, " is outside the vocabulary of ", data.tokens.size(), " tokens"));
    }
  }
  if (data.add_bos && !data.bos.has_value()) {
    return absl::InvalidArgumentError("the tokenizer adds a BOS token but names none");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizerFromName(std::string_view name) {
  if (name == "smollm") return PreTokenizer::kSmolLm;
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") return PreTokenizer::kLlamaBpe;
  if (name == "qwen2") return PreTokenizer::kQwen2;
  if (name == "gpt-2" || name == "default") return PreTokenizer::kGpt2;
  return absl::UnimplementedError(StrCat("the pre-tokenizer ", Quoted(name),
                                         " is not supported; use a model with smollm, llama-bpe, qwen2 or gpt-2"));
}

std::string_view PreTokenizerName(PreTokenizer pre) {
  switch (pre) {
    case PreTokenizer::kGpt2:
      return "gpt-2";
    case PreTokenizer::kSmolLm:
      return "smollm";
    case PreTokenizer::kLlamaBpe:
      return "llama-bpe";
    case PreTokenizer::kQwen2:
      return "qwen2";
  }
  return "";
}

struct Tokenizer::Impl {
  std::vector<std::string> bytes;  // what each id stands for
  std::vector<TokenType> types;
  absl::flat_hash_map<std::string, int32_t, StringHash, std::equal_to<>> control;  // by spelling
  absl::flat_hash_map<std::string_view, int32_t, StringHash>
      words;  // whole words that skip the merges; views into `bytes`
  std::unique_ptr<WordSplitter> splitter;
  std::unique_ptr<BpeMerges> merges;
  SpecialTokens user_defined;
  SpecialTokens user_defined_and_control;
  PreTokenizer pre = PreTokenizer::kGpt2;
  std::optional<int32_t> bos, eos, pad;
  bool add_bos = false;
  std::vector<int32_t> end_of_generation;
  std::string fingerprint;
  size_t max_bytes_per_id = 0;

  absl::Status Build(TokenizerData data);

  // One call of Encode.
  struct Run {
    Run(const Impl& impl, size_t text_size, size_t max_ids)
        : impl(impl), max_ids(max_ids), cursor(*impl.splitter), cache(text_size) {}
    bool full() const { return ids.size() > max_ids; }
    void Plain(std::string_view text);
    void Valid(std::string_view text);
    void Word(std::string_view word);

    const Impl& impl;
    const size_t max_ids;
    WordSplitter::Cursor cursor;
    WordCache cache;
    BpeMerges::Scratch scratch;
    std::vector<int32_t> ids;
  };
};

absl::Status Tokenizer::Impl::Build(TokenizerData data) {
  STILLHOUSE_RETURN_IF_ERROR(CheckData(data));
  if (data.types.empty()) data.types.assign(data.tokens.size(), TokenType::kNormal);
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    if (IsMarker(data.tokens[i])) data.types[i] = TokenType::kControl;
  }
  fingerprint = FingerprintOf(data);
  STILLHOUSE_ASSIGN_OR_RETURN(splitter, WordSplitter::Create(data.pre));
  pre = data.pre;
  bos = data.bos;
  eos = data.eos;
  pad = data.pad;
  add_bos = data.add_bos;
  types = std::move(data.types);

  // Of several ids with one spelling the first is used.
  absl::flat_hash_map<std::string_view, int32_t, StringHash>
      normal;  // spelling in the byte alphabet; views into data.tokens
  std::array<int32_t, 256> byte_ids;
  byte_ids.fill(-1);
  size_t longest = 0;
  bytes.reserve(data.tokens.size());
  for (size_t i = 0; i < data.tokens.size(); ++i) {
    const std::string& token = data.tokens[i];
    const auto id = static_cast<int32_t>(i);
    longest = std::max(longest, token.size());
    switch (types[i]) {
      case TokenType::kNormal:
        if (!token.empty()) normal.try_emplace(token, id);
        bytes.push_back(AlphabetToBytes(token).value_or(token));
        break;
      case TokenType::kByte: {
        const std::optional<uint8_t> byte = ByteOfText(token);
        if (!byte.has_value()) {
          return absl::InvalidArgumentError(
              StrCat("the byte token ", i, " is spelled ", Quoted(token), ", not <0xNN>"));
        }
        bytes.push_back(std::string(1, static_cast<char>(*byte)));
        if (byte_ids[*byte] < 0) byte_ids[*byte] = id;
        break;
      }
      case TokenType::kUserDefined:
        bytes.push_back(token);
        user_defined.Add(token, id);
        user_defined_and_control.Add(token, id);
        break;
      case TokenType::kControl:
      case TokenType::kUnknown:
        bytes.push_back(token);
        if (!token.empty()) control.try_emplace(token, id);
        user_defined_and_control.Add(token, id);
        break;
      case TokenType::kUnused:
        bytes.push_back(token);
        break;
    }
  }
  for (int b = 0; b < 256; ++b) {
    const auto it = normal.find(ByteToAlphabet(static_cast<uint8_t>(b)));
    if (it != normal.end()) byte_ids[b] = it->second;
  }
  if (std::find(byte_ids.begin(), byte_ids.end(), -1) == byte_ids.end()) {
    for (const std::string& of_id : bytes) max_bytes_per_id = std::max(max_bytes_per_id, of_id.size());
    if (pre == PreTokenizer::kQwen2) max_bytes_per_id *= kMaxNfcShrinking;
  }

  merges = std::make_unique<BpeMerges>(byte_ids, data.merges.size(), longest);
  absl::flat_hash_map<std::string_view, int32_t, StringHash> all;
  for (size_t i = 0; i < data.tokens.size(); ++i) all.try_emplace(data.tokens[i], static_cast<int32_t>(i));
  for (size_t rank = 0; rank < data.merges.size(); ++rank) {
    const auto& [left, right] = data.merges[rank];
    const std::string joined = StrCat(left, right);
    int32_t ids[3];
    bool usable = true;
    const std::string_view spellings[] = {left, right, joined};
    for (int k = 0; k < 3; ++k) {
      const auto it = normal.find(spellings[k]);
      if (it != normal.end()) {
        ids[k] = it->second;
        continue;
      }
      if (!all.contains(spellings[k])) {
        return absl::InvalidArgumentError(
            StrCat("merge ", rank, " needs ", Quoted(spellings[k]), ", which is not in the vocabulary"));
      }
      usable = false;  // no text merges into a control token
    }
    if (usable) merges->Add(ids[0], ids[1], static_cast<uint32_t>(rank), ids[2]);
  }
  if (pre == PreTokenizer::kLlamaBpe) {
    for (const auto& [spelling, id] : normal) words.try_emplace(bytes[id], id);
  }

  if (eos.has_value()) end_of_generation.push_back(*eos);
  for (const std::string_view marker : kEndMarkers) {
    const auto it = control.find(marker);
    if (it != control.end()) end_of_generation.push_back(it->second);
  }
  std::sort(end_of_generation.begin(), end_of_generation.end());
  end_of_generation.erase(std::unique(end_of_generation.begin(), end_of_generation.end()), end_of_generation.end());
  return absl::OkStatus();
}

void Tokenizer::Impl::Run::Word(std::string_view word) {
  if (cache.Append(word, &ids)) return;
  const size_t begin = ids.size();
  if (const auto it = impl.words.find(word); it != impl.words.end()) {
    ids.push_back(it->second);
  } else {
    impl.merges->Encode(word, &scratch, &ids);
  }
  cache.Put(word, begin, ids.size() - begin);
}

void Tokenizer::Impl::Run::Valid(std::string_view text) {
  std::optional<std::string> normalized;
  if (impl.pre == PreTokenizer::kQwen2) normalized = ToNfc(text);
  if (normalized.has_value()) {
    text = *normalized;
    cache.Forget();  // it holds views of the words
  }
  cursor.Reset(text);
  for (std::string_view word = cursor.Next(); !word.empty() && !full(); word = cursor.Next()) Word(word);
  if (normalized.has_value()) cache.Forget();
}

void Tokenizer::Impl::Run::Plain(std::string_view text) {
  while (!text.empty()) {
    const size_t valid = ValidUtf8Prefix(text);
    if (valid > 0) Valid(text.substr(0, valid));
    if (full()) return;
    text.remove_prefix(valid);
    size_t bad = 0;
    while (bad < text.size() && Utf8SequenceLength(text.substr(bad, 4)) == 0) ++bad;
    if (bad > 0) Word(text.substr(0, bad));
    if (full()) return;
    text.remove_prefix(bad);
  }
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Create(TokenizerData data) {
  auto impl = std::make_unique<Impl>();
  STILLHOUSE_RETURN_IF_ERROR(impl->Build(std::move(data)));
  return absl::WrapUnique(new Tokenizer(std::move(impl)));
}

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

std::vector<int32_t> Tokenizer::Encode(std::string_view text, bool parse_control, size_t max_ids) const {
  Impl::Run run(*impl_, text.size(), max_ids);
  const SpecialTokens& special = parse_control ? impl_->user_defined_and_control : impl_->user_defined;
  while (!text.empty() && !run.full()) {
    const SpecialTokens::Match match = special.FindFirst(text);
    run.Plain(text.substr(0, match.begin));
    if (match.id < 0 || run.full()) break;
    run.ids.push_back(match.id);
    text.remove_prefix(match.begin + match.size);
  }
  return std::move(run.ids);
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, bool skip_control) const {
  std::string text;
  for (const int32_t id : ids) {
    if (skip_control && IsControl(id)) continue;
    text += TokenBytes(id);
  }
  return text;
}

size_t Tokenizer::max_bytes_per_id() const { return impl_->max_bytes_per_id; }

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return impl_->bytes[id];
}

bool Tokenizer::IsControl(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return false;
  return impl_->types[id] == TokenType::kControl || impl_->types[id] == TokenType::kUnknown;
}

std::optional<int32_t> Tokenizer::FindControl(std::string_view text) const {
  const auto it = impl_->control.find(text);
  if (it == impl_->control.end()) return std::nullopt;
  return it->second;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->bytes.size()); }
std::optional<int32_t> Tokenizer::bos() const { return impl_->bos; }
std::optional<int32_t> Tokenizer::eos() const { return impl_->eos; }
std::optional<int32_t> Tokenizer::pad() const { return impl_->pad; }
bool Tokenizer::add_bos() const { return impl_->add_bos; }
const std::vector<int32_t>& Tokenizer::end_of_generation() const { return impl_->end_of_generation; }
PreTokenizer Tokenizer::pre() const { return impl_->pre; }
const std::string& Tokenizer::Fingerprint() const { return impl_->fingerprint; }

bool Tokenizer::IsEndOfGeneration(int32_t id) const {
  const auto& ends = impl_->end_of_generation;
  return std::binary_search(ends.begin(), ends.end(), id);
}

}  // namespace stillhouse
