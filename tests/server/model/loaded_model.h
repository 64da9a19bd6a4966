// A model with its tokenizer and template on the backend under test.
#ifndef STILLHOUSE_TESTS_SERVER_MODEL_LOADED_MODEL_H_
#define STILLHOUSE_TESTS_SERVER_MODEL_LOADED_MODEL_H_

#include <memory>
#include <string>

#include "server/load/llama_gguf.h"
#include "server/token/chat_template.h"
#include "tests/support/default_model.h"
#include "tests/support/test_backend.h"
#include "tests/support/tiny_model.h"

namespace stillhouse::testing {

struct LoadedModel {
  std::unique_ptr<Backend> backend;
  Context ctx;
  std::shared_ptr<const Weights> weights;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat;

  static LoadedModel Open(const std::string& path, const CpuBackendOptions& options = {}) {
    LoadedModel m;
    m.backend = MakeTestBackend(options);
    m.ctx.backend = m.backend.get();
    auto loaded = LoadGgufModel(m.ctx, path);
    STILLHOUSE_CHECK(loaded.ok()) << loaded.status().ToString();
    m.weights = loaded->weights;
    m.tokenizer = std::move(loaded->tokenizer);
    m.chat = std::move(loaded->chat);
    return m;
  }
  static LoadedModel Default() { return Open(DefaultModelPath()); }
  static LoadedModel Tiny(const TinyModelOptions& options = {}) { return Open(WriteTinyModel(options)); }
};

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SERVER_MODEL_LOADED_MODEL_H_
