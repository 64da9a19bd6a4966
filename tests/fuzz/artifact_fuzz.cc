// The safetensors container and the artifact on it. The whole-file digest would stop nearly every mutation at the door,
// so each input is tried as it is and with the digest made right.

#include <cstdint>
#include <string>
#include <string_view>

#include "cache_store/artifact.h"
#include "cache_store/safetensors.h"
#include "cache_store/strict_json.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"

namespace {

constexpr std::string_view kPrefix = "{\"__metadata__\":{\"stillhouse.sha256\":\"";

void TryArtifact(std::string_view file) {
  absl::StatusOr<stillhouse::ParsedArtifact> artifact = stillhouse::ParseArtifact(file);
  if (!artifact.ok()) {
    STILLHOUSE_CHECK(absl::IsDataLoss(artifact.status()) || absl::IsFailedPrecondition(artifact.status()))
        << artifact.status();
    return;
  }
  // What was accepted can be written again, and reads back the same.
  absl::StatusOr<std::string> again = stillhouse::SerializeArtifact(artifact->header, artifact->sections);
  STILLHOUSE_CHECK(again.ok()) << again.status();
  absl::StatusOr<stillhouse::ParsedArtifact> back = stillhouse::ParseArtifact(*again);
  STILLHOUSE_CHECK(back.ok() && back->sections.size() == artifact->sections.size()) << back.status();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  absl::StatusOr<stillhouse::SafetensorsIndex> index = stillhouse::ParseSafetensors(file);
  if (index.ok()) {
    for (const stillhouse::SafetensorsEntry& entry : index->entries) {
      STILLHOUSE_CHECK(entry.begin <= entry.end && entry.end <= size - index->data_begin);
    }
    for (const auto& [key, value] : index->metadata) stillhouse::ParseStrictJson(value).IgnoreError();
  } else {
    STILLHOUSE_CHECK(absl::IsDataLoss(index.status())) << index.status();
  }
  stillhouse::ParseStrictJson(file).IgnoreError();
  TryArtifact(file);
  if (size > 8 + kPrefix.size() + 64 && file.substr(8, kPrefix.size()) == kPrefix) {
    std::string signed_file(file);
    signed_file.replace(8 + kPrefix.size(), 64, std::string(64, '0'));
    signed_file.replace(8 + kPrefix.size(), 64, stillhouse::Sha256Hex(signed_file));
    TryArtifact(signed_file);
  }
  return 0;
}
