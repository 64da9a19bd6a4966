#include "cache_store/artifact.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "cache_store/crc32c.h"
#include "cache_store/safetensors.h"
#include "kernels/base/sha256.h"
#include "nlohmann/json.hpp"
#include "tests/cache_store/sample_artifact.h"

namespace stillhouse {
namespace {

using testing::HasSubstr;

constexpr size_t kDigestAt = 8 + 38;  // after the length and {"__metadata__":{"stillhouse.sha256":"

// The digest as FORMAT.md defines it, computed from scratch.
std::string Sign(std::string file) {
  file.replace(kDigestAt, 64, std::string(64, '0'));
  file.replace(kDigestAt, 64, Sha256Hex(file));
  return file;
}

// The file with another header object, data as it was, signed again.
std::string WithHeader(const std::string& file, const std::function<void(nlohmann::json&)>& change) {
  absl::StatusOr<SafetensorsIndex> index = ParseSafetensors(file);
  nlohmann::json header = nlohmann::json::parse(index->metadata.at("stillhouse.artifact"));
  change(header);
  absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors(
      {{"stillhouse.sha256", std::string(64, '0')}, {"stillhouse.artifact", header.dump()}}, index->entries);
  return Sign(layout->header + file.substr(index->data_begin));
}

class StringFile : public ReadableFile {
 public:
  explicit StringFile(std::string bytes) : bytes(std::move(bytes)) {}
  uint64_t size() const override { return bytes.size(); }
  absl::Status Read(uint64_t offset, size_t size, char* out) const override {
    if (offset + size > bytes.size()) return absl::OutOfRangeError("end");
    bytes.copy(out, size, offset);
    return absl::OkStatus();
  }
  std::string bytes;
};

TEST(ArtifactTest, RoundTrip) {
  const SampleArtifact a = MakeSampleArtifact();
  const std::string file = SampleArtifactFile();
  absl::StatusOr<ParsedArtifact> parsed = ParseArtifact(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ArtifactHeader& h = parsed->header;
  EXPECT_EQ(h.fingerprints, a.header.fingerprints);
  EXPECT_EQ(h.method, "CARTRIDGE");
  EXPECT_EQ(h.slots, 5u);
  EXPECT_EQ(h.logical_length, 77u);
  EXPECT_EQ(h.position_rule, PositionRule::kRerotate);
  EXPECT_TRUE(h.has_bos && h.has_beta && h.has_positions);
  EXPECT_EQ(h.frozen_slots, 1u);
  EXPECT_EQ(h.training_horizon, 8192u);
  EXPECT_EQ(h.corpus_sha256, a.header.corpus_sha256);
  EXPECT_EQ(h.hyperparameters_json, a.header.hyperparameters_json);
  EXPECT_EQ(h.versions_json, a.header.versions_json);
  EXPECT_EQ(h.quality_json, a.header.quality_json);
  EXPECT_EQ(h.create_unix_micros, a.header.create_unix_micros);
  ASSERT_EQ(parsed->sections.size(), a.sections.size());
  for (size_t i = 0; i < a.sections.size(); ++i) {
    EXPECT_EQ(parsed->sections[i].name, a.sections[i].name);
    EXPECT_EQ(parsed->sections[i].shape, a.sections[i].shape);
    EXPECT_EQ(parsed->sections[i].bytes, a.sections[i].bytes);
  }
}

TEST(ArtifactTest, SectionOrderDoesNotMatterAndSmallerArtifactsWork) {
  SampleArtifact a = MakeSampleArtifact();
  std::vector<ArtifactSection> reversed(a.sections.rbegin(), a.sections.rend());
  EXPECT_EQ(*SerializeArtifact(a.header, reversed), SampleArtifactFile());
  a.header.has_beta = a.header.has_positions = false;
  std::erase_if(a.sections, [](const ArtifactSection& s) { return s.dtype != "F16"; });
  absl::StatusOr<std::string> file = SerializeArtifact(a.header, a.sections);
  ASSERT_TRUE(file.ok()) << file.status();
  absl::StatusOr<ParsedArtifact> parsed = ParseArtifact(*file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->sections.size(), 4u);
  EXPECT_FALSE(parsed->header.has_beta);
}

TEST(ArtifactTest, FileIsOrdinarySafetensorsWithTheDocumentedDigest) {
  const std::string file = SampleArtifactFile();
  EXPECT_TRUE(Sign(file) == file);
  absl::StatusOr<SafetensorsIndex> index = ParseSafetensors(file);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->data_begin % 64, 0u);
  ASSERT_NE(index->Find("layer.1.k"), nullptr);
  EXPECT_EQ(index->Find("layer.1.k")->shape, (std::vector<uint64_t>{3, 5, 4}));
  EXPECT_EQ(index->Find("layer.1.beta")->shape, (std::vector<uint64_t>{3, 5}));
  const nlohmann::json header = nlohmann::json::parse(index->metadata.at("stillhouse.artifact"));
  EXPECT_EQ(header["version"], 1);
  EXPECT_EQ(header["slots"], 5);
  EXPECT_EQ(header["quality"]["recovered"], 0.93);
}

// A file that a Python script made from FORMAT.md alone (make_artifact_seeds.py).
TEST(ArtifactTest, ReadsAFileOfAnotherWriter) {
  std::ifstream in(STILLHOUSE_SOURCE_DIR "/tests/fuzz/corpus/artifact/sample.safetensors", std::ios::binary);
  const std::string file(std::istreambuf_iterator<char>(in), {});
  absl::StatusOr<ParsedArtifact> parsed = ParseArtifact(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->header.fingerprints.rope_layout, "half");
  EXPECT_EQ(parsed->header.slots, 3u);
  EXPECT_EQ(parsed->header.logical_length, 40u);
  EXPECT_EQ(parsed->header.position_rule, PositionRule::kKeep);
  ASSERT_EQ(parsed->sections.size(), 3u);
  EXPECT_EQ(parsed->sections[2].name, "layer.0.beta");
  float beta[6];
  std::memcpy(beta, parsed->sections[2].bytes.data(), sizeof(beta));
  for (int i = 0; i < 6; ++i) EXPECT_EQ(beta[i], static_cast<float>(i));
}

TEST(ArtifactTest, EveryChangedByteIsDataLoss) {
  const std::string file = SampleArtifactFile();
  for (size_t at = 0; at < file.size(); ++at) {
    for (unsigned char flip : {0x01, 0x80, 0x20}) {
      std::string bad = file;
      bad[at] = static_cast<char>(bad[at] ^ flip);
      const absl::Status status = ParseArtifact(bad).status();
      ASSERT_TRUE(absl::IsDataLoss(status)) << at << " " << int{flip} << " " << status;
    }
  }
}

TEST(ArtifactTest, EveryTruncationAndExtensionIsDataLoss) {
  const std::string file = SampleArtifactFile();
  for (size_t size = 0; size < file.size(); ++size) {
    ASSERT_TRUE(absl::IsDataLoss(ParseArtifact(file.substr(0, size)).status())) << size;
  }
  EXPECT_TRUE(absl::IsDataLoss(ParseArtifact(file + '\0').status()));
  EXPECT_TRUE(absl::IsDataLoss(ParseArtifact(Sign(file + '\0')).status()));
}

TEST(ArtifactTest, ForeignFilesAreDataLoss) {
  absl::StatusOr<SafetensorsLayout> layout = LayOutSafetensors({{"format", "pt"}}, {{"w", "F32", {100}}});
  const absl::Status status = ParseArtifact(layout->header + std::string(400, 'x')).status();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("no Stillhouse artifact"));
  EXPECT_TRUE(absl::IsDataLoss(ParseArtifact("GGUF").status()));
}

TEST(ArtifactTest, NewerVersionIsFailedPreconditionEvenWithUnknownFields) {
  const std::string file = WithHeader(SampleArtifactFile(), [](nlohmann::json& h) {
    h["version"] = 2;
    h["novelty"] = {1, 2};
    h.erase("slots");
  });
  const absl::Status status = ParseArtifact(file).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("version 2"));
}

// Headers that lie but are signed: what a hostile import could send.
TEST(ArtifactTest, SignedLiesAreRefused) {
  const std::string file = SampleArtifactFile();
  ASSERT_TRUE(ParseArtifact(WithHeader(file, [](nlohmann::json&) {})).ok());
  const std::vector<std::pair<std::string, std::function<void(nlohmann::json&)>>> lies = {
      {"no version", [](auto& h) { h.erase("version"); }},
      {"version 0", [](auto& h) { h["version"] = 0; }},
      {"unknown field", [](auto& h) { h["more"] = 1; }},
      {"unknown fingerprint", [](auto& h) { h["fingerprints"]["more"] = "x"; }},
      {"missing fingerprint", [](auto& h) { h["fingerprints"].erase("tokenizer"); }},
      {"empty model", [](auto& h) { h["fingerprints"]["model"] = ""; }},
      {"dtype", [](auto& h) { h["fingerprints"]["dtype"] = "F32"; }},
      {"unknown dtype", [](auto& h) { h["fingerprints"]["dtype"] = "I8"; }},
      {"rope", [](auto& h) { h["fingerprints"]["rope_layout"] = "other"; }},
      {"layers", [](auto& h) { h["layers"] = 3; }},
      {"layers 0", [](auto& h) { h["layers"] = 0; }},
      {"layers huge", [](auto& h) { h["layers"] = 4000000000u; }},
      {"layers 2^32 + 2", [](auto& h) { h["layers"] = (uint64_t{1} << 32) + 2; }},
      {"layers as text", [](auto& h) { h["layers"] = "2"; }},
      {"layers negative", [](auto& h) { h["layers"] = -2; }},
      {"layers fraction", [](auto& h) { h["layers"] = 2.0; }},
      {"slots", [](auto& h) { h["slots"] = 4; }},
      {"heads", [](auto& h) { h["kv_heads"] = 1; }},
      {"width", [](auto& h) { h["head_dim"] = 2; }},
      {"odd width", [](auto& h) { h["head_dim"] = 5; }},
      {"length 0", [](auto& h) { h["logical_length"] = 0; }},
      {"length huge", [](auto& h) { h["logical_length"] = uint64_t{1} << 31; }},
      {"frozen", [](auto& h) { h["frozen_slots"] = 6; }},
      {"beta", [](auto& h) { h["has_beta"] = false; }},
      {"beta as number", [](auto& h) { h["has_beta"] = 1; }},
      {"positions", [](auto& h) { h["has_positions"] = false; }},
      {"rule", [](auto& h) { h["position_rule"] = "fold"; }},
      {"method", [](auto& h) { h["method"] = "../x"; }},
      {"corpus", [](auto& h) { h["corpus_sha256"] = "abc"; }},
      {"quality", [](auto& h) { h["quality"] = "good"; }},
      {"crc", [](auto& h) { h["crc32c"]["layer.0.v"] = "00000000"; }},
      {"crc text", [](auto& h) { h["crc32c"]["layer.0.v"] = "xyz"; }},
      {"crc missing", [](auto& h) { h["crc32c"].erase("layer.0.v"); }},
      {"crc of nothing", [](auto& h) { h["crc32c"]["layer.9.v"] = "00000000"; }},
  };
  for (const auto& [name, lie] : lies) {
    const absl::Status status = ParseArtifact(WithHeader(file, lie)).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << name << ": " << status;
  }
}

TEST(ArtifactTest, ReadChecksEachSectionAgain) {
  auto file = std::make_shared<StringFile>(SampleArtifactFile());
  absl::StatusOr<Artifact> artifact = OpenArtifact(file);
  ASSERT_TRUE(artifact.ok()) << artifact.status();
  const SampleArtifact a = MakeSampleArtifact();
  std::string out;
  for (size_t i = 0; i < a.sections.size(); ++i) {
    const Artifact::Section* section = artifact->Find(a.sections[i].name);
    ASSERT_NE(section, nullptr);
    out.resize(section->size);
    ASSERT_TRUE(artifact->Read(*section, absl::MakeSpan(out.data(), out.size())).ok());
    EXPECT_EQ(out, a.buffers[i]);
    EXPECT_EQ(section->crc32c, Crc32c(a.buffers[i]));
  }
  EXPECT_EQ(artifact->Find("layer.7.k"), nullptr);
  const Artifact::Section& first = artifact->sections()[0];
  EXPECT_TRUE(absl::IsInvalidArgument(artifact->Read(first, absl::MakeSpan(out.data(), first.size - 1))));
  file->bytes[first.offset + 3] ^= 1;
  out.resize(first.size);
  EXPECT_TRUE(absl::IsDataLoss(artifact->Read(first, absl::MakeSpan(out.data(), out.size()))));
}

TEST(ArtifactTest, WriterRefusesWhatTheReaderWould) {
  const SampleArtifact good = MakeSampleArtifact();
  auto refused = [](const SampleArtifact& a) {
    return absl::IsInvalidArgument(SerializeArtifact(a.header, a.sections).status());
  };
  SampleArtifact a = MakeSampleArtifact();
  a.sections.pop_back();
  EXPECT_TRUE(refused(a));
  a = MakeSampleArtifact();
  a.sections.push_back(a.sections[0]);
  EXPECT_TRUE(refused(a));
  a = MakeSampleArtifact();
  a.sections[0].bytes.remove_suffix(1);
  EXPECT_TRUE(refused(a));
  a = MakeSampleArtifact();
  a.sections[0].dtype = "BF16";
  EXPECT_TRUE(refused(a));
  a = MakeSampleArtifact();
  a.header.has_beta = false;
  EXPECT_TRUE(refused(a));
  for (const char* bad : {"", "[]", "{", "{\"a\":1,\"a\":2}"}) {
    a = MakeSampleArtifact();
    a.header.quality_json = bad;
    EXPECT_TRUE(refused(a)) << bad;
  }
  a = MakeSampleArtifact();
  a.header.fingerprints.model = "\xff";
  EXPECT_TRUE(refused(a));
  a = MakeSampleArtifact();
  a.header.quality_json = "{\"x\":" + std::string(31, '[') + std::string(31, ']') + "}";
  EXPECT_TRUE(refused(a)) << "fits alone, not inside the header";
  // A failing sink ends the write with its own error.
  int pieces = 0;
  EXPECT_TRUE(absl::IsResourceExhausted(WriteArtifact(good.header, good.sections, [&](std::string_view) {
    return ++pieces == 3 ? absl::ResourceExhaustedError("full") : absl::OkStatus();
  })));
  EXPECT_EQ(pieces, 3);
}

TEST(ArtifactTest, FingerprintsNameWhatDiffers) {
  const ArtifactFingerprints mine = MakeSampleArtifact().header.fingerprints;
  EXPECT_TRUE(CheckFingerprints(mine, mine).ok());
  for (auto field :
       {&ArtifactFingerprints::model, &ArtifactFingerprints::tokenizer, &ArtifactFingerprints::chat_template,
        &ArtifactFingerprints::rope_layout, &ArtifactFingerprints::rope_scaling, &ArtifactFingerprints::dtype}) {
    ArtifactFingerprints other = mine;
    other.*field = "other";
    const absl::Status status = CheckFingerprints(mine, other);
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(mine.*field));
  }
}

}  // namespace
}  // namespace stillhouse
