// A model of random weights that is loaded, run and trained in milliseconds.
#ifndef STILLHOUSE_TESTS_SUPPORT_TINY_MODEL_H_
#define STILLHOUSE_TESTS_SUPPORT_TINY_MODEL_H_

#include <cstdint>
#include <string>

#include "server/load/gguf_types.h"
#include "server/token/tokenizer.h"
#include "tests/support/gguf_writer.h"

namespace stillhouse::testing {

struct TinyModelOptions {
  uint64_t seed = 1;
  std::string architecture = "llama";  // "qwen2" adds biases, "qwen3" norms of q and k
  uint32_t layers = 2;
  uint32_t hidden = 64;
  uint32_t heads = 4;
  uint32_t kv_heads = 2;
  uint32_t head_dim = 16;
  uint32_t ffn = 128;
  uint32_t context = 512;
  float rope_theta = 10000.0f;
  bool rope_freqs = false;             // Llama-3 frequency divisors
  bool tied = true;                    // no output.weight
  GgufType matrices = GgufType::kF32;  // F32, F16, Q8_0 or Q4_1; norms and biases are F32
  GgufType embedding = GgufType::kF32;
};

// SmolLM2's 17 control tokens with their ids, the 256 bytes, and some merges of common English words; smollm
// pre-tokenizer, ChatML template with SmolLM2's default system message.
TokenizerData TinyTokenizerData();

// A writer that holds the whole model; tests may add to it or break it.
GgufWriter TinyModel(const TinyModelOptions& options = {});

// Writes the model to a new file in $TMPDIR (or /tmp) and returns its path. The file is removed when the process ends.
std::string WriteTinyModel(const TinyModelOptions& options = {});

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SUPPORT_TINY_MODEL_H_
