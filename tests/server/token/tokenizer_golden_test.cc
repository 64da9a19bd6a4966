// Ids of the default model's tokenizer against those of Hugging Face `tokenizers` (tests/golden/).

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/base/sha256.h"
#include "server/load/gguf.h"
#include "server/load/tokenizer_from_gguf.h"
#include "server/token/chat_template.h"
#include "server/token/stream_decoder.h"
#include "server/token/tokenizer.h"
#include "server/token/utf8.h"
#include "tests/support/default_model.h"

namespace stillhouse {
namespace {

using nlohmann::json;
using testing::DefaultModelPath;
using testing::ReadFileOrFail;
using testing::SourcePath;

class GoldenTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const auto file = GgufFile::Open(DefaultModelPath());
    ASSERT_TRUE(file.ok()) << file.status();
    auto tokenizer = TokenizerFromGguf(**file);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = tokenizer->release();
    auto source = ChatTemplateFromGguf(**file);
    ASSERT_TRUE(source.ok()) << source.status();
    template_source_ = new std::string(*source);
  }
  static void TearDownTestSuite() {
    delete tokenizer_;
    delete template_source_;
    tokenizer_ = nullptr;
    template_source_ = nullptr;
  }
  void SetUp() override { ASSERT_NE(tokenizer_, nullptr); }

  static json Golden(const std::string& name) {
    return json::parse(ReadFileOrFail(SourcePath("tests/golden/" + name)));
  }
  static std::string IdsSha256(const std::vector<int32_t>& ids) {
    Sha256 sha;
    sha.Update(std::string_view(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)));
    return sha.FinishHex();
  }

  static Tokenizer* tokenizer_;
  static std::string* template_source_;
};

Tokenizer* GoldenTest::tokenizer_ = nullptr;
std::string* GoldenTest::template_source_ = nullptr;

TEST_F(GoldenTest, ReadsTheSpecialTokens) {
  EXPECT_EQ(tokenizer_->vocab_size(), 49152);
  EXPECT_EQ(tokenizer_->bos(), 1);
  EXPECT_EQ(tokenizer_->eos(), 2);
  EXPECT_EQ(tokenizer_->pad(), 2);
  EXPECT_FALSE(tokenizer_->add_bos());
  EXPECT_EQ(tokenizer_->end_of_generation(), (std::vector<int32_t>{0, 2}));
  for (int id = 0; id < 17; ++id) EXPECT_TRUE(tokenizer_->IsControl(id)) << id;
  EXPECT_FALSE(tokenizer_->IsControl(17));
  EXPECT_EQ(tokenizer_->Fingerprint().size(), 64u);
}

TEST_F(GoldenTest, EncodesAndDecodesEveryText) {
  const json golden = Golden("tokens.json");
  ASSERT_GE(golden["tokens"].size(), 40u);
  for (const json& entry : golden["tokens"]) {
    const auto text = entry["text"].get<std::string>();
    const auto ids = entry["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_->Encode(text, /*parse_control=*/true), ids) << text;
    // The reference shows bytes that are no text as U+FFFD.
    const auto decoded = entry["decoded"].get<std::string>();
    EXPECT_EQ(ToValidUtf8(tokenizer_->Decode(ids)), decoded) << text;
    auto stream = StreamDecoder::Create(tokenizer_, {.skip_control = false});
    ASSERT_TRUE(stream.ok());
    std::string streamed;
    for (const int32_t id : ids) streamed += stream->Push(id);
    streamed += stream->Finish();
    EXPECT_EQ(streamed, decoded) << text;
  }
}

TEST_F(GoldenTest, EncodesTheLicence) {
  const std::string text = ReadFileOrFail(SourcePath("LICENSE"));
  const json golden = Golden("model.json");
  json expected;
  for (const json& entry : golden["nll"]) {
    if (entry.contains("sha256")) expected = entry;
  }
  ASSERT_TRUE(expected.is_object());
  Sha256 sha;
  sha.Update(text);
  ASSERT_EQ(sha.FinishHex(), expected["sha256"].get<std::string>())
      << "LICENSE is not the file that the golden numbers were made from";
  const std::vector<int32_t> ids = tokenizer_->Encode(text);
  EXPECT_EQ(ids.size(), 2215u);
  EXPECT_EQ(std::vector<int32_t>(ids.begin(), ids.begin() + 8), expected["first_ids"].get<std::vector<int32_t>>());
  EXPECT_EQ(tokenizer_->Decode(ids), text);
}

TEST_F(GoldenTest, RendersEveryConversation) {
  const auto chat = ChatTemplate::Create(tokenizer_, *template_source_);
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_EQ((*chat)->name(), "smollm2");
  const json golden = Golden("model.json");
  ASSERT_EQ(golden["greedy"].size(), 6u);
  for (const json& entry : golden["greedy"]) {
    std::vector<ChatMessage> messages;
    for (const json& message : entry["messages"]) messages.push_back({message["role"], message["content"]});
    const auto ids = (*chat)->Render(messages, /*add_generation_prompt=*/true);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, entry["prompt_ids"].get<std::vector<int32_t>>());
    EXPECT_EQ(tokenizer_->Decode(*ids), entry["prompt"].get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(entry["ids"].get<std::vector<int32_t>>(), /*skip_control=*/true),
              entry["text"].get<std::string>());
  }
}

// The articles are not part of this repository: STILLHOUSE_SQUAD names a SQuAD-format file that has them.
TEST_F(GoldenTest, EncodesEveryArticle) {
  const char* path = std::getenv("STILLHOUSE_SQUAD");
  if (path == nullptr || *path == '\0') GTEST_SKIP() << "set STILLHOUSE_SQUAD to the path of XQuAD's xquad.en.json";
  const json squad = json::parse(ReadFileOrFail(path));
  const json golden = Golden("tokens.json");
  size_t checked = 0;
  for (const json& document : golden["documents"]) {
    for (const json& article : squad["data"]) {
      if (article["title"] != document["article"]) continue;
      std::string text;
      for (const json& paragraph : article["paragraphs"]) {
        if (!text.empty()) text += "\n\n";
        text += paragraph["context"].get<std::string>();
      }
      const std::vector<int32_t> ids = tokenizer_->Encode(text);
      EXPECT_EQ(ids.size(), document["tokens"].get<size_t>()) << document["article"];
      EXPECT_EQ(IdsSha256(ids), document["sha256_of_int32_le_ids"].get<std::string>()) << document["article"];
      ++checked;
    }
  }
  EXPECT_EQ(checked, golden["documents"].size());
}

}  // namespace
}  // namespace stillhouse
