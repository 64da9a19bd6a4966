// Any bytes as text and as ids. The first byte chooses the pre-tokenizer and whether the vocabulary has every byte.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/logging.h"
#include "server/token/chat_template.h"
#include "server/token/stream_decoder.h"
#include "server/token/tokenizer.h"
#include "server/token/utf8.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

constexpr PreTokenizer kPres[] = {PreTokenizer::kGpt2, PreTokenizer::kSmolLm, PreTokenizer::kLlamaBpe,
                                  PreTokenizer::kQwen2};

std::unique_ptr<Tokenizer> Make(PreTokenizer pre, bool complete) {
  TokenizerData data = testing::TinyTokenizerData();
  data.pre = pre;
  if (!complete) {  // the bytes alone, but one
    data.merges.clear();
    data.tokens.resize(17 + 256);
    data.tokens.erase(data.tokens.begin() + 17 + 'e');
    data.types.resize(data.tokens.size());
  }
  auto tokenizer = Tokenizer::Create(std::move(data));
  STILLHOUSE_CHECK(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

void CheckText(const Tokenizer& tokenizer, std::string_view text, bool complete) {
  const std::vector<int32_t> ids = tokenizer.Encode(text);
  for (const int32_t id : ids) STILLHOUSE_CHECK(id >= 0 && id < tokenizer.vocab_size() && !tokenizer.IsControl(id));
  if (tokenizer.pre() != PreTokenizer::kQwen2) {  // Qwen normalises
    std::string expected(text);
    if (!complete) std::erase(expected, 'e');
    STILLHOUSE_CHECK(tokenizer.Decode(ids) == expected);
    STILLHOUSE_CHECK(!complete || tokenizer.Decode(tokenizer.Encode(text, /*parse_control=*/true)) == expected);
  }
}

void CheckStream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, const std::string& stop) {
  auto plain = StreamDecoder::Create(&tokenizer);
  STILLHOUSE_CHECK(plain.ok());
  std::string whole;
  for (const int32_t id : ids) whole += plain->Push(id);
  whole += plain->Finish();
  STILLHOUSE_CHECK(whole == ToValidUtf8(tokenizer.Decode(ids, /*skip_control=*/true)));
  auto stopping = StreamDecoder::Create(&tokenizer, {.stop = {stop}});
  if (!stopping.ok()) {
    STILLHOUSE_CHECK(stop.empty() || !IsValidUtf8(stop));
    return;
  }
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = stopping->Push(id);
    STILLHOUSE_CHECK(IsValidUtf8(piece));
    text += piece;
  }
  text += stopping->Finish();
  STILLHOUSE_CHECK(text == whole.substr(0, whole.find(stop)));
  STILLHOUSE_CHECK(stopping->stopped() == (whole.find(stop) != std::string::npos));
}

}  // namespace
}  // namespace stillhouse

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stillhouse;  // NOLINT
  static const auto* const tokenizers = [] {
    auto* all = new std::vector<std::unique_ptr<Tokenizer>>();
    for (const bool complete : {true, false}) {
      for (const PreTokenizer pre : kPres) all->push_back(Make(pre, complete));
    }
    return all;
  }();
  if (size == 0) return 0;
  const size_t which = data[0] % tokenizers->size();
  const Tokenizer& tokenizer = *(*tokenizers)[which];
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  CheckText(tokenizer, text, which < 4);

  // The first bytes are a stop string, each other one an id.
  const std::string stop(text.substr(0, std::min<size_t>(text.size(), data[0] >> 5)));
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c) + (data[0] & 8 ? 17 : 0));
  CheckStream(tokenizer, ids, stop);

  if (which < 4) {
    static const auto* const chat = ChatTemplate::Create((*tokenizers)[0].get(), "")->release();
    const auto turn = chat->EncodeTurn("user", text);
    STILLHOUSE_CHECK(turn.ok());
    STILLHOUSE_CHECK(
        std::count_if(turn->begin(), turn->end(), [&](int32_t id) { return (*tokenizers)[0]->IsControl(id); }) == 2);
  }
  return 0;
}
