#include "tests/cache_store/sample_artifact.h"

#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"

namespace stillhouse {

SampleArtifact MakeSampleArtifact(int seed) {
  SampleArtifact a;
  ArtifactHeader& h = a.header;
  h.fingerprints = {"model-1", "tokenizer-1", "template-1", "interleaved", "none theta=100000 width=4", "F16"};
  h.method = "CARTRIDGE";
  h.layers = 2;
  h.kv_heads = 3;
  h.head_dim = 4;
  h.slots = 5;
  h.logical_length = 77;
  h.position_rule = PositionRule::kRerotate;
  h.has_bos = true;
  h.has_beta = true;
  h.has_positions = true;
  h.frozen_slots = 1;
  h.training_horizon = 8192;
  h.corpus_sha256 = Sha256Hex("the corpus");
  h.corpus_tokens = 77;
  h.hyperparameters_json = R"({"lr":0.02,"steps":100})";
  h.versions_json = R"({"stillhouse":"0.1.0"})";
  h.quality_json = R"({"recovered":0.93,"rows":[{"name":"full","nll":1.5}]})";
  h.create_unix_micros = 1700000000000000;
  auto add = [&](std::string name, std::string dtype, std::vector<uint64_t> shape, size_t element) {
    size_t size = element;
    for (uint64_t dim : shape) size *= dim;
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size; ++i)
      bytes[i] = static_cast<char>(i * 7 + a.buffers.size() * 31 + static_cast<size_t>(seed));
    a.buffers.push_back(std::move(bytes));
    a.sections.push_back({std::move(name), std::move(dtype), std::move(shape), {}});
  };
  for (int layer = 0; layer < 2; ++layer) {
    const std::string prefix = "layer." + std::to_string(layer) + ".";
    add(prefix + "k", "F16", {3, 5, 4}, 2);
    add(prefix + "v", "F16", {3, 5, 4}, 2);
    add(prefix + "beta", "F32", {3, 5}, 4);
    add(prefix + "positions", "I32", {3, 5}, 4);
  }
  for (size_t i = 0; i < a.sections.size(); ++i) a.sections[i].bytes = a.buffers[i];
  return a;
}

std::string SampleArtifactFile(int seed) {
  const SampleArtifact a = MakeSampleArtifact(seed);
  absl::StatusOr<std::string> file = SerializeArtifact(a.header, a.sections);
  STILLHOUSE_CHECK(file.ok()) << file.status();
  return *file;
}

}  // namespace stillhouse
