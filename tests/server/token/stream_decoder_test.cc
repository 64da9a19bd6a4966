#include "server/token/stream_decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/token/utf8.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

class StreamDecoderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto tokenizer = Tokenizer::Create(testing::TinyTokenizerData());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = std::move(*tokenizer);
  }
  StreamDecoder Decoder(std::vector<std::string> stop, bool skip_control = true) {
    auto decoder = StreamDecoder::Create(tokenizer_.get(), {.stop = std::move(stop), .skip_control = skip_control});
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    return *std::move(decoder);
  }
  // The tiny vocabulary has every byte as a token of its own.
  int32_t Byte(char c) { return tokenizer_->Encode(std::string(1, c))[0]; }
  std::vector<int32_t> Bytes(const std::string& text) {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(Byte(c));
    return ids;
  }
  // All pieces, each checked; the last one is Finish.
  static std::vector<std::string> Run(StreamDecoder& decoder, const std::vector<int32_t>& ids) {
    std::vector<std::string> pieces;
    for (const int32_t id : ids) pieces.push_back(decoder.Push(id));
    pieces.push_back(decoder.Finish());
    for (const std::string& piece : pieces) EXPECT_TRUE(IsValidUtf8(piece)) << piece;
    return pieces;
  }
  static std::string Join(const std::vector<std::string>& pieces) {
    std::string text;
    for (const std::string& piece : pieces) text += piece;
    return text;
  }

  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(StreamDecoderTest, AnEmojiAcrossTokensComesOutWhole) {
  StreamDecoder decoder = Decoder({});
  const auto pieces = Run(decoder, Bytes("a\U0001F642b"));
  EXPECT_EQ(pieces, (std::vector<std::string>{"a", "", "", "", "\U0001F642", "b", ""}));
  EXPECT_FALSE(decoder.stopped());
}

TEST_F(StreamDecoderTest, WhatCannotBecomeTextIsReplacedAtOnce) {
  StreamDecoder decoder = Decoder({});
  const auto pieces = Run(decoder, Bytes("\xF0\x9F!\xFFz\xE2\x82"));
  EXPECT_EQ(pieces, (std::vector<std::string>{"", "", "\uFFFD!", "\uFFFD", "z", "", "", "\uFFFD"}));
}

TEST_F(StreamDecoderTest, AStopStringAcrossTokensNeverLeaks) {
  StreamDecoder decoder = Decoder({"END"});
  const auto pieces = Run(decoder, Bytes("ab EN ENDxyz"));
  EXPECT_EQ(Join(pieces), "ab EN ");
  EXPECT_TRUE(decoder.stopped());
  EXPECT_EQ(decoder.stop_string(), "END");
  EXPECT_EQ(pieces[3], "");     // "E" is held back
  EXPECT_EQ(pieces[5], "EN ");  // and released when it was nothing
  EXPECT_EQ(decoder.Push(Byte('q')), "");
  EXPECT_EQ(decoder.Finish(), "");
}

TEST_F(StreamDecoderTest, AStopStringInsideOneToken) {
  const std::vector<int32_t> assistant = tokenizer_->Encode("assistant");
  ASSERT_EQ(assistant.size(), 1u);
  StreamDecoder decoder = Decoder({"sis"});
  EXPECT_EQ(decoder.Push(assistant[0]), "as");
  EXPECT_TRUE(decoder.stopped());
}

TEST_F(StreamDecoderTest, AtTheEndTheBeginningOfAStopStringIsText) {
  StreamDecoder decoder = Decoder({"END", "\U0001F642"});
  EXPECT_EQ(Join(Run(decoder, Bytes("the EN"))), "the EN");
  EXPECT_FALSE(decoder.stopped());
  StreamDecoder whole = Decoder({"END"});
  EXPECT_EQ(Join(Run(whole, Bytes("the END"))), "the ");
  EXPECT_TRUE(whole.stopped());
  StreamDecoder cut = Decoder({"\U0001F642"});
  EXPECT_EQ(Join(Run(cut, Bytes("x\xF0\x9F\x99"))), "x\uFFFD");
  EXPECT_FALSE(cut.stopped());
  // U+FFFD is text like any other; here only Finish makes it.
  StreamDecoder replaced = Decoder({"\uFFFD"});
  EXPECT_EQ(Join(Run(replaced, Bytes("x\xF0\x9F\x99"))), "x");
  EXPECT_TRUE(replaced.stopped());
}

TEST_F(StreamDecoderTest, TheFirstCompleteStopStringWinsThenTheLongest) {
  StreamDecoder first = Decoder({"abcd", "bc"});
  EXPECT_EQ(Join(Run(first, Bytes("xabcd"))), "xa");
  EXPECT_EQ(first.stop_string(), "bc");
  StreamDecoder longest = Decoder({"c", "abc", "bc"});
  EXPECT_EQ(Join(Run(longest, Bytes("xabc"))), "x");
  EXPECT_EQ(longest.stop_string(), "abc");
}

TEST_F(StreamDecoderTest, ControlTokensAddNoTextUnlessAsked) {
  StreamDecoder decoder = Decoder({});
  EXPECT_EQ(Join(Run(decoder, {1, Byte('a'), 2})), "a");
  StreamDecoder shown = Decoder({}, /*skip_control=*/false);
  EXPECT_EQ(Join(Run(shown, {1, Byte('a'), 2, -1, 1 << 20})), "<|im_start|>a<|im_end|>");
}

TEST_F(StreamDecoderTest, RefusesUnusableStopStrings) {
  EXPECT_EQ(StreamDecoder::Create(tokenizer_.get(), {.stop = {""}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StreamDecoder::Create(tokenizer_.get(), {.stop = {"ok", "\xFF"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// The same bytes, cut into tokens anyhow, give one answer: that of a plain reading of the whole.
TEST_F(StreamDecoderTest, TheAnswerDoesNotDependOnWhereTokensEnd) {
  TokenizerData data = testing::TinyTokenizerData();
  std::mt19937 random(5);
  // User-defined tokens with raw bytes of every kind, whole and torn.
  const std::string pieces[] = {"a",        "b",        "ab",   "aba",   "\xF0\x9F\x99\x82",
                                "\xF0\x9F", "\x99\x82", "\x82", "\xC3",  "\xA9",
                                "\xE2\x82", "\xAC",     "\xFF", "ba\xF0"};
  const auto base = static_cast<int32_t>(data.tokens.size());
  for (const std::string& piece : pieces) {
    data.tokens.push_back(piece);
    data.types.push_back(TokenType::kUserDefined);
  }
  const auto tokenizer = Tokenizer::Create(data);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::vector<std::string> stops[] = {
      {}, {"aba"}, {"abab", "ba"}, {"bb", "a\U0001F642b"}, {"\u00e9a", "\uFFFD\uFFFD"}};
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> ids;
    std::string bytes;
    for (int i = static_cast<int>(random() % 12); i >= 0; --i) {
      ids.push_back(base + static_cast<int32_t>(random() % std::size(pieces)));
      bytes += tokenizer.value()->TokenBytes(ids.back());
    }
    const std::vector<std::string>& stop = stops[random() % std::size(stops)];
    std::string expected = ToValidUtf8(bytes);
    bool stopped = false;
    for (size_t end = 1; end <= expected.size() && !stopped; ++end) {
      size_t longest = 0;
      for (const std::string& s : stop) {
        if (s.size() <= end && expected.compare(end - s.size(), s.size(), s) == 0)
          longest = std::max(longest, s.size());
      }
      if (longest > 0) {
        expected.resize(end - longest);
        stopped = true;
      }
    }
    auto decoder = StreamDecoder::Create(tokenizer->get(), {.stop = stop});
    ASSERT_TRUE(decoder.ok());
    ASSERT_EQ(Join(Run(*decoder, ids)), expected);
    ASSERT_EQ(decoder->stopped(), stopped);
  }
}

}  // namespace
}  // namespace stillhouse
