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

// A known shape; what all share is in ConfigOf.
struct KnownShape {
  const char* name;
  const char* architecture;
  int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocabulary, context_length;
  float norm_eps;
  bool tied_embeddings;
  RopeLayout layout;
  double rope_base;
  bool llama3_scaling;
};

constexpr KnownShape kShapes[] = {
    {"llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 1e-5f, false, RopeLayout::kHalf, 500000.0,
     true},
    {"qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, 1e-6f, true, RopeLayout::kHalf, 1000000.0, false},
    {"smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5f, true, RopeLayout::kInterleaved, 100000.0,
     false}};

ModelConfig ConfigOf(const KnownShape& shape) {
  ModelConfig c;
  c.architecture = shape.architecture;
  c.layers = shape.layers;
  c.hidden = shape.hidden;
  c.heads = shape.heads;
  c.kv_heads = shape.kv_heads;
  c.head_dim = shape.head_dim;
  c.ffn = shape.ffn;
  c.vocabulary = shape.vocabulary;
  c.context_length = shape.context_length;
  c.norm_eps = shape.norm_eps;
  c.tied_embeddings = shape.tied_embeddings;
  c.rope.layout = shape.layout;
  c.rope.rope_dim = shape.head_dim;
  c.rope.inv_freq = RopeFrequencies(shape.rope_base, shape.head_dim);
  if (shape.llama3_scaling) {
    ApplyLlama3Scaling(/*factor=*/8, /*low_freq_factor=*/1, /*high_freq_factor=*/4, /*original_context=*/8192,
                       c.rope.inv_freq);
  }
  return c;
}

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
  for (const KnownShape& known : kShapes) names.emplace_back(known.name);
  return names;
}

absl::StatusOr<ModelConfig> RandomWeightConfig(const std::string& shape, uint64_t seed) {
  for (const KnownShape& known : kShapes) {
    if (shape != known.name) continue;
    ModelConfig config = ConfigOf(known);
    config.name = StrCat(known.name, " (generated weights, seed ", seed, ")");
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
