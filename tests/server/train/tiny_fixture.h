// The tiny model on the backend under test, and conversations about nothing.
#ifndef STILLHOUSE_TESTS_SERVER_TRAIN_TINY_FIXTURE_H_
#define STILLHOUSE_TESTS_SERVER_TRAIN_TINY_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "server/load/llama_gguf.h"
#include "server/model/forward.h"
#include "server/train/conversation.h"
#include "tests/support/test_backend.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {

class TinyModelTest : public ::testing::Test {
 protected:
  TinyModelTest() {
    CpuBackendOptions options;
    options.threads = 2;
    backend_ = stillhouse::testing::MakeTestBackend(options);
    ctx_.backend = backend_.get();
    absl::StatusOr<GgufModel> model = LoadGgufModel(ctx_, stillhouse::testing::WriteTinyModel());
    STILLHOUSE_CHECK(model.ok()) << model.status().ToString();
    model_ = *std::move(model);
    pool_ = std::make_unique<PagePool>(ctx_, model_.weights->config, int64_t{1} << 26);
  }

  std::vector<int32_t> RandomTokens(int64_t count, uint32_t seed) const {
    std::mt19937 rng(seed);
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>(17 + rng() % 200);
    return ids;
  }

  std::shared_ptr<Memory> Prefilled(const std::vector<int32_t>& tokens) {
    SequenceState state({}, pool_.get());
    STILLHOUSE_CHECK(Prefill(ctx_, *model_.weights, &state, tokens).ok());
    return state.Freeze(ctx_, model_.weights->config);
  }

  std::vector<Conversation> Conversations(int count, uint32_t seed) {
    std::vector<Conversation> out;
    for (int i = 0; i < count; ++i) {
      Conversation c;
      c.prompt = RandomTokens(3 + i % 4, seed + 2 * static_cast<uint32_t>(i));
      c.answer = RandomTokens(4 + i % 5, seed + 2 * static_cast<uint32_t>(i) + 1);
      out.push_back(std::move(c));
    }
    return out;
  }

  std::unique_ptr<Backend> backend_;
  Context ctx_;
  GgufModel model_;
  std::unique_ptr<PagePool> pool_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_SERVER_TRAIN_TINY_FIXTURE_H_
