#include "server/load/random_weights.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/base/sha256.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "kernels/ops/random_fill.h"

namespace stillhouse {
namespace {

ModelConfig Llama31_8b() {
  ModelConfig c;
  c.architecture = "llama";
  c.layers = 32;
  c.hidden = 4096;
  c.heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.ffn = 14336;
  c.vocabulary = 128256;
  c.context_length = 131072;
  c.norm_eps = 1e-5f;
  c.rope.rope_dim = c.head_dim;
  c.rope.inv_freq = RopeFrequencies(500000.0, c.head_dim);
  ApplyLlama3Scaling(/*factor=*/8, /*low_freq_factor=*/1, /*high_freq_factor=*/4, /*original_context=*/8192,
                     c.rope.inv_freq);
  return c;
}

ModelConfig Qwen3_4b() {
  ModelConfig c;
  c.architecture = "qwen3";
  c.layers = 36;
  c.hidden = 2560;
  c.heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.ffn = 9728;
  c.vocabulary = 151936;
  c.context_length = 40960;
  c.norm_eps = 1e-6f;
  c.tied_embeddings = true;
  c.rope.rope_dim = c.head_dim;
  c.rope.inv_freq = RopeFrequencies(1000000.0, c.head_dim);
  return c;
}

ModelConfig SmolLm2_135m() {
  ModelConfig c;
  c.architecture = "llama";
  c.layers = 30;
  c.hidden = 576;
  c.heads = 9;
  c.kv_heads = 3;
  c.head_dim = 64;
  c.ffn = 1536;
  c.vocabulary = 49152;
  c.context_length = 8192;
  c.norm_eps = 1e-5f;
  c.tied_embeddings = true;
  c.rope.layout = RopeLayout::kInterleaved;
  c.rope.rope_dim = c.head_dim;
  c.rope.inv_freq = RopeFrequencies(100000.0, c.head_dim);
  return c;
}

constexpr std::pair<const char*, ModelConfig (*)()> kShapes[] = {
    {"llama-3.1-8b", Llama31_8b}, {"qwen3-4b", Qwen3_4b}, {"smollm2-135m", SmolLm2_135m}};

// Each matrix has a seed of its own, in the order of the calls.
class Generator {
 public:
  Generator(const Context& ctx, uint64_t seed) : ctx_(ctx), seed_(seed << 20) {}

  Tensor Matrix(int64_t rows, int64_t columns, double scale) {
    const Tensor out = ctx_.Empty(DType::kBF16, {rows, columns});
    RandomFill(ctx_, {out, static_cast<float>(scale), seed_++});
    return out;
  }

  Tensor Ones(int64_t size) const { return ctx_.Floats(std::vector<float>(static_cast<size_t>(size), 1.0f), {size}); }

 private:
  Context ctx_;
  uint64_t seed_;
};

}  // namespace

std::vector<std::string> RandomWeightShapes() {
  std::vector<std::string> names;
  for (const auto& [name, config] : kShapes) names.emplace_back(name);
  return names;
}

absl::StatusOr<ModelConfig> RandomWeightConfig(const std::string& shape, uint64_t seed) {
  for (const auto& [name, make] : kShapes) {
    if (shape != name) continue;
    ModelConfig config = make();
    config.name = StrCat(name, " (generated weights, seed ", seed, ")");
    return config;
  }
  return absl::InvalidArgumentError(
      StrCat("there is no shape '", shape, "'; use one of ", absl::StrJoin(RandomWeightShapes(), ", ")));
}

absl::StatusOr<std::shared_ptr<const Weights>> RandomWeights(const Context& ctx, const std::string& shape,
                                                             uint64_t seed) {
  Weights weights;
  STILLHOUSE_ASSIGN_OR_RETURN(weights.config, RandomWeightConfig(shape, seed));
  const ModelConfig& c = weights.config;
  const double wide = 0.02, narrow = wide / std::sqrt(2.0 * static_cast<double>(c.layers));
  const int64_t q_rows = c.heads * c.head_dim, kv_rows = c.kv_heads * c.head_dim;
  Generator generator(ctx, seed);
  weights.embedding = generator.Matrix(c.vocabulary, c.hidden, wide);
  weights.output = c.tied_embeddings ? weights.embedding : generator.Matrix(c.vocabulary, c.hidden, wide);
  weights.final_norm = generator.Ones(c.hidden);
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    LayerWeights w;
    w.attn_norm = generator.Ones(c.hidden);
    w.ffn_norm = generator.Ones(c.hidden);
    const Tensor qkv = generator.Matrix(q_rows + 2 * kv_rows, c.hidden, wide);
    w.q = qkv.Slice(0, 0, q_rows);
    w.k = qkv.Slice(0, q_rows, q_rows + kv_rows);
    w.v = qkv.Slice(0, q_rows + kv_rows, q_rows + 2 * kv_rows);
    if (c.architecture == "qwen3") {
      w.q_norm = generator.Ones(c.head_dim);
      w.k_norm = generator.Ones(c.head_dim);
    }
    w.o = generator.Matrix(c.hidden, q_rows, narrow);
    const Tensor gate_up = generator.Matrix(2 * c.ffn, c.hidden, wide);
    w.gate = gate_up.Slice(0, 0, c.ffn);
    w.up = gate_up.Slice(0, c.ffn, 2 * c.ffn);
    w.down = generator.Matrix(c.hidden, c.ffn, narrow);
    weights.layers.push_back(std::move(w));
  }
  weights.fingerprint = Sha256Hex(StrCat("generated ", shape, " ", seed));
  return FinishWeights(ctx, std::move(weights));
}

}  // namespace stillhouse
