#include "cache_store/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace stillhouse {
namespace {

std::string Length(uint64_t n) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(n >> (8 * i)));
  return bytes;
}
std::string File(const std::string& json, size_t data) { return Length(json.size()) + json + std::string(data, 'd'); }

// Refused, with DATA_LOSS and a message that has `words`.
void ExpectRefused(const std::string& file, const std::string& words) {
  absl::StatusOr<SafetensorsIndex> index = ParseSafetensors(file);
  ASSERT_FALSE(index.ok()) << words;
  EXPECT_TRUE(absl::IsDataLoss(index.status())) << index.status();
  EXPECT_THAT(std::string(index.status().message()), testing::HasSubstr(words));
}
void ExpectRefused(const std::string& json, size_t data, const std::string& words) {
  ExpectRefused(File(json, data), words);
}

TEST(SafetensorsTest, ReadsAFileWrittenByHand) {
  // Keys out of data order, padding, a scalar, an empty tensor, metadata: all allowed.
  const std::string json =
      R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},"__metadata__":{"format":"pt","x":"é"},)"
      R"("a":{"data_offsets":[0,2],"shape":[],"dtype":"BF16"},"e":{"dtype":"I64","shape":[0,7],"data_offsets":[10,10]}}   )";
  absl::StatusOr<SafetensorsIndex> index = ParseSafetensors(File(json, 10));
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->data_begin, 8 + json.size());
  ASSERT_EQ(index->entries.size(), 3u);
  EXPECT_EQ(index->entries[0].name, "a");
  EXPECT_EQ(index->entries[1].name, "b");
  EXPECT_EQ(index->entries[1].shape, (std::vector<uint64_t>{2, 1}));
  EXPECT_EQ(index->entries[2].name, "e");
  EXPECT_EQ(index->metadata.at("x"), "é");
  ASSERT_NE(index->Find("b"), nullptr);
  EXPECT_EQ(index->Find("b")->end, 10u);
  EXPECT_EQ(index->Find("c"), nullptr);
  EXPECT_TRUE(ParseSafetensors(File("{}", 0)).ok());
}

TEST(SafetensorsTest, RefusesBadFrames) {
  ExpectRefused("", "shorter");
  ExpectRefused("1234567", "shorter");
  ExpectRefused(Length(0), "empty");
  ExpectRefused(Length(3) + "{}", "longer than the file");
  ExpectRefused(Length(UINT64_MAX) + "{}", "over the limit");
  ExpectRefused(Length(kMaxSafetensorsHeader + 1) + "{}", "over the limit");
  ExpectRefused(Length(kMaxSafetensorsHeader) + "{}", "longer than the file");
}

TEST(SafetensorsTest, RefusesBadJson) {
  ExpectRefused(" {}", 0, "does not start");
  ExpectRefused("[]", 0, "does not start");
  ExpectRefused("{\"a", 0, "does not end");
  ExpectRefused("{}\n", 0, "does not end");
  ExpectRefused("{}x}", 0, "bad JSON");
  ExpectRefused("{}{}", 0, "bad JSON");
  ExpectRefused(std::string("{}\0}", 4), 0, "NUL");
  ExpectRefused("{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "UTF-8");
  ExpectRefused("{" + std::string(100000, '[') + "}", 0, "bad JSON");
  ExpectRefused("{\"a\":" + std::string(100000, '[') + "}", 0, "array where none belongs");
}

TEST(SafetensorsTest, RefusesDuplicatesAndUnknownFields) {
  ExpectRefused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2,
      "duplicate key");
  ExpectRefused(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "duplicate key");
  ExpectRefused(R"({"__metadata__":{"x":"1","x":"2"}})", 0, "duplicate metadata key");
  ExpectRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, "duplicate key");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}})", 1, "unknown field");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1]}})", 1, "lacks");
  ExpectRefused(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, "empty key");
}

TEST(SafetensorsTest, RefusesWrongTypes) {
  ExpectRefused(R"({"__metadata__":{"x":1}})", 0, "number");
  ExpectRefused(R"({"__metadata__":{"x":{"y":"z"}}})", 0, "object");
  ExpectRefused(R"({"__metadata__":{"x":null}})", 0, "null");
  ExpectRefused(R"({"__metadata__":"x"})", 0, "string");
  ExpectRefused(R"({"a":7})", 0, "number");
  ExpectRefused(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1, "number");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "number");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":"1","data_offsets":[0,1]}})", 1, "string");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "array");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}})", 1, "boolean");
  ExpectRefused(R"({"a":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "two integers");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", 1, "two integers");
}

TEST(SafetensorsTest, RefusesBadIntegers) {
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "negative");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "no 64-bit integer");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})", 1, "no 64-bit integer");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}})", 1, "no 64-bit integer");
  // 2^63 + 1 survives as an integer: as a double it would be 2^63, and the sizes would agree.
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[9223372036854775809],"data_offsets":[0,9223372036854775808]}})", 1,
                "outside");
}

TEST(SafetensorsTest, RefusesOverflowingProducts) {
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "overflows");
  ExpectRefused(R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0, "overflows");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0, "overflows");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1,
                "too many dim");
}

TEST(SafetensorsTest, RefusesBadRanges) {
  auto tensor = [](const char* name, int begin, int end) {
    return "\"" + std::string(name) + R"(":{"dtype":"U8","shape":[)" + std::to_string(std::max(0, end - begin)) +
           R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
  };
  EXPECT_TRUE(ParseSafetensors(File("{" + tensor("a", 0, 2) + "," + tensor("b", 2, 4) + "}", 4)).ok());
  ExpectRefused("{" + tensor("a", 1, 4) + "}", 4, "hole");
  ExpectRefused("{" + tensor("a", 0, 2) + "," + tensor("b", 3, 4) + "}", 4, "hole");
  ExpectRefused("{" + tensor("a", 0, 3) + "," + tensor("b", 2, 4) + "}", 4, "overlap");
  ExpectRefused("{" + tensor("a", 0, 4) + "," + tensor("b", 0, 4) + "}", 4, "overlap");
  ExpectRefused("{" + tensor("a", 0, 3) + "}", 4, "after the last");
  ExpectRefused("{" + tensor("a", 0, 5) + "}", 4, "outside");
  ExpectRefused("{" + tensor("a", 3, 2) + "}", 4, "outside");
  ExpectRefused("{}", 1, "after the last");
  ExpectRefused(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}})", 4, "need 3");
  ExpectRefused(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}})", 4, "need 16");
}

TEST(SafetensorsTest, LayoutIsWhatTheParserReads) {
  absl::StatusOr<SafetensorsLayout> layout =
      LayOutSafetensors({{"z", "1\"\\"}, {"a", "é"}}, {{"x\"y", "F16", {3}}, {"s", "F32", {}}, {"empty", "U8", {0}}});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->header.size() % 64, 0u);
  EXPECT_EQ(layout->file_size, layout->header.size() + 10);
  absl::StatusOr<SafetensorsIndex> index = ParseSafetensors(layout->header + std::string(10, 'd'));
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->metadata, (std::map<std::string, std::string>{{"z", "1\"\\"}, {"a", "é"}}));
  ASSERT_EQ(index->entries.size(), 3u);
  EXPECT_EQ(index->entries[0].name, "x\"y");
  EXPECT_EQ(index->entries[1].begin, 6u);
  EXPECT_LT(layout->header.find("\"z\""), layout->header.find("\"a\""));
  EXPECT_TRUE(absl::IsInvalidArgument(LayOutSafetensors({{"a", "\xff"}}, {}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(LayOutSafetensors({}, {{"a", "F99", {1}}}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(LayOutSafetensors({}, {{"a", "F64", {uint64_t{1} << 62}}}).status()));
}

TEST(SafetensorsTest, EveryTruncationIsRefused) {
  absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors({{"k", "v"}}, {{"a", "F32", {4}}, {"b", "U8", {3}}});
  ASSERT_TRUE(layout.ok());
  const std::string file = layout->header + std::string(19, 'd');
  ASSERT_TRUE(ParseSafetensors(file).ok());
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(ParseSafetensors(file.substr(0, size)).status())) << size;
  }
  EXPECT_TRUE(absl::IsDataLoss(ParseSafetensors(file + "x").status()));
}

}  // namespace
}  // namespace stillhouse
