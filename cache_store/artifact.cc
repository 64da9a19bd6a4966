#include "cache_store/artifact.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "cache_store/crc32c.h"
#include "cache_store/safetensors.h"
#include "cache_store/strict_json.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

using nlohmann::json;

constexpr std::string_view kPrefix = "{\"__metadata__\":{\"stillhouse.sha256\":\"";  // then 64 digits and a quote
constexpr std::string_view kDigestKey = "stillhouse.sha256";
constexpr std::string_view kHeaderKey = "stillhouse.artifact";
constexpr uint64_t kMaxArtifactHeader = 16u << 20;
constexpr size_t kPiece = 1u << 20;
const std::string kZeroDigest(64, '0');

absl::Status Damaged(std::string_view what) { return absl::DataLossError(StrCat("artifact: ", what)); }

struct Expected {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape;
};

// The tensors that a header promises, in file order.
std::vector<Expected> ExpectedSections(const ArtifactHeader& h) {
  std::vector<Expected> sections;
  for (uint32_t layer = 0; layer < h.layers; ++layer) {
    const std::string prefix = StrCat("layer.", layer, ".");
    sections.push_back({prefix + "k", h.fingerprints.dtype, {h.kv_heads, h.slots, h.head_dim}});
    sections.push_back({prefix + "v", h.fingerprints.dtype, {h.kv_heads, h.slots, h.head_dim}});
    if (h.has_beta) sections.push_back({prefix + "beta", "F32", {h.kv_heads, h.slots}});
    if (h.has_positions) sections.push_back({prefix + "positions", "I32", {h.kv_heads, h.slots}});
  }
  return sections;
}

// Empty, or what is wrong with the values. Caps keep every later product far from overflow.
std::string HeaderProblem(const ArtifactHeader& h) {
  const ArtifactFingerprints& f = h.fingerprints;
  for (const std::string* text : {&f.model, &f.tokenizer, &f.chat_template, &f.rope_scaling}) {
    if (text->size() > 4096) return "a fingerprint is longer than 4096 bytes";
  }
  if (f.model.empty() || f.tokenizer.empty()) return "the model or tokenizer fingerprint is empty";
  if (f.rope_layout != "interleaved" && f.rope_layout != "half") return "unknown RoPE layout";
  if (f.dtype != "F32" && f.dtype != "F16" && f.dtype != "BF16") return "unknown dtype of keys and values";
  if (h.method.empty() || h.method.size() > 64) return "the method's name is empty or too long";
  for (char c : h.method) {
    if (!((c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_')) return "the method's name is not UPPER_SNAKE";
  }
  if (h.layers < 1 || h.layers > 4096) return "layers must be 1 to 4096";
  if (h.kv_heads < 1 || h.kv_heads > 4096) return "kv_heads must be 1 to 4096";
  if (h.head_dim < 2 || h.head_dim > 4096 || h.head_dim % 2 != 0) return "head_dim must be even, 2 to 4096";
  if (h.slots < 1 || h.slots > (1u << 27)) return "slots must be 1 to 2^27";
  if (h.logical_length < 1 || h.logical_length > 0x7fffffff) return "logical_length must be 1 to 2^31-1";
  if (h.frozen_slots > h.slots) return "more frozen slots than slots";
  if (h.training_horizon > 0x7fffffff || h.corpus_tokens > (uint64_t{1} << 53)) return "a token count is out of range";
  if (h.create_unix_micros < 0) return "create_unix_micros is negative";
  if (!IsSha256Hex(h.corpus_sha256)) return "corpus_sha256 is not a SHA-256";
  return "";
}

const char* PositionRuleName(PositionRule rule) { return rule == PositionRule::kKeep ? "keep" : "rerotate"; }

absl::StatusOr<json> ParseObject(std::string_view name, std::string_view text) {
  absl::StatusOr<json> value = ParseStrictJson(text);
  if (!value.ok() || !value->is_object()) return absl::InvalidArgumentError(StrCat(name, " is not a JSON object"));
  return value;
}

absl::StatusOr<std::string> HeaderToJson(const ArtifactHeader& h, const std::map<std::string, std::string>& crcs) {
  STILLHOUSE_ASSIGN_OR_RETURN(json hyperparameters, ParseObject("hyperparameters_json", h.hyperparameters_json));
  STILLHOUSE_ASSIGN_OR_RETURN(json versions, ParseObject("versions_json", h.versions_json));
  STILLHOUSE_ASSIGN_OR_RETURN(json quality, ParseObject("quality_json", h.quality_json));
  const ArtifactFingerprints& f = h.fingerprints;
  json value = {{"version", kArtifactVersion},
                {"method", h.method},
                {"fingerprints",
                 {{"model", f.model},
                  {"tokenizer", f.tokenizer},
                  {"chat_template", f.chat_template},
                  {"rope_layout", f.rope_layout},
                  {"rope_scaling", f.rope_scaling},
                  {"dtype", f.dtype}}},
                {"layers", h.layers},
                {"kv_heads", h.kv_heads},
                {"head_dim", h.head_dim},
                {"slots", h.slots},
                {"logical_length", h.logical_length},
                {"position_rule", PositionRuleName(h.position_rule)},
                {"has_bos", h.has_bos},
                {"has_beta", h.has_beta},
                {"has_positions", h.has_positions},
                {"frozen_slots", h.frozen_slots},
                {"training_horizon", h.training_horizon},
                {"corpus_sha256", h.corpus_sha256},
                {"corpus_tokens", h.corpus_tokens},
                {"create_unix_micros", h.create_unix_micros},
                {"crc32c", crcs}};
  value["hyperparameters"] = std::move(hyperparameters);
  value["versions"] = std::move(versions);
  value["quality"] = std::move(quality);
  try {
    std::string text = value.dump();
    // Reading it back must succeed too: nesting and counts of the embedded objects come on top of ours.
    absl::StatusOr<json> back = ParseStrictJson(text);
    if (!back.ok()) return absl::InvalidArgumentError(StrCat("artifact header: ", back.status().message()));
    return text;
  } catch (const json::exception&) {
    return absl::InvalidArgumentError("a text of the artifact's header is not valid UTF-8");
  }
}

// Takes fields out of the object, so that what remains at the end is unknown.
class Fields {
 public:
  explicit Fields(json* object) : object_(object) {}

  void String(const char* name, std::string* out) {
    if (const json* v = Take(name); v != nullptr && v->is_string()) {
      *out = v->get<std::string>();
    } else {
      Fail(name);
    }
  }
  void Bool(const char* name, bool* out) {
    if (const json* v = Take(name); v != nullptr && v->is_boolean()) {
      *out = v->get<bool>();
    } else {
      Fail(name);
    }
  }
  template <typename Int>
  void Unsigned(const char* name, Int* out) {
    const json* v = Take(name);
    if (v != nullptr && v->is_number_unsigned() &&
        v->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<Int>::max())) {
      *out = static_cast<Int>(v->get<uint64_t>());
    } else {
      Fail(name);
    }
  }
  json Object(const char* name) {
    const json* v = Take(name);
    if (v != nullptr && v->is_object()) return *v;
    Fail(name);
    return json::object();
  }
  void Finish() {
    if (problem_.empty() && seen_ != object_->size()) problem_ = "unknown fields in the header";
  }
  void Fail(std::string_view name) {
    if (problem_.empty()) problem_ = StrCat("missing or wrong field ", name);
  }
  const std::string& problem() const { return problem_; }

 private:
  const json* Take(const char* name) {
    auto it = object_->find(name);
    if (it == object_->end()) return nullptr;
    ++seen_;
    return &*it;
  }
  json* object_;
  size_t seen_ = 0;
  std::string problem_;
};

absl::StatusOr<ArtifactHeader> HeaderFromJson(std::string_view text, std::map<std::string, uint32_t>* crcs) {
  absl::StatusOr<json> parsed = ParseStrictJson(text);
  if (!parsed.ok()) return Damaged(ToStd(parsed.status().message()));
  if (!parsed->is_object()) return Damaged("the header is not an object");
  uint64_t version = 0;
  Fields fields(&*parsed);
  fields.Unsigned("version", &version);
  if (!fields.problem().empty() || version == 0) return Damaged("the header has no version");
  if (version > kArtifactVersion) {
    return absl::FailedPreconditionError(StrCat("the artifact has format version ", version,
                                                "; this program reads up to ", kArtifactVersion,
                                                ": use a newer one, or build the cache again"));
  }
  ArtifactHeader h;
  ArtifactFingerprints& f = h.fingerprints;
  json fingerprints = fields.Object("fingerprints");
  Fields inner(&fingerprints);
  inner.String("model", &f.model);
  inner.String("tokenizer", &f.tokenizer);
  inner.String("chat_template", &f.chat_template);
  inner.String("rope_layout", &f.rope_layout);
  inner.String("rope_scaling", &f.rope_scaling);
  inner.String("dtype", &f.dtype);
  inner.Finish();
  std::string rule;
  fields.String("method", &h.method);
  fields.Unsigned("layers", &h.layers);
  fields.Unsigned("kv_heads", &h.kv_heads);
  fields.Unsigned("head_dim", &h.head_dim);
  fields.Unsigned("slots", &h.slots);
  fields.Unsigned("logical_length", &h.logical_length);
  fields.String("position_rule", &rule);
  fields.Bool("has_bos", &h.has_bos);
  fields.Bool("has_beta", &h.has_beta);
  fields.Bool("has_positions", &h.has_positions);
  fields.Unsigned("frozen_slots", &h.frozen_slots);
  fields.Unsigned("training_horizon", &h.training_horizon);
  fields.String("corpus_sha256", &h.corpus_sha256);
  fields.Unsigned("corpus_tokens", &h.corpus_tokens);
  fields.Unsigned("create_unix_micros", &h.create_unix_micros);
  h.hyperparameters_json = fields.Object("hyperparameters").dump();
  h.versions_json = fields.Object("versions").dump();
  h.quality_json = fields.Object("quality").dump();
  const json checksums = fields.Object("crc32c");
  fields.Finish();
  for (const Fields* part : {&fields, &inner}) {
    if (!part->problem().empty()) return Damaged(part->problem());
  }
  if (rule == PositionRuleName(PositionRule::kKeep)) {
    h.position_rule = PositionRule::kKeep;
  } else if (rule == PositionRuleName(PositionRule::kRerotate)) {
    h.position_rule = PositionRule::kRerotate;
  } else {
    return Damaged("unknown position rule");
  }
  for (const auto& [name, value] : checksums.items()) {
    uint32_t crc = 0;
    const std::string digits = value.is_string() ? value.get<std::string>() : "";
    if (digits.size() != 8 || digits.find_first_not_of("0123456789abcdef") != digits.npos) {
      return Damaged("a section's checksum is not 8 hex digits");
    }
    for (char c : digits) crc = crc << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
    (*crcs)[name] = crc;
  }
  if (std::string problem = HeaderProblem(h); !problem.empty()) return Damaged(problem);
  return h;
}

// A view as a file, so that both doors share one reader.
class MemoryFile : public ReadableFile {
 public:
  explicit MemoryFile(std::string_view bytes) : bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  absl::Status Read(uint64_t offset, size_t size, char* out) const override {
    if (offset > bytes_.size() || size > bytes_.size() - offset) return absl::OutOfRangeError("read past the end");
    bytes_.copy(out, size, offset);
    return absl::OkStatus();
  }

 private:
  std::string_view bytes_;
};

}  // namespace

absl::Status WriteArtifact(const ArtifactHeader& header, std::vector<ArtifactSection> sections, const ByteSink& sink) {
  if (std::string problem = HeaderProblem(header); !problem.empty()) {
    return absl::InvalidArgumentError(StrCat("artifact header: ", problem));
  }
  std::map<std::string_view, const ArtifactSection*> by_name;
  for (const ArtifactSection& section : sections) {
    if (!by_name.emplace(section.name, &section).second) {
      return absl::InvalidArgumentError(StrCat("artifact section ", section.name, " is there twice"));
    }
  }
  std::vector<const ArtifactSection*> ordered;
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> crcs;
  for (Expected& expected : ExpectedSections(header)) {
    auto it = by_name.find(expected.name);
    if (it == by_name.end())
      return absl::InvalidArgumentError(StrCat("artifact section ", expected.name, " is missing"));
    const ArtifactSection& section = *it->second;
    uint64_t size = SafetensorsDtypeSize(expected.dtype);
    for (uint64_t dim : expected.shape) size *= dim;
    if (section.dtype != expected.dtype || section.shape != expected.shape || section.bytes.size() != size) {
      return absl::InvalidArgumentError(
          StrCat("artifact section ", expected.name, " has not the type, shape or size that the header promises"));
    }
    ordered.push_back(&section);
    crcs[expected.name] = absl::StrFormat("%08x", Crc32c(section.bytes));
    entries.push_back({std::move(expected.name), std::move(expected.dtype), std::move(expected.shape)});
  }
  if (ordered.size() != sections.size())
    return absl::InvalidArgumentError("artifact sections that the header does not promise");
  STILLHOUSE_ASSIGN_OR_RETURN(std::string text, HeaderToJson(header, crcs));
  STILLHOUSE_ASSIGN_OR_RETURN(SafetensorsLayout layout, LayOutSafetensors({{std::string(kDigestKey), kZeroDigest},
                                                                           {std::string(kHeaderKey), std::move(text)}},
                                                                          std::move(entries)));
  if (layout.header.size() > kMaxArtifactHeader)
    return absl::InvalidArgumentError("the artifact's header is too large");
  Sha256 hash;
  hash.Update(layout.header);
  for (const ArtifactSection* section : ordered) hash.Update(section->bytes);
  layout.header.replace(8 + kPrefix.size(), 64, hash.FinishHex());
  STILLHOUSE_RETURN_IF_ERROR(sink(layout.header));
  for (const ArtifactSection* section : ordered) STILLHOUSE_RETURN_IF_ERROR(sink(section->bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::string> SerializeArtifact(const ArtifactHeader& header, std::vector<ArtifactSection> sections) {
  std::string file;
  STILLHOUSE_RETURN_IF_ERROR(WriteArtifact(header, std::move(sections), [&file](std::string_view piece) {
    file.append(piece);
    return absl::OkStatus();
  }));
  return file;
}

absl::StatusOr<Artifact> OpenArtifact(std::shared_ptr<ReadableFile> file) {
  // 1. The frame, the same in every version: length, the digest in a fixed place.
  std::array<char, 8> length_bytes;
  if (file->size() < 8 + kPrefix.size() + 65) return Damaged("too short to be one");
  STILLHOUSE_RETURN_IF_ERROR(file->Read(0, 8, length_bytes.data()));
  STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t length,
                              ParseSafetensorsHeaderLength({length_bytes.data(), 8}, file->size()));
  if (length > kMaxArtifactHeader) return Damaged("the header is over the limit");
  std::string text(length, '\0');
  STILLHOUSE_RETURN_IF_ERROR(file->Read(8, length, text.data()));
  if (text.compare(0, kPrefix.size(), kPrefix) != 0 || length < kPrefix.size() + 65) {
    return Damaged("this is no Stillhouse artifact, or its start is damaged");
  }
  const std::string digest = text.substr(kPrefix.size(), 64);

  // 2. The container, so that sections are known when their bytes pass by.
  STILLHOUSE_ASSIGN_OR_RETURN(SafetensorsIndex index, ParseSafetensorsHeader(text, file->size()));

  // 3. One pass over the bytes: the digest of all, the CRC of each section.
  Sha256 hash;
  hash.Update({length_bytes.data(), 8});
  std::string blanked = text;
  blanked.replace(kPrefix.size(), 64, kZeroDigest);
  hash.Update(blanked);
  std::vector<uint32_t> computed(index.entries.size());
  std::string piece(kPiece, '\0');
  for (size_t i = 0; i < index.entries.size(); ++i) {
    for (uint64_t at = index.entries[i].begin; at < index.entries[i].end;) {
      const size_t n = static_cast<size_t>(std::min<uint64_t>(kPiece, index.entries[i].end - at));
      STILLHOUSE_RETURN_IF_ERROR(file->Read(index.data_begin + at, n, piece.data()));
      hash.Update({piece.data(), n});
      computed[i] = Crc32c({piece.data(), n}, computed[i]);
      at += n;
    }
  }
  if (hash.FinishHex() != digest) return Damaged("its SHA-256 does not match its bytes");

  // 4. What the header says, against what the container holds.
  auto described = index.metadata.find(std::string(kHeaderKey));
  if (described == index.metadata.end() || index.metadata.size() != 2) return Damaged("unexpected metadata keys");
  std::map<std::string, uint32_t> crcs;
  Artifact artifact;
  STILLHOUSE_ASSIGN_OR_RETURN(artifact.header_, HeaderFromJson(described->second, &crcs));
  const ArtifactHeader& h = artifact.header_;
  // Counted before the list is made: a small file must not cost the memory of a large promise.
  const size_t count = size_t{h.layers} * (2 + h.has_beta + h.has_positions);
  if (count != index.entries.size() || count != crcs.size())
    return Damaged("the sections are not those that the header promises");
  std::vector<Expected> expected = ExpectedSections(h);
  for (size_t i = 0; i < expected.size(); ++i) {
    const SafetensorsEntry& entry = index.entries[i];
    auto crc = crcs.find(entry.name);
    if (entry.name != expected[i].name || entry.dtype != expected[i].dtype || entry.shape != expected[i].shape ||
        crc == crcs.end()) {
      return Damaged("the sections are not those that the header promises");
    }
    if (crc->second != computed[i]) return Damaged(StrCat("section ", entry.name, " does not match its CRC32C"));
    artifact.sections_.push_back(
        {entry.name, entry.dtype, entry.shape, entry.end - entry.begin, index.data_begin + entry.begin, crc->second});
  }
  artifact.file_ = std::move(file);
  return artifact;
}

const Artifact::Section* Artifact::Find(std::string_view name) const {
  for (const Section& section : sections_) {
    if (section.name == name) return &section;
  }
  return nullptr;
}

absl::Status Artifact::Read(const Section& section, absl::Span<char> out) const {
  if (out.size() != section.size) return absl::InvalidArgumentError("the buffer has not the section's size");
  STILLHOUSE_RETURN_IF_ERROR(file_->Read(section.offset, section.size, out.data()));
  if (Crc32c({out.data(), out.size()}) != section.crc32c) {
    return Damaged(StrCat("section ", section.name, " changed on disk since it was written"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParsedArtifact> ParseArtifact(std::string_view file) {
  STILLHOUSE_ASSIGN_OR_RETURN(Artifact artifact, OpenArtifact(std::make_shared<MemoryFile>(file)));
  ParsedArtifact parsed;
  parsed.header = artifact.header();
  for (const Artifact::Section& s : artifact.sections()) {
    parsed.sections.push_back({s.name, s.dtype, s.shape, file.substr(s.offset, s.size)});
  }
  return parsed;
}

absl::Status CheckFingerprints(const ArtifactFingerprints& artifact, const ArtifactFingerprints& server) {
  std::string differing;
  auto compare = [&](std::string_view name, const std::string& a, const std::string& b) {
    if (a == b) return;
    absl::StrAppend(&differing, differing.empty() ? "" : "; ", ToAbsl(name), " ",
                    absl::Utf8SafeCHexEscape(a.substr(0, 80)), " where this server has ",
                    absl::Utf8SafeCHexEscape(b.substr(0, 80)));
  };
  compare("model", artifact.model, server.model);
  compare("tokenizer", artifact.tokenizer, server.tokenizer);
  compare("chat_template", artifact.chat_template, server.chat_template);
  compare("rope_layout", artifact.rope_layout, server.rope_layout);
  compare("rope_scaling", artifact.rope_scaling, server.rope_scaling);
  compare("dtype", artifact.dtype, server.dtype);
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      StrCat("the cache was made for another model or format (", differing, "): build it again with this server"));
}

}  // namespace stillhouse
