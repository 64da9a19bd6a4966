// The parameters of a model, in the form that the backend's kernels read.
#ifndef STILLHOUSE_SERVER_MODEL_WEIGHTS_H_
#define STILLHOUSE_SERVER_MODEL_WEIGHTS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops/context.h"
#include "server/model/config.h"

namespace stillhouse {

// Matrices are [outputs, inputs], of any dtype that Linear accepts; vectors are f32. Absent ones are empty tensors.
struct LayerWeights {
  Tensor attn_norm;  // [hidden]
  // Either one fused matrix of (heads + 2·kv_heads)·head_dim rows in the order q, k, v, or the three.
  Tensor qkv;
  Tensor q, k, v;
  Tensor q_bias, k_bias, v_bias;
  Tensor q_norm, k_norm;  // [head_dim], over each head, before RoPE (Qwen3)
  Tensor o;               // [hidden, heads·head_dim]
  Tensor ffn_norm;        // [hidden]
  Tensor gate_up;         // fused: [2·ffn, hidden], gate first; or the two
  Tensor gate, up;
  Tensor down;  // [hidden, ffn]
};

// Immutable once loaded; shared by the engine and every trainer.
struct Weights {
  ModelConfig config;
  Tensor embedding;  // [vocabulary, hidden]
  std::vector<LayerWeights> layers;
  Tensor final_norm;
  Tensor output;            // [vocabulary, hidden]; the embedding itself where they are tied
  std::string fingerprint;  // SHA-256 of the file they came from, lower-case hex

  int64_t bytes() const;
};

// Joins matrices of one dtype row by row (q, k, v; gate, up), hands every matrix to the backend's PrepareWeight, and
// checks shapes against the config and that the backend has every op that Forward needs. INVALID_ARGUMENT names the
// tensor that does not fit; UNIMPLEMENTED names the missing ops.
absl::StatusOr<std::shared_ptr<const Weights>> FinishWeights(const Context& ctx, Weights raw);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_MODEL_WEIGHTS_H_
