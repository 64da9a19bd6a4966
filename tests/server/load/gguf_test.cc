#include "server/load/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/gguf_writer.h"

namespace stillhouse {
namespace {

using testing::GgufWriter;

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
std::string RawString(const std::string& text) { return Raw<uint64_t>(text.size()) + text; }

// A file made by hand, field by field.
struct Handmade {
  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t tensors = 0;
  uint64_t entries = 0;
  std::string body;

  Handmade& Entry(const std::string& key, uint32_t type, const std::string& value) {
    ++entries;
    body += RawString(key) + Raw(type) + value;
    return *this;
  }
  Handmade& Tensor(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    ++tensors;
    body += RawString(name) + Raw(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) body += Raw(dim);
    body += Raw(type) + Raw(offset);
    return *this;
  }
  // Pads to the alignment and adds the data section.
  Handmade& Data(size_t size, size_t alignment = 32) {
    body.resize((24 + body.size() + alignment - 1) / alignment * alignment - 24 + size);
    return *this;
  }
  std::string Build() const { return magic + Raw(version) + Raw(tensors) + Raw(entries) + body; }
};

void ExpectRefused(const std::string& bytes, const std::string& because) {
  const auto file = GgufFile::Parse(Bytes(bytes));
  ASSERT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << because;
  EXPECT_NE(std::string(file.status().message()).find(because), std::string::npos) << file.status();
  EXPECT_EQ(file.status().message().find('\n'), std::string::npos);
}
void ExpectRefused(const Handmade& file, const std::string& because) { ExpectRefused(file.Build(), because); }

void ExpectAccepted(const std::string& bytes) {
  const auto file = GgufFile::Parse(Bytes(bytes));
  EXPECT_TRUE(file.ok()) << file.status();
}

constexpr uint32_t kF32 = 0, kQ4_1 = 3, kQ6_K = 14;
constexpr uint32_t kU8Value = 0, kU32Value = 4, kF32Value = 6, kBoolValue = 7, kStringValue = 8, kArrayValue = 9,
                   kU64Value = 10;

TEST(GgufTest, ReadsWhatTheWriterWrites) {
  GgufWriter writer;
  writer.AddU32("u32", 7);
  writer.AddU64("u64", 1ull << 40);
  writer.AddI32("i32", -5);
  writer.AddF32("f32", 0.5f);
  writer.AddRaw("f64", 12, Raw(0.25));
  writer.AddBool("yes", true);
  writer.AddBool("no", false);
  writer.AddString("text", "a\xFF z");
  writer.AddStrings("texts", {"", "one", "two words"});
  writer.AddI32s("numbers", {3, -1, 0});
  writer.AddRaw("u8", kU8Value, "\xFE");
  writer.AddTensor("m", {4, 2}, GgufType::kF32, {1, 2, 3, 4, 5, 6, 7, 8});
  writer.AddTensor("q", {32}, GgufType::kQ8_0, std::vector<float>(32, 1.0f));
  const std::string bytes = writer.Serialize();
  const auto opened = GgufFile::Parse(Bytes(bytes));
  ASSERT_TRUE(opened.ok()) << opened.status();
  const GgufFile& file = **opened;
  EXPECT_EQ(*file.GetUnsigned("u32"), 7u);
  EXPECT_EQ(*file.GetUnsigned("u64"), 1ull << 40);
  EXPECT_EQ(*file.GetUnsigned("u8"), 0xFEu);
  EXPECT_EQ(file.GetUnsigned("i32").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(file.GetUnsigned("f32").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(file.GetUnsigned("absent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*file.GetFloat("f32"), 0.5);
  EXPECT_EQ(*file.GetFloat("f64"), 0.25);
  EXPECT_FALSE(file.GetFloat("u32").ok());
  EXPECT_TRUE(*file.GetBool("yes"));
  EXPECT_FALSE(*file.GetBool("no"));
  EXPECT_FALSE(file.GetBool("u32").ok());
  EXPECT_EQ(*file.GetString("text"), "a\xFF z");
  EXPECT_FALSE(file.GetString("texts").ok());
  EXPECT_EQ(*file.GetStrings("texts"), (std::vector<std::string_view>{"", "one", "two words"}));
  EXPECT_FALSE(file.GetStrings("numbers").ok());
  EXPECT_EQ(*file.GetIntegers("numbers"), (std::vector<int64_t>{3, -1, 0}));
  EXPECT_FALSE(file.GetIntegers("texts").ok());
  EXPECT_FALSE(file.GetIntegers("u32").ok());
  ASSERT_EQ(file.tensors().size(), 2u);
  const GgufTensor* m = file.FindTensor("m");
  ASSERT_NE(m, nullptr);
  EXPECT_EQ(m->rank, 2);
  EXPECT_EQ(m->dims[0], 4u);
  EXPECT_EQ(m->dims[1], 2u);
  EXPECT_EQ(m->elements(), 8u);
  ASSERT_EQ(m->data.size(), 32u);
  float last = 0;
  std::memcpy(&last, m->data.data() + 28, 4);
  EXPECT_EQ(last, 8.0f);
  EXPECT_EQ(file.FindTensor("q")->data.size(), 34u);
  EXPECT_EQ(file.FindTensor("absent"), nullptr);
  EXPECT_EQ(file.Sha256().size(), 64u);
}

TEST(GgufTest, SizesOfAllBlocks) {
  const std::pair<uint32_t, uint64_t> sizes[] = {{0, 1024}, {1, 512},  {2, 144}, {3, 160},  {6, 176},
                                                 {7, 192},  {8, 272},  {10, 84}, {11, 110}, {12, 144},
                                                 {13, 176}, {14, 210}, {30, 512}};
  for (const auto& [type, bytes] : sizes) {
    Handmade file;
    file.Tensor("t", {256}, type, 0).Data(bytes);
    const std::string data = file.Build();
    const auto opened = GgufFile::Parse(Bytes(data));
    ASSERT_TRUE(opened.ok()) << type << opened.status();
    EXPECT_EQ((*opened)->tensors()[0].data.size(), bytes) << type;
    ExpectRefused(data.substr(0, data.size() - 1), "beyond the end");
  }
}

TEST(GgufTest, OpensFiles) {
  const auto folder = std::filesystem::temp_directory_path() / "stillhouse_gguf_test";
  std::filesystem::create_directories(folder);
  const std::string path = (folder / "model.gguf").string();
  GgufWriter writer;
  writer.AddU32("answer", 42);
  ASSERT_TRUE(writer.WriteFile(path).ok());
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*(*file)->GetUnsigned("answer"), 42u);
  EXPECT_EQ(GgufFile::Open((folder / "absent").string()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GgufFile::Open(folder.string()).status().code(), absl::StatusCode::kInvalidArgument);
  std::ofstream(path, std::ios::trunc).close();
  const auto empty = GgufFile::Open(path);
  EXPECT_EQ(empty.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(empty.status().message()).find("'model.gguf' cannot be used"), std::string::npos)
      << empty.status();
  std::filesystem::remove_all(folder);
}

TEST(GgufTest, EveryTruncationIsRefused) {
  GgufWriter writer;
  writer.AddU32("general.alignment", 32);
  writer.AddStrings("texts", {"a", "bc"});
  writer.AddI32s("numbers", {1, 2});
  writer.AddTensor("t", {4}, GgufType::kF32, {1, 2, 3, 4});
  writer.AddTensor("u", {4}, GgufType::kF32, {1, 2, 3, 4});
  const std::string whole = writer.Serialize();
  ExpectAccepted(whole);
  for (size_t size = 0; size < whole.size(); ++size) {
    // A copy of exactly that size, so that a sanitizer sees a read past its end.
    const std::vector<uint8_t> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_EQ(GgufFile::Parse(cut).status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(GgufTest, RefusesAnotherMagic) {
  Handmade file;
  file.magic = "GGML";
  ExpectRefused(file, "not a GGUF file");
  ExpectRefused(std::string(), "not a GGUF file");
}

TEST(GgufTest, RefusesOtherVersions) {
  for (const uint32_t version : {0u, 1u, 4u, 0x03000000u}) {
    Handmade file;
    file.version = version;
    ExpectRefused(file, "GGUF version");
  }
  Handmade two;
  two.version = 2;
  ExpectAccepted(two.Build());
}

TEST(GgufTest, RefusesCountsThatTheFileCannotHold) {
  Handmade file;
  file.entries = UINT64_MAX;
  ExpectRefused(file, "key/value entries");
  file = {};
  file.tensors = UINT64_MAX / 2;
  ExpectRefused(file, "tensors, more than");
}

TEST(GgufTest, RefusesLengthsThatTheFileCannotHold) {
  Handmade key;
  key.entries = 1;
  key.body = Raw<uint64_t>(60000) + std::string(20, 'x');
  ExpectRefused(key, "ends inside the key");
  key.body = Raw<uint64_t>(UINT64_MAX) + std::string(20, 'x');
  ExpectRefused(key, "at most 65535");
  ExpectRefused(Handmade().Entry("k", kStringValue, Raw<uint64_t>(UINT64_MAX) + "abc"), "ends inside the value of 'k'");
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(kU64Value) + Raw<uint64_t>(1ull << 61)),
                "ends inside the value of 'k'");
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(kStringValue) + Raw<uint64_t>(UINT64_MAX)),
                "ends inside the value of 'k'");
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(kStringValue) + Raw<uint64_t>(1) + Raw<uint64_t>(9) + "short"),
                "ends inside the value of 'k'");
}

TEST(GgufTest, RefusesEmptyAndDuplicateKeys) {
  ExpectRefused(Handmade().Entry("", kU32Value, Raw(1u)), "key of entry 0 is empty");
  ExpectRefused(Handmade().Entry("a", kU32Value, Raw(1u)).Entry("a", kU32Value, Raw(1u)), "'a' occurs twice");
}

TEST(GgufTest, RefusesUnknownValueTypes) {
  ExpectRefused(Handmade().Entry("k", 13, Raw(1u)), "unknown type 13");
  ExpectRefused(Handmade().Entry("k", UINT32_MAX, Raw(1u)), "unknown type");
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(99u) + Raw<uint64_t>(0)), "array of the unknown type 99");
}

TEST(GgufTest, RefusesNestedArrays) {
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(kArrayValue) + Raw<uint64_t>(0)), "array of arrays");
}

TEST(GgufTest, RefusesBooleansThatAreNeither) {
  ExpectRefused(Handmade().Entry("k", kBoolValue, "\x02"), "neither 0 nor 1");
  ExpectRefused(Handmade().Entry("k", kArrayValue, Raw(kBoolValue) + Raw<uint64_t>(3) + std::string("\0\1\3", 3)),
                "neither 0 nor 1");
}

TEST(GgufTest, RefusesSenselessAlignments) {
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 33u, 1u << 21, 1u << 31, UINT32_MAX}) {
    ExpectRefused(Handmade().Entry("general.alignment", kU32Value, Raw(alignment)), "general.alignment");
  }
  ExpectRefused(Handmade().Entry("general.alignment", kU64Value, Raw<uint64_t>(32)), "general.alignment");
  ExpectRefused(Handmade().Entry("general.alignment", kF32Value, Raw(32.0f)), "general.alignment");
  Handmade wide;
  wide.Entry("general.alignment", kU32Value, Raw(256u)).Tensor("t", {4}, kF32, 0).Data(16, 256);
  const std::string bytes = wide.Build();
  const auto file = GgufFile::Parse(Bytes(bytes));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((static_cast<size_t>((*file)->tensors()[0].data.data() - Bytes(bytes).data())) % 256, 0u);
}

TEST(GgufTest, RefusesEmptyAndDuplicateTensorNames) {
  ExpectRefused(Handmade().Tensor("", {4}, kF32, 0).Data(16), "name of tensor 0 is empty");
  ExpectRefused(Handmade().Tensor("t", {4}, kF32, 0).Tensor("t", {4}, kF32, 32).Data(48), "'t' occurs twice");
  ExpectRefused(Handmade().Tensor(std::string(2000, 'n'), {4}, kF32, 0).Data(16), "at most 1024");
}

TEST(GgufTest, RefusesMoreThanFourDimensionsAndNone) {
  ExpectRefused(Handmade().Tensor("t", {1, 1, 1, 1, 1}, kF32, 0).Data(16), "5 dimensions");
  ExpectRefused(Handmade().Tensor("t", {}, kF32, 0).Data(32), "0 dimensions");
}

TEST(GgufTest, RefusesZeroDimensions) {
  ExpectRefused(Handmade().Tensor("t", {4, 0}, kF32, 0).Data(16), "dimension of zero");
}

TEST(GgufTest, RefusesProductsThatWrap) {
  ExpectRefused(Handmade().Tensor("t", {1ull << 32, 1ull << 32}, kF32, 0).Data(16),
                "more elements than can be counted");
  ExpectRefused(Handmade().Tensor("t", {1ull << 62}, kF32, 0).Data(16), "more bytes than can be counted");
  ExpectRefused(Handmade().Tensor("t", {UINT64_MAX}, kF32, 0).Data(16), "more elements than can be counted");
}

TEST(GgufTest, RefusesUnknownTensorTypes) {
  for (const uint32_t type : {4u, 5u, 9u, 15u, 29u, 31u, UINT32_MAX}) {
    ExpectRefused(Handmade().Tensor("t", {256}, type, 0).Data(4096), "which is not supported");
  }
}

TEST(GgufTest, RefusesRowsThatAreNoWholeBlocks) {
  ExpectRefused(Handmade().Tensor("t", {33, 32}, kQ4_1, 0).Data(4096), "not a multiple of the Q4_1 block of 32");
  ExpectRefused(Handmade().Tensor("t", {128, 2}, kQ6_K, 0).Data(4096), "not a multiple of the Q6_K block of 256");
}

TEST(GgufTest, RefusesDataOutsideTheFile) {
  ExpectRefused(Handmade().Tensor("t", {5}, kF32, 0).Data(16), "beyond the end");
  ExpectRefused(Handmade().Tensor("t", {4}, kF32, 32).Data(16), "beyond the end");
  ExpectRefused(Handmade().Tensor("t", {4}, kF32, UINT64_MAX - 31).Data(16), "beyond the end");  // offset + size wraps
  ExpectRefused(Handmade().Tensor("t", {4}, kF32, 0), "before its tensor data");
}

TEST(GgufTest, RefusesUnalignedAndOverlappingData) {
  ExpectRefused(Handmade().Tensor("t", {4}, kF32, 4).Data(64), "not a multiple of the alignment");
  ExpectRefused(Handmade().Tensor("t", {16}, kF32, 0).Tensor("u", {4}, kF32, 32).Data(64), "overlaps");
}

TEST(GgufTest, ErrorsPrintNoRawBytes) {
  const auto file = GgufFile::Parse(Bytes(Handmade().Entry("\x1b[31m\n", 99, "").Build()));
  EXPECT_EQ(file.status().message().find('\x1b'), std::string::npos);
  EXPECT_EQ(file.status().message().find('\n'), std::string::npos);
}

TEST(GgufTest, HalfPrecisionOfTheWriter) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = testing::HalfToFloat(static_cast<uint16_t>(half));
    if (std::isnan(value)) continue;
    EXPECT_EQ(testing::FloatToHalf(value), half);
  }
  EXPECT_EQ(testing::FloatToHalf(1.0f + 1.0f / 2048), 0x3C00);  // a tie goes to even
  EXPECT_EQ(testing::FloatToHalf(65536.0f), 0x7C00);
}

}  // namespace
}  // namespace stillhouse
