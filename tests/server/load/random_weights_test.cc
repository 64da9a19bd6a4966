#include "server/load/random_weights.h"

#include <gtest/gtest.h>

#include <cmath>

#include "server/load/llama_gguf.h"
#include "server/model/forward.h"
#include "tests/support/test_backend.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

TEST(RandomWeights, HaveThePublishedShapes) {
  int64_t parameters[] = {8030261248, 4022468096, 134515008};
  const std::vector<std::string> shapes = RandomWeightShapes();
  ASSERT_EQ(shapes.size(), 3u);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto config = RandomWeightConfig(shapes[i]);
    ASSERT_TRUE(config.ok()) << config.status();
    const ModelConfig& c = *config;
    const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    const int64_t norms = 2 * c.hidden + (c.architecture == "qwen3" ? 2 * c.head_dim : 0);
    const int64_t layer = c.hidden * (2 * q + 2 * kv) + 3 * c.hidden * c.ffn + norms;
    EXPECT_EQ(c.vocabulary * c.hidden * (c.tied_embeddings ? 1 : 2) + c.layers * layer + c.hidden, parameters[i])
        << shapes[i];
    EXPECT_NE(c.name.find("generated"), std::string::npos) << c.name;
  }
  const auto unknown = RandomWeightConfig("gpt-5");
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.status().message().find("llama-3.1-8b"), absl::string_view::npos);
}

// Llama-3's scaling leaves fast pairs alone, divides slow ones by eight, and is between them smooth.
TEST(RandomWeights, ScaleTheRotationOfLlama31) {
  const auto config = RandomWeightConfig("llama-3.1-8b");
  ASSERT_TRUE(config.ok());
  const std::vector<double>& f = config->rope.inv_freq;
  ASSERT_EQ(f.size(), 64u);
  EXPECT_DOUBLE_EQ(f[0], 1.0);
  EXPECT_NEAR(f[63], std::pow(500000.0, -126.0 / 128.0) / 8, 1e-15);
  for (size_t j = 1; j < f.size(); ++j) EXPECT_LT(f[j], f[j - 1]);
}

TEST(RandomWeights, RunOnTheBackendAndTakeTheFilesTokenizer) {
  const auto backend = testing::MakeTestBackend();
  const Context ctx{backend.get()};
  const std::string path = testing::WriteTinyModel({});
  const auto model = LoadGgufModel(ctx, path, "smollm2-135m");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->weights->config.name, "smollm2-135m (generated weights, seed 1)");
  EXPECT_NE(model->tokenizer, nullptr);
  SequenceState state({});
  Batch batch;
  const std::vector<int32_t> ids = {1, 2, 3, 49151};
  batch.Add(&state, ids, Batch::Outputs::kAll);
  const std::vector<float> logits =
      ctx.ToFloats(Logits(ctx, *model->weights, Forward(ctx, *model->weights, batch).hidden));
  double squares = 0;
  for (float z : logits) squares += double{z} * z;
  const double rms = std::sqrt(squares / static_cast<double>(logits.size()));
  // Hidden states of norm √576 against rows of deviation 0.02.
  EXPECT_NEAR(rms, 0.02 * std::sqrt(576.0), 0.1);
  EXPECT_EQ(LoadGgufModel(ctx, path, "none").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace stillhouse
