#ifndef STILLHOUSE_SERVER_LOAD_LLAMA_GGUF_H_
#define STILLHOUSE_SERVER_LOAD_LLAMA_GGUF_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/load/gguf.h"
#include "server/model/config.h"
#include "server/model/weights.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"

namespace stillhouse {

// Models of the Llama family in GGUF files: the architectures `llama` (RoPE pairs interleaved), `qwen2` (biases of q, k
// and v) and `qwen3` (norms of q and k per head), dense, with tied or own output embeddings.

// The hyperparameters, checked for sense (counts within bounds, heads a multiple of KV heads, an even head size, finite
// positive eps and theta) but not against the tensors; the RoPE frequencies include linear and YaRN scaling and the
// divisors of `rope_freqs.weight`. UNIMPLEMENTED for another architecture or a mixture of experts, INVALID_ARGUMENT
// names the key that is wrong.
absl::StatusOr<ModelConfig> ModelConfigFromGguf(const GgufFile& file);

// The parameters as they lie in the file: tensors are views that keep it mapped, quantised ones stay quantised. Every
// tensor has the shape that the hyperparameters give it, and the file has no tensor that the architecture does not use.
// The fingerprint is the SHA-256 of the whole file (this reads all of it). Not yet prepared for a backend:
// FinishWeights does that.
absl::StatusOr<Weights> WeightsFromGguf(const std::shared_ptr<const GgufFile>& file);

// Everything that serving needs of one file.
struct GgufModel {
  std::shared_ptr<const Weights> weights;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat;  // refers to the tokenizer; null if the model's template is not known here
  absl::Status chat_status;            // then says why
};

// Opens, checks and prepares a model file. The context needs a backend and must outlive the model's use. With a
// `random_shape` (load/random_weights.h) the file gives tokenizer and template only, and the parameters are generated.
// `admit`, if given, is asked before any parameter is put on the device; what it refuses is not loaded.
absl::StatusOr<GgufModel> LoadGgufModel(const Context& ctx, const std::string& path,
                                        const std::string& random_shape = "",
                                        const std::function<absl::Status(const ModelConfig&)>& admit = nullptr);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_LOAD_LLAMA_GGUF_H_
