#include "cache_store/strict_json.h"

#include <gtest/gtest.h>

#include <string>

namespace stillhouse {
namespace {

bool Refused(std::string_view text, const JsonLimits& limits = {}) {
  const absl::Status status = ParseStrictJson(text, limits).status();
  EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
  return !status.ok();
}

TEST(StrictJsonTest, ReadsOrdinaryJson) {
  absl::StatusOr<nlohmann::json> value =
      ParseStrictJson(R"( {"a": [1, -2, 3.5, true, null, "x\u00e9"], "b": {"a": {}}, "big": 18446744073709551615} )");
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ((*value)["a"].size(), 6u);
  EXPECT_EQ((*value)["a"][1].get<int>(), -2);
  EXPECT_EQ((*value)["a"][5].get<std::string>(), "x\xc3\xa9");
  EXPECT_EQ((*value)["big"].get<uint64_t>(), UINT64_MAX);
  EXPECT_TRUE((*value)["b"]["a"].is_object());
  EXPECT_EQ(ParseStrictJson("7").value().get<int>(), 7);
}

TEST(StrictJsonTest, RefusesDuplicateKeysAtEveryLevel) {
  EXPECT_TRUE(Refused(R"({"a":1,"a":1})"));
  EXPECT_TRUE(Refused(R"({"x":[{"a":1,"b":2,"a":3}]})"));
  EXPECT_TRUE(Refused(R"({"a":1,"\u0061":1})"));
  EXPECT_FALSE(Refused(R"({"a":{"a":1},"b":{"a":1}})"));
}

TEST(StrictJsonTest, RefusesBadText) {
  for (std::string_view text : {"",
                                " ",
                                "{",
                                "}",
                                "[1,]",
                                "{\"a\":1,}",
                                "{'a':1}",
                                "[1] 2",
                                "nul",
                                "NaN",
                                "Infinity",
                                "01",
                                "+1",
                                "1e999",
                                "\"\xff\"",
                                "\"\xc0\xaf\"",
                                "\"\\ud800\"",
                                "\"\n\"",
                                "// x\n1",
                                "\xEF\xBB\xBF{}"}) {
    EXPECT_TRUE(Refused(text)) << text;
  }
  EXPECT_TRUE(Refused(std::string_view("{}\0{", 4)));
  EXPECT_TRUE(Refused(std::string_view("[1\0]", 4)));
}

TEST(StrictJsonTest, Limits) {
  const std::string deep = std::string(32, '[') + std::string(32, ']');
  EXPECT_FALSE(Refused(deep));
  EXPECT_TRUE(Refused("[" + deep + "]"));
  EXPECT_TRUE(Refused(std::string(1000000, '[')));
  EXPECT_TRUE(Refused("12345", {.bytes = 4}));
  EXPECT_FALSE(Refused("[1,2]", {.values = 3}));
  EXPECT_TRUE(Refused("[1,2,3]", {.values = 3}));
}

}  // namespace
}  // namespace stillhouse
