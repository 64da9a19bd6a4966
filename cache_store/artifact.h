#ifndef STILLHOUSE_CACHE_STORE_ARTIFACT_H_
#define STILLHOUSE_CACHE_STORE_ARTIFACT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache_store/env.h"

namespace stillhouse {

// A cache artifact: the key/value memory of one corpus as one safetensors file that Python can open. Tensors, for every
// layer N from 0: layer.N.k and layer.N.v [kv_heads, slots, head_dim]; layer.N.beta [kv_heads, slots] F32 if has_beta;
// layer.N.positions [kv_heads, slots] I32 if has_positions. FORMAT.md is the exact page.

inline constexpr int kArtifactVersion = 1;

// What a memory must share with the model that reads it. Strings are compared byte for byte; who makes them decides
// what they hash (the model room: weights and configuration, vocabulary and merges, template).
struct ArtifactFingerprints {
  std::string model;
  std::string tokenizer;
  std::string chat_template;
  std::string rope_layout;   // "interleaved" or "half"
  std::string rope_scaling;  // canonical text: kind, theta, rotary width, factors
  std::string dtype;         // element type of k and v: F32, F16 or BF16
  friend bool operator==(const ArtifactFingerprints&, const ArtifactFingerprints&) = default;
};

// Where the slots' keys go when the memory is composed with others.
enum class PositionRule {
  kKeep,      // keys stay at their own positions; the memory's logical length is what follows it
  kRerotate,  // keys may be re-rotated to follow the segments before them
};

struct ArtifactHeader {
  ArtifactFingerprints fingerprints;
  std::string method;  // CARTRIDGE, STILL, ATTENTION_MATCHING, FULL, …
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t slots = 0;           // p: stored K/V rows per head
  uint64_t logical_length = 0;  // positions that the slots stand for; a sequence continues at this position
  PositionRule position_rule = PositionRule::kKeep;
  bool has_bos =
      false;  // slot 0 is the column of the text's first token: BOS, or what a template without one begins with
  bool has_beta = false;
  bool has_positions = false;  // per-slot key positions are stored (else slot i sits at position i)
  uint32_t frozen_slots = 0;
  uint64_t training_horizon = 0;  // longest corpus, in tokens, that the method was made for; 0: no limit

  // Provenance.
  std::string corpus_sha256;  // of the corpus' bytes
  uint64_t corpus_tokens = 0;
  std::string hyperparameters_json = "{}";  // JSON objects, kept as they are
  std::string versions_json = "{}";
  std::string quality_json = "{}";
  int64_t create_unix_micros = 0;
};

struct ArtifactSection {
  std::string name;   // layer.N.k, …
  std::string dtype;  // safetensors' names
  std::vector<uint64_t> shape;
  std::string_view bytes;  // little-endian, row-major; not owned
};

// Receives consecutive pieces of the file.
using ByteSink = std::function<absl::Status(std::string_view)>;

// Writes the file piece by piece without a second copy of the sections (two passes: checksums, then bytes).
// INVALID_ARGUMENT if header and sections do not make an artifact that OpenArtifact accepts. Section order does not
// matter: the file has the canonical one (by layer; k, v, beta, positions).
absl::Status WriteArtifact(const ArtifactHeader& header, std::vector<ArtifactSection> sections, const ByteSink& sink);
absl::StatusOr<std::string> SerializeArtifact(const ArtifactHeader& header, std::vector<ArtifactSection> sections);

// An artifact in memory; `sections` point into the bytes given. Everything verified (both checksums).
struct ParsedArtifact {
  ArtifactHeader header;
  std::vector<ArtifactSection> sections;  // canonical order
};
absl::StatusOr<ParsedArtifact> ParseArtifact(std::string_view file);

// An artifact in a file, read by section. Immutable, thread-safe.
class Artifact {
 public:
  struct Section {
    std::string name;
    std::string dtype;
    std::vector<uint64_t> shape;
    uint64_t size = 0;    // bytes
    uint64_t offset = 0;  // in the file
    uint32_t crc32c = 0;
  };

  const ArtifactHeader& header() const { return header_; }
  const std::vector<Section>& sections() const { return sections_; }
  // nullptr if the artifact has no such section.
  const Section* Find(std::string_view name) const;
  // Fills `out` (exactly section.size bytes) and checks the section's CRC32C: DATA_LOSS if the bytes on disk have
  // changed since they were written, and then `out` must not be used.
  absl::Status Read(const Section& section, absl::Span<char> out) const;

 private:
  friend absl::StatusOr<Artifact> OpenArtifact(std::shared_ptr<ReadableFile> file);
  ArtifactHeader header_;
  std::vector<Section> sections_;
  std::shared_ptr<ReadableFile> file_;
};

// Reads the whole file once and validates everything: container, header, every section's CRC32C, the whole-file
// SHA-256. DATA_LOSS for any damage or for a file that is no artifact; FAILED_PRECONDITION for an intact one of a newer
// version.
absl::StatusOr<Artifact> OpenArtifact(std::shared_ptr<ReadableFile> file);

// OK, or FAILED_PRECONDITION naming each fingerprint that differs.
absl::Status CheckFingerprints(const ArtifactFingerprints& artifact, const ArtifactFingerprints& server);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_ARTIFACT_H_
