#include "server/load/llama_gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "server/load/tokenizer_from_gguf.h"
#include "tests/support/default_model.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

using testing::GgufWriter;
using testing::TinyModel;
using testing::TinyModelOptions;

// Keeps the bytes of a written model alive beside the parsed file.
struct Written {
  std::string bytes;
  std::shared_ptr<const GgufFile> file;

  explicit Written(const GgufWriter& writer) : bytes(writer.Serialize()) {
    auto parsed = GgufFile::Parse(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    if (parsed.ok()) file = *parsed;
  }
};

void ExpectRefused(const GgufWriter& writer, const std::string& because,
                   absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  const Written written(writer);
  ASSERT_NE(written.file, nullptr);
  const auto weights = WeightsFromGguf(written.file);
  EXPECT_EQ(weights.status().code(), code) << because;
  EXPECT_NE(std::string(weights.status().message()).find(because), std::string::npos) << weights.status();
}

template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

TEST(LlamaGgufTest, ReadsATinyModel) {
  const Written written(TinyModel());
  const auto weights = WeightsFromGguf(written.file);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const ModelConfig& c = weights->config;
  EXPECT_EQ(c.architecture, "llama");
  EXPECT_EQ(c.name, "Tiny");
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.hidden, 64);
  EXPECT_EQ(c.heads, 4);
  EXPECT_EQ(c.kv_heads, 2);
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.ffn, 128);
  EXPECT_EQ(c.context_length, 512);
  EXPECT_FLOAT_EQ(c.norm_eps, 1e-5f);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(c.rope.layout, RopeLayout::kInterleaved);
  EXPECT_EQ(c.rope.rope_dim, 16);
  ASSERT_EQ(c.rope.inv_freq.size(), 8u);
  EXPECT_DOUBLE_EQ(c.rope.inv_freq[0], 1.0);
  EXPECT_NEAR(c.rope.inv_freq[4], 0.01, 1e-15);  // 10000^(-8/16)
  const auto tokenizer = TokenizerFromGguf(*written.file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), c.vocabulary);
  ASSERT_EQ(weights->layers.size(), 2u);
  const LayerWeights& layer = weights->layers[1];
  EXPECT_EQ(layer.q.shape(), (Shape{64, 64}));
  EXPECT_EQ(layer.k.shape(), (Shape{32, 64}));
  EXPECT_EQ(layer.down.shape(), (Shape{64, 128}));
  EXPECT_EQ(layer.gate.shape(), (Shape{128, 64}));
  EXPECT_FALSE(layer.q_bias.defined());
  EXPECT_FALSE(layer.q_norm.defined());
  EXPECT_EQ(weights->output.raw(), weights->embedding.raw());
  EXPECT_EQ(weights->fingerprint, written.file->Sha256());
}

TEST(LlamaGgufTest, TensorsAreViewsOfTheFileInItsTypes) {
  TinyModelOptions options;
  options.matrices = GgufType::kQ4_1;
  options.embedding = GgufType::kQ8_0;
  options.tied = false;
  const Written written(TinyModel(options));
  const auto weights = WeightsFromGguf(written.file);
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(weights->embedding.dtype(), DType::kQ8_0);
  EXPECT_EQ(weights->output.dtype(), DType::kQ4_1);
  EXPECT_FALSE(weights->config.tied_embeddings);
  EXPECT_EQ(weights->layers[0].attn_norm.dtype(), DType::kF32);
  const GgufTensor* up = written.file->FindTensor("blk.1.ffn_up.weight");
  EXPECT_EQ(weights->layers[1].up.raw(), up->data.data());
  EXPECT_EQ(weights->layers[1].up.bytes(), static_cast<int64_t>(up->data.size()));
}

TEST(LlamaGgufTest, AMappedFileLivesAsLongAsItsTensors) {
  const std::string path = testing::WriteTinyModel();
  std::optional<Tensor> norm;
  std::weak_ptr<const GgufFile> watch;
  {
    auto file = GgufFile::Open(path);
    ASSERT_TRUE(file.ok()) << file.status();
    watch = *file;
    auto weights = WeightsFromGguf(*file);
    ASSERT_TRUE(weights.ok()) << weights.status();
    norm = weights->final_norm;
  }
  EXPECT_FALSE(watch.expired());
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += norm->f32()[i];
  EXPECT_NEAR(sum / 64, 1.0f, 0.2f);
  norm.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(LlamaGgufTest, SeedsDecideTheWeights) {
  EXPECT_EQ(TinyModel({.seed = 3}).Serialize(), TinyModel({.seed = 3}).Serialize());
  EXPECT_NE(TinyModel({.seed = 3}).Serialize(), TinyModel({.seed = 4}).Serialize());
}

TEST(LlamaGgufTest, QwenArchitectures) {
  TinyModelOptions options;
  options.architecture = "qwen2";
  const Written qwen2(TinyModel(options));
  const auto biased = WeightsFromGguf(qwen2.file);
  ASSERT_TRUE(biased.ok()) << biased.status();
  EXPECT_EQ(biased->config.rope.layout, RopeLayout::kHalf);
  EXPECT_EQ(biased->layers[0].q_bias.shape(), (Shape{64}));
  EXPECT_EQ(biased->layers[0].v_bias.shape(), (Shape{32}));
  options.architecture = "qwen3";
  options.head_dim = 32;  // not hidden / heads
  const Written qwen3(TinyModel(options));
  const auto normed = WeightsFromGguf(qwen3.file);
  ASSERT_TRUE(normed.ok()) << normed.status();
  EXPECT_EQ(normed->layers[0].k_norm.shape(), (Shape{32}));
  EXPECT_EQ(normed->layers[0].q.shape(), (Shape{128, 64}));
  EXPECT_EQ(normed->layers[0].o.shape(), (Shape{64, 128}));
  // qwen2 without its biases is not qwen2.
  GgufWriter without = TinyModel();
  without.SetString("general.architecture", "qwen2");
  without.RenameKeys("llama.", "qwen2.");
  ExpectRefused(without, "lacks the tensor blk.0.attn_q.bias");
}

TEST(LlamaGgufTest, RopeDivisorsAndScaling) {
  TinyModelOptions options;
  options.rope_freqs = true;
  const Written written(TinyModel(options));
  const auto config = ModelConfigFromGguf(*written.file);
  ASSERT_TRUE(config.ok()) << config.status();
  const std::vector<double> plain = RopeFrequencies(10000, 16);
  EXPECT_DOUBLE_EQ(config->rope.inv_freq[0], plain[0]);
  EXPECT_DOUBLE_EQ(config->rope.inv_freq[7], plain[7] / 8);

  GgufWriter linear = TinyModel();
  linear.AddString("llama.rope.scaling.type", "linear");
  linear.AddF32("llama.rope.scaling.factor", 4);
  const Written scaled(linear);
  const auto scaled_config = ModelConfigFromGguf(*scaled.file);
  ASSERT_TRUE(scaled_config.ok()) << scaled_config.status();
  EXPECT_DOUBLE_EQ(scaled_config->rope.inv_freq[3], plain[3] / 4);

  GgufWriter yarn = TinyModel();
  yarn.AddString("llama.rope.scaling.type", "yarn");
  yarn.AddF32("llama.rope.scaling.factor", 4);
  yarn.AddU32("llama.rope.scaling.original_context_length", 128);
  const Written stretched(yarn);
  const auto yarn_config = ModelConfigFromGguf(*stretched.file);
  ASSERT_TRUE(yarn_config.ok()) << yarn_config.status();
  EXPECT_NEAR(yarn_config->rope.attention_scale, 1 + 0.1 * std::log(4.0), 1e-6);

  GgufWriter other = TinyModel();
  other.AddString("llama.rope.scaling.type", "longrope");
  ExpectRefused(other, "longrope", absl::StatusCode::kUnimplemented);
  GgufWriter bad = TinyModel();
  bad.AddTensor("rope_freqs.weight", {8}, GgufType::kF32, {1, 1, 1, 1, 1, 1, 0, 1});
  ExpectRefused(bad, "rope_freqs.weight");
  GgufWriter wrong_size = TinyModel();
  wrong_size.AddTensor("rope_freqs.weight", {4}, GgufType::kF32, {1, 1, 1, 1});
  ExpectRefused(wrong_size, "rope_freqs.weight");
}

TEST(LlamaGgufTest, AcceptsCountsOf64Bits) {
  GgufWriter writer = TinyModel();
  for (const char* key : {"block_count", "embedding_length", "attention.head_count", "context_length"}) {
    const std::string full = std::string("llama.") + key;
    const uint64_t value = *Written(TinyModel()).file->GetUnsigned(full);
    writer.SetRaw(full, static_cast<uint32_t>(GgufValueType::kU64), Raw(value));
  }
  const Written written(writer);
  EXPECT_TRUE(WeightsFromGguf(written.file).ok());
}

TEST(LlamaGgufTest, RefusesSenselessHyperparameters) {
  const auto u32 = [](const std::string& key, uint32_t value) {
    GgufWriter writer = TinyModel();
    writer.SetRaw("llama." + key, static_cast<uint32_t>(GgufValueType::kU32), Raw(value));
    return writer;
  };
  const auto f32 = [](const std::string& key, float value) {
    GgufWriter writer = TinyModel();
    writer.SetRaw("llama." + key, static_cast<uint32_t>(GgufValueType::kF32), Raw(value));
    return writer;
  };
  for (const uint32_t layers : {0u, 1025u, UINT32_MAX}) ExpectRefused(u32("block_count", layers), "block_count");
  ExpectRefused(u32("block_count", 3), "lacks the tensor blk.2.");
  ExpectRefused(u32("block_count", 1), "which its architecture does not use", absl::StatusCode::kUnimplemented);
  ExpectRefused(u32("embedding_length", 0), "embedding_length");
  ExpectRefused(u32("embedding_length", 128), "token_embd.weight has the shape");
  ExpectRefused(u32("feed_forward_length", 96), "ffn_gate.weight has the shape [128, 64]");
  ExpectRefused(u32("context_length", 0), "context_length");
  ExpectRefused(u32("attention.head_count", 5), "not a multiple of its 2 KV heads");
  ExpectRefused(u32("attention.head_count_kv", 0), "head_count_kv");
  ExpectRefused(u32("attention.head_count_kv", 8), "not a multiple of its 8 KV heads");
  ExpectRefused(u32("attention.head_count_kv", 4), "attn_k.weight has the shape");
  ExpectRefused(u32("attention.key_length", 17), "equal sizes", absl::StatusCode::kUnimplemented);
  GgufWriter odd = u32("attention.key_length", 15);
  odd.SetRaw("llama.attention.value_length", static_cast<uint32_t>(GgufValueType::kU32), Raw(15u));
  ExpectRefused(odd, "odd");
  ExpectRefused(u32("rope.dimension_count", 7), "rope.dimension_count");
  ExpectRefused(u32("rope.dimension_count", 18), "rope.dimension_count");
  for (const float eps : {0.0f, -1e-5f, 1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    ExpectRefused(f32("attention.layer_norm_rms_epsilon", eps), "layer_norm_rms_epsilon");
  }
  for (const float theta : {0.0f, 1.0f, -10000.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    ExpectRefused(f32("rope.freq_base", theta), "rope.freq_base");
  }
  ExpectRefused(u32("expert_count", 8), "mixture of 8 experts", absl::StatusCode::kUnimplemented);
  GgufWriter negative = TinyModel();
  negative.SetRaw("llama.block_count", static_cast<uint32_t>(GgufValueType::kI32), Raw(-2));
  ExpectRefused(negative, "negative");
  GgufWriter text = TinyModel();
  text.SetString("llama.block_count", "two");
  ExpectRefused(text, "not an integer");
}

TEST(LlamaGgufTest, RefusesOtherArchitecturesAndTensors) {
  GgufWriter writer = TinyModel();
  writer.SetString("general.architecture", "mamba");
  ExpectRefused(writer, "mamba", absl::StatusCode::kUnimplemented);
  GgufWriter extra = TinyModel();
  extra.AddTensor("blk.0.attn_output.bias", {64}, GgufType::kF32, std::vector<float>(64));
  ExpectRefused(extra, "blk.0.attn_output.bias", absl::StatusCode::kUnimplemented);
  GgufWriter half_norm = TinyModel();
  half_norm.RemoveTensor("output_norm.weight");
  ExpectRefused(half_norm, "lacks the tensor output_norm.weight");
  half_norm.AddTensor("output_norm.weight", {64}, GgufType::kF16, std::vector<float>(64, 1));
  ExpectRefused(half_norm, "F32 is needed", absl::StatusCode::kUnimplemented);
  GgufWriter empty;
  ExpectRefused(empty, "general.architecture", absl::StatusCode::kNotFound);
}

TEST(LlamaGgufTest, TheTokenizerHasToFit) {
  const auto refuse = [](const std::function<void(GgufWriter*)>& change, const std::string& because,
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    GgufWriter writer = TinyModel();
    change(&writer);
    const Written written(writer);
    const auto tokenizer = TokenizerFromGguf(*written.file);
    EXPECT_EQ(tokenizer.status().code(), code) << because;
    EXPECT_NE(std::string(tokenizer.status().message()).find(because), std::string::npos) << tokenizer.status();
  };
  refuse([](GgufWriter* w) { w->SetString("tokenizer.ggml.model", "llama"); }, "byte-level BPE",
         absl::StatusCode::kUnimplemented);
  refuse([](GgufWriter* w) { w->SetString("tokenizer.ggml.pre", "tekken"); }, "tekken",
         absl::StatusCode::kUnimplemented);
  refuse([](GgufWriter* w) { w->SetRaw("tokenizer.ggml.eos_token_id", 4, Raw(100000u)); }, "EOS");
  refuse([](GgufWriter* w) { w->SetRaw("tokenizer.ggml.bos_token_id", 10, Raw(uint64_t{1} << 40)); }, "bos_token_id");
  refuse([](GgufWriter* w) { w->SetRaw("tokenizer.ggml.token_type", 9, Raw(5u) + Raw<uint64_t>(1) + Raw(1)); },
         "token types");
  refuse([](GgufWriter* w) { w->SetRaw("tokenizer.ggml.token_type", 9, Raw(5u) + Raw<uint64_t>(1) + Raw(77)); },
         "unknown type 77");
  refuse([](GgufWriter* w) { w->SetRaw("tokenizer.ggml.merges", 4, Raw(1u)); }, "array of strings");
  refuse(
      [](GgufWriter* w) {
        w->SetRaw("tokenizer.ggml.merges", 9, Raw(8u) + Raw<uint64_t>(1) + Raw<uint64_t>(2) + "ab");
      },
      "merge 0");
  GgufWriter giant = TinyModel();
  giant.SetString("tokenizer.chat_template", std::string(300 << 10, 'x'));
  EXPECT_EQ(ChatTemplateFromGguf(*Written(giant).file).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LlamaGgufTest, ReadsTheDefaultModel) {
  auto file = GgufFile::Open(testing::DefaultModelPath());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 272u);
  const auto weights = WeightsFromGguf(*file);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const ModelConfig& c = weights->config;
  EXPECT_EQ(c.layers, 30);
  EXPECT_EQ(c.hidden, 576);
  EXPECT_EQ(c.heads, 9);
  EXPECT_EQ(c.kv_heads, 3);
  EXPECT_EQ(c.head_dim, 64);
  EXPECT_EQ(c.ffn, 1536);
  EXPECT_EQ(c.vocabulary, 49152);
  EXPECT_EQ(c.context_length, 8192);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_NEAR(c.rope.inv_freq[1], std::pow(100000.0, -2.0 / 64), 1e-12);
  EXPECT_EQ(weights->embedding.dtype(), DType::kQ8_0);
  EXPECT_EQ(weights->layers[29].down.dtype(), DType::kQ4_1);
  EXPECT_EQ(weights->fingerprint, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
}

}  // namespace
}  // namespace stillhouse
