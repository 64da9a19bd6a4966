#include "server/token/normalize.h"

#include <gtest/gtest.h>
#include <utf8proc.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <string>

namespace stillhouse {
namespace {

std::string Nfc(const std::string& text) { return ToNfc(text).value_or(text); }

// The library's own whole-string function, which is right and slow on long runs of marks.
std::string Reference(const std::string& text) {
  utf8proc_uint8_t* out = nullptr;
  const auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), text.size(), &out,
                              static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string result(reinterpret_cast<char*>(out), n);
  std::free(out);
  return result;
}

TEST(NormalizeTest, ComposesAndLeavesTheRest) {
  EXPECT_EQ(Nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(Nfc("cafe\u0301 de\u0301ja\u0300"), "caf\u00e9 d\u00e9j\u00e0");
  EXPECT_EQ(Nfc("\u212b"), "\u00c5");                // a singleton
  EXPECT_EQ(Nfc("\u1112\u1161\u11ab"), "\ud55c");    // Hangul
  EXPECT_EQ(Nfc("\u0958"), "\u0915\u093c");          // a composition exclusion
  EXPECT_EQ(Nfc("q\u0307\u0323"), "q\u0323\u0307");  // canonical order
  EXPECT_EQ(ToNfc("plain"), std::nullopt);
  EXPECT_EQ(ToNfc("na\u00efve \u65e5\u672c\u8a9e"), std::nullopt);
  EXPECT_EQ(ToNfc(""), std::nullopt);
}

TEST(NormalizeTest, AgreesWithTheLibraryOnRandomText) {
  const std::string pieces[] = {"a",      "e",      " ",          "1",      "\u0301", "\u0323", "\u0307",
                                "\u00e9", "\u1112", "\u1161",     "\u11ab", "\ud55c", "\u212b", "\u0958",
                                "\u65e5", "\u0345", "\U0001d15e", "\u0f73", "\u0344", "\u00df"};
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    const int length = static_cast<int>(random() % 30);
    for (int i = 0; i < length; ++i) text += pieces[random() % std::size(pieces)];
    ASSERT_EQ(Nfc(text), Reference(text)) << text;
  }
}

TEST(NormalizeTest, CutsLongRunsWhereNothingComposes) {
  std::string text;
  for (int i = 0; i < 70000; ++i) text += "\u65e5";
  for (int i = 0; i < 70000; ++i) text += i % 2 == 0 ? "\u1112\u1161" : "\ud55c";
  EXPECT_EQ(Nfc(text), Reference(text));
}

TEST(NormalizeTest, LongRunsOfMarksStayFast) {
  std::string text = "a";
  for (int i = 0; i < 500000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  const auto begin = std::chrono::steady_clock::now();
  const std::string result = Nfc(text);
  // Quadratic ordering would take many minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(120));
  // All marks below come first: one of them composes with the letter.
  EXPECT_EQ(result.substr(0, 5), "\u1ea1\u0323");
  EXPECT_EQ(result.substr(result.size() - 2), "\u0301");
}

}  // namespace
}  // namespace stillhouse
