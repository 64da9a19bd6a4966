// The shape of a model.
#ifndef STILLHOUSE_SERVER_MODEL_CONFIG_H_
#define STILLHOUSE_SERVER_MODEL_CONFIG_H_

#include <cstdint>
#include <string>

#include "kernels/ops/rope.h"

namespace stillhouse {

// A decoder of the Llama family: pre-norm attention with grouped KV heads and RoPE, SwiGLU, RMSNorm; Qwen adds biases
// or per-head norms of q and k (present if the weights are).
struct ModelConfig {
  std::string name;          // for people: "SmolLM2 135M 8k Lc100K Mix1 Ep2"
  std::string architecture;  // "llama", "qwen2", "qwen3"
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn = 0;
  int64_t vocabulary = 0;      // rows of the embedding; ids that the tokenizer lacks are never drawn
  int64_t context_length = 0;  // positions
  float norm_eps = 1e-5f;
  bool tied_embeddings = false;
  RopeConfig rope;

  float attention_scale() const;  // 1/√head_dim
  // Key/value bytes of one slot: 2 · layers · kv_heads · head_dim · bytes per element.
  int64_t kv_bytes_per_slot(int64_t element_bytes = 4) const {
    return 2 * layers * kv_heads * head_dim * element_bytes;
  }
  // "half" or "interleaved", as in artifact fingerprints.
  std::string RopeLayoutName() const;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_MODEL_CONFIG_H_
