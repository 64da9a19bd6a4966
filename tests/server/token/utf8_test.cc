#include "server/token/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace stillhouse {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

std::string Replacements(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += kReplacement;
  return text;
}

// A plain reading of table 3-7 of the Unicode Standard: decode, then check that the shortest encoding gives the same
// bytes.
bool IsOneCodePoint(const std::string& s) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  uint32_t c = 0;
  size_t length = 0;
  if (at(0) < 0x80) {
    c = at(0), length = 1;
  } else if ((at(0) & 0xE0) == 0xC0) {
    c = at(0) & 0x1F, length = 2;
  } else if ((at(0) & 0xF0) == 0xE0) {
    c = at(0) & 0x0F, length = 3;
  } else if ((at(0) & 0xF8) == 0xF0) {
    c = at(0) & 0x07, length = 4;
  } else {
    return false;
  }
  if (s.size() != length) return false;
  for (size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xC0) != 0x80) return false;
    c = c << 6 | (at(i) & 0x3F);
  }
  if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return false;
  const size_t shortest = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  return shortest == length;
}

TEST(Utf8Test, AgreesWithTheStandardOnEverySequenceOfUpToThreeBytesAndLeadsOfFour) {
  for (int a = 0; a < 256; ++a) {
    const std::string one(1, static_cast<char>(a));
    EXPECT_EQ(Utf8SequenceLength(one) == 1, IsOneCodePoint(one)) << a;
    for (int b = 0; b < 256; ++b) {
      const std::string two = one + static_cast<char>(b);
      ASSERT_EQ(Utf8SequenceLength(two) == 2, IsOneCodePoint(two)) << a << " " << b;
      for (const int c : {0x00, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF}) {
        const std::string three = two + static_cast<char>(c);
        ASSERT_EQ(Utf8SequenceLength(three) == 3, IsOneCodePoint(three)) << a << " " << b << " " << c;
        for (const int d : {0x00, 0x80, 0xBF, 0xC0}) {
          const std::string four = three + static_cast<char>(d);
          ASSERT_EQ(Utf8SequenceLength(four) == 4, IsOneCodePoint(four)) << a << " " << b << " " << c << " " << d;
        }
      }
    }
  }
}

TEST(Utf8Test, ReplacesMaximalIllFormedParts) {
  // The examples of the Unicode Standard, section 3.9, tables 3-8 to 3-11.
  EXPECT_EQ(ToValidUtf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), Replacements(8) + "A");
  EXPECT_EQ(ToValidUtf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), Replacements(8) + "A");
  EXPECT_EQ(ToValidUtf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), Replacements(5) + "A" + Replacements(2) + "B");
  EXPECT_EQ(ToValidUtf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), Replacements(4) + "A");
}

TEST(Utf8Test, HoldsBackOnlyWhatMayBecomeACodePoint) {
  std::string out, rest;
  AppendAsUtf8("a\xF0\x9F\x99", &out, &rest);
  EXPECT_EQ(out, "a");
  EXPECT_EQ(rest, "\xF0\x9F\x99");
  out.clear();
  AppendAsUtf8("a\xF0\x9F(", &out, &rest);
  EXPECT_EQ(out, std::string("a").append(Replacements(1)).append("("));
  EXPECT_EQ(rest, "");
  out.clear();
  AppendAsUtf8("\xC0", &out, &rest);  // never the beginning of anything
  EXPECT_EQ(out, Replacements(1));
  EXPECT_EQ(rest, "");
}

TEST(Utf8Test, FindsTheValidPrefix) {
  EXPECT_EQ(ValidUtf8Prefix(""), 0u);
  EXPECT_EQ(ValidUtf8Prefix("plain ascii text of some length"), 31u);
  EXPECT_EQ(ValidUtf8Prefix("plain ascii t\xFFxt"), 13u);
  EXPECT_EQ(ValidUtf8Prefix("12345678\xE2\x82"), 8u);
  EXPECT_TRUE(IsValidUtf8("na\xC3\xAFve \xF0\x9F\x99\x82"));
  EXPECT_FALSE(IsValidUtf8("\xED\xA0\x80"));
}

}  // namespace
}  // namespace stillhouse
