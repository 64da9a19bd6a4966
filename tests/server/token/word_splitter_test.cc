// Splits worked out by hand from the published expressions.

#include "server/token/word_splitter.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stillhouse {
namespace {

using Words = std::vector<std::string>;

Words Split(PreTokenizer pre, const std::string& text) {
  const auto splitter = WordSplitter::Create(pre);
  EXPECT_TRUE(splitter.ok()) << splitter.status();
  Words words;
  for (const std::string_view word : (*splitter)->Split(text)) words.emplace_back(word);
  return words;
}

TEST(WordSplitterTest, Gpt2) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kGpt2, text); };
  EXPECT_EQ(split(""), Words{});
  EXPECT_EQ(split("Hello world! 123"), (Words{"Hello", " world", "!", " 123"}));
  EXPECT_EQ(split("it's WE'LL we'll"), (Words{"it", "'s", " WE", "'", "LL", " we", "'ll"}));
  EXPECT_EQ(split("a   b"), (Words{"a", "  ", " b"}));
  EXPECT_EQ(split("a  1"), (Words{"a", " ", " 1"}));
  EXPECT_EQ(split("end  "), (Words{"end", "  "}));
  EXPECT_EQ(split("a\n\n b"), (Words{"a", "\n\n", " b"}));
  EXPECT_EQ(split("x1234y"), (Words{"x", "1234", "y"}));
  EXPECT_EQ(split("\u00bd\u2167z"), (Words{"\u00bd\u2167", "z"}));  // other numbers and letter numbers are \p{N}
  EXPECT_EQ(split("a\u0301b"), (Words{"a", "\u0301", "b"}));        // a mark is neither letter, number nor space
}

TEST(WordSplitterTest, SmolLmCutsAtEveryDigit) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kSmolLm, text); };
  EXPECT_EQ(split("Hello world! 123"), (Words{"Hello", " world", "!", " ", "1", "2", "3"}));
  // A digit ends the piece, so that all the space before it is at an end: it stays together.
  EXPECT_EQ(split("a   1"), (Words{"a", "   ", "1"}));
  EXPECT_EQ(split("a   b1"), (Words{"a", "  ", " b", "1"}));
  EXPECT_EQ(split("3's"), (Words{"3", "'s"}));
  EXPECT_EQ(split("\u00bd\u0664"), (Words{"\u00bd", "\u0664"}));
}

TEST(WordSplitterTest, LlamaTakesDigitsByThrees) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kLlamaBpe, text); };
  EXPECT_EQ(split("Hello world! 1234567"), (Words{"Hello", " world", "!", " ", "123", "456", "7"}));
  EXPECT_EQ(split("it's WE'LL"), (Words{"it", "'s", " WE", "'LL"}));
  EXPECT_EQ(split("(word"), (Words{"(word"}));  // one other character may lead a word
  EXPECT_EQ(split("((word"), (Words{"((", "word"}));
  EXPECT_EQ(split("\tword"), (Words{"\tword"}));
  EXPECT_EQ(split("a...\n\nb"), (Words{"a", "...\n\n", "b"}));
  EXPECT_EQ(split("a  \n\n  b"), (Words{"a", "  \n\n", " ", " b"}));
  EXPECT_EQ(split("a\r\nb"), (Words{"a", "\r\n", "b"}));
  EXPECT_EQ(split("x   "), (Words{"x", "   "}));
}

TEST(WordSplitterTest, QwenTakesDigitsOneByOne) {
  const auto split = [](const std::string& text) { return Split(PreTokenizer::kQwen2, text); };
  EXPECT_EQ(split("Hello 1234"), (Words{"Hello", " ", "1", "2", "3", "4"}));
  EXPECT_EQ(split("It'S (a)\n"), (Words{"It", "'S", " (", "a", ")\n"}));
  EXPECT_EQ(split("\u65e5\u672c\u8a9e\u3002ok"), (Words{"\u65e5\u672c\u8a9e", "\u3002ok"}));
}

TEST(WordSplitterTest, WhiteSpaceIsThatOfUnicode) {
  for (const PreTokenizer pre : {PreTokenizer::kGpt2, PreTokenizer::kSmolLm}) {
    EXPECT_EQ(Split(pre, "a\u0085\u3000"), (Words{"a", "\u0085\u3000"}));
    EXPECT_EQ(Split(pre, "a\u180e!"), (Words{"a", "\u180e!"}));  // a format character since Unicode 6.3
    EXPECT_EQ(Split(pre, "a\u200b!"), (Words{"a", "\u200b!"}));
  }
}

TEST(WordSplitterTest, WordsPutTogetherAreTheText) {
  const std::string text = "One  two\t\tthree\n\n4 56 789\u00a0\u2003 '\u017f \u0301\U0001f642 \r\n \x01\x7f end   ";
  for (const PreTokenizer pre :
       {PreTokenizer::kGpt2, PreTokenizer::kSmolLm, PreTokenizer::kLlamaBpe, PreTokenizer::kQwen2}) {
    std::string joined;
    for (const std::string& word : Split(pre, text)) {
      EXPECT_FALSE(word.empty());
      joined += word;
    }
    EXPECT_EQ(joined, text);
  }
}

TEST(WordSplitterTest, LongRunsAreOneWordInLinearTime) {
  const size_t n = 4 << 20;
  for (const PreTokenizer pre :
       {PreTokenizer::kGpt2, PreTokenizer::kSmolLm, PreTokenizer::kLlamaBpe, PreTokenizer::kQwen2}) {
    for (const char c : {'a', ' ', '!', '\n'}) {
      const Words words = Split(pre, std::string(n, c));
      ASSERT_EQ(words.size(), 1u) << PreTokenizerName(pre) << " " << c;
    }
    EXPECT_EQ(Split(pre, std::string(n, ' ') + "x").size(), 2u);
  }
}

TEST(WordSplitterTest, UnknownNamesAreRefused) {
  const auto pre = PreTokenizerFromName("tekken");
  EXPECT_EQ(pre.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(std::string(pre.status().message()).find("tekken"), std::string::npos);
  for (const char* name : {"smollm", "llama-bpe", "qwen2", "gpt-2"}) {
    ASSERT_TRUE(PreTokenizerFromName(name).ok());
    EXPECT_EQ(PreTokenizerName(*PreTokenizerFromName(name)), name);
  }
  EXPECT_EQ(*PreTokenizerFromName("default"), PreTokenizer::kGpt2);
}

}  // namespace
}  // namespace stillhouse
