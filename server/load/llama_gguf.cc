#include "server/load/llama_gguf.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/load/random_weights.h"
#include "server/load/tokenizer_from_gguf.h"

namespace stillhouse {
namespace {

constexpr uint64_t kMaxLayers = 1024;
constexpr uint64_t kMaxWidth = 1 << 20;  // of hidden, feed-forward and attention rows
constexpr uint64_t kMaxHeads = 4096;
constexpr uint64_t kMaxHeadDim = 4096;
constexpr uint64_t kMaxContext = uint64_t{1} << 27;
constexpr uint64_t kMaxVocabulary = 1 << 22;

absl::Status Invalid(std::string message) { return absl::InvalidArgumentError(std::move(message)); }

std::string Printable(std::string_view text) { return absl::CHexEscape(ToAbsl(text.substr(0, 64))); }

DType DTypeOf(GgufType type) {
  switch (type) {
    case GgufType::kF32:
      return DType::kF32;
    case GgufType::kF16:
      return DType::kF16;
    case GgufType::kBf16:
      return DType::kBF16;
    case GgufType::kQ4_0:
      return DType::kQ4_0;
    case GgufType::kQ4_1:
      return DType::kQ4_1;
    case GgufType::kQ5_0:
      return DType::kQ5_0;
    case GgufType::kQ5_1:
      return DType::kQ5_1;
    case GgufType::kQ8_0:
      return DType::kQ8_0;
    case GgufType::kQ2_K:
      return DType::kQ2_K;
    case GgufType::kQ3_K:
      return DType::kQ3_K;
    case GgufType::kQ4_K:
      return DType::kQ4_K;
    case GgufType::kQ5_K:
      return DType::kQ5_K;
    case GgufType::kQ6_K:
      return DType::kQ6_K;
  }
  STILLHOUSE_CHECK(false) << "the reader lets only known types pass";
  return DType::kF32;
}

// Reads `<architecture>.<name>` keys.
class Hyperparameters {
 public:
  Hyperparameters(const GgufFile& file, std::string architecture)
      : file_(file), architecture_(std::move(architecture)) {}

  std::string Key(std::string_view name) const { return StrCat(architecture_, ".", name); }
  bool Has(std::string_view name) const { return file_.Has(Key(name)); }

  // A count from 1 to `limit`; `otherwise` where the key is absent.
  absl::StatusOr<int64_t> Count(std::string_view name, uint64_t limit,
                                std::optional<int64_t> otherwise = std::nullopt) const {
    const std::string key = Key(name);
    if (!file_.Has(key) && otherwise.has_value()) return *otherwise;
    STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t value, file_.GetUnsigned(key));
    if (value < 1 || value > limit) return Invalid(StrCat(key, " is ", value, ", not from 1 to ", limit));
    return static_cast<int64_t>(value);
  }

  // A finite number above zero.
  absl::StatusOr<double> Positive(std::string_view name, std::optional<double> otherwise = std::nullopt) const {
    const std::string key = Key(name);
    if (!file_.Has(key) && otherwise.has_value()) return *otherwise;
    STILLHOUSE_ASSIGN_OR_RETURN(const double value, file_.GetFloat(key));
    if (!(value > 0) || !std::isfinite(value))
      return Invalid(StrCat(key, " is ", value, ", not a finite number above zero"));
    return value;
  }

 private:
  const GgufFile& file_;
  std::string architecture_;
};

absl::Status ReadRope(const GgufFile& file, const Hyperparameters& keys, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  rope.layout = config->architecture == "llama" ? RopeLayout::kInterleaved : RopeLayout::kHalf;
  STILLHOUSE_ASSIGN_OR_RETURN(rope.rope_dim, keys.Count("rope.dimension_count", kMaxHeadDim, config->head_dim));
  if (rope.rope_dim % 2 != 0 || rope.rope_dim > config->head_dim) {
    return Invalid(StrCat(keys.Key("rope.dimension_count"), " is ", rope.rope_dim,
                          ", not an even number up to the head size ", config->head_dim));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const double theta, keys.Positive("rope.freq_base", 10000.0));
  if (theta <= 1) return Invalid(StrCat(keys.Key("rope.freq_base"), " is ", theta, ", not above 1"));
  rope.inv_freq = RopeFrequencies(theta, rope.rope_dim);

  std::string_view scaling = "none";
  const std::string scaling_key = keys.Key("rope.scaling.type");
  if (file.Has(scaling_key)) {
    STILLHOUSE_ASSIGN_OR_RETURN(scaling, file.GetString(scaling_key));
  } else if (keys.Has("rope.scale_linear")) {
    scaling = "linear";  // as older converters wrote it
  }
  if (scaling == "linear") {
    const std::string_view name = keys.Has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
    STILLHOUSE_ASSIGN_OR_RETURN(const double factor, keys.Positive(name));
    ApplyLinearScaling(factor, rope.inv_freq);
  } else if (scaling == "yarn") {
    STILLHOUSE_ASSIGN_OR_RETURN(const double factor, keys.Positive("rope.scaling.factor"));
    STILLHOUSE_ASSIGN_OR_RETURN(const int64_t original,
                                keys.Count("rope.scaling.original_context_length", kMaxContext));
    if (factor < 1) return Invalid(StrCat(keys.Key("rope.scaling.factor"), " is ", factor, ", below 1"));
    ApplyYarnScaling(theta, factor, /*beta_fast=*/32, /*beta_slow=*/1, static_cast<double>(original), rope);
  } else if (scaling != "none") {
    return absl::UnimplementedError(StrCat("the RoPE scaling '", Printable(scaling),
                                           "' is not supported; use none, linear, yarn or rope_freqs.weight"));
  }

  if (const GgufTensor* divisors = file.FindTensor("rope_freqs.weight")) {
    if (divisors->type != GgufType::kF32 || divisors->rank != 1 || divisors->dims[0] != rope.inv_freq.size()) {
      return Invalid(StrCat("the tensor rope_freqs.weight is not ", rope.inv_freq.size(), " F32 values"));
    }
    const auto* values = reinterpret_cast<const float*>(divisors->data.data());
    for (size_t j = 0; j < rope.inv_freq.size(); ++j) {
      if (!(values[j] > 0) || !std::isfinite(values[j])) {
        return Invalid("the tensor rope_freqs.weight has a value that is not a finite number above zero");
      }
      rope.inv_freq[j] /= values[j];
    }
  }
  return absl::OkStatus();
}

// Hands out tensors of the file by name and remembers which were asked for.
class TensorReader {
 public:
  explicit TensorReader(std::shared_ptr<const GgufFile> file) : file_(std::move(file)) {}

  bool Has(const std::string& name) const { return file_->FindTensor(name) != nullptr; }

  // [rows, columns], of any supported type; the file has the reverse order.
  absl::StatusOr<Tensor> Matrix(const std::string& name, int64_t rows, int64_t columns) {
    return Read(name, {rows, columns});
  }

  // [size], F32.
  absl::StatusOr<Tensor> Vector(const std::string& name, int64_t size) {
    STILLHOUSE_ASSIGN_OR_RETURN(Tensor tensor, Read(name, {size}));
    if (tensor.dtype() != DType::kF32) {
      return absl::UnimplementedError(
          StrCat("the tensor ", name, " has the type ", DTypeName(tensor.dtype()), "; F32 is needed"));
    }
    return tensor;
  }

  void Ignore(const std::string& name) { used_.insert(name); }

  // A tensor that nothing asked for would change the model's outputs if it were honoured.
  absl::Status CheckAllUsed() const {
    for (const GgufTensor& tensor : file_->tensors()) {
      if (!used_.contains(std::string(tensor.name))) {
        return absl::UnimplementedError(
            StrCat("the model has the tensor ", Printable(tensor.name), ", which its architecture does not use here"));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<Tensor> Read(const std::string& name, std::initializer_list<int64_t> shape) {
    const GgufTensor* tensor = file_->FindTensor(name);
    if (tensor == nullptr) return Invalid(StrCat("the model lacks the tensor ", name));
    const std::vector<int64_t> wanted(shape);
    bool fits = tensor->rank == static_cast<int>(wanted.size());
    for (int i = 0; fits && i < tensor->rank; ++i) {
      fits = tensor->dims[i] == static_cast<uint64_t>(wanted[wanted.size() - 1 - static_cast<size_t>(i)]);
    }
    if (!fits) {
      std::vector<uint64_t> dims(tensor->dims.begin(), tensor->dims.begin() + tensor->rank);
      std::reverse(dims.begin(), dims.end());
      return Invalid(StrCat("the tensor ", name, " has the shape [", absl::StrJoin(dims, ", "),
                            "], but the hyperparameters need [", absl::StrJoin(wanted, ", "), "]"));
    }
    used_.insert(name);
    return Tensor::Wrap(tensor->data.data(), DTypeOf(tensor->type), Shape(shape), file_);
  }

  std::shared_ptr<const GgufFile> file_;
  absl::flat_hash_set<std::string> used_;
};

}  // namespace

absl::StatusOr<ModelConfig> ModelConfigFromGguf(const GgufFile& file) {
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string_view architecture, file.GetString("general.architecture"));
  if (architecture != "llama" && architecture != "qwen2" && architecture != "qwen3") {
    return absl::UnimplementedError(
        StrCat("the model architecture '", Printable(architecture), "' is not supported; use llama, qwen2 or qwen3"));
  }
  ModelConfig config;
  config.architecture = architecture;
  config.name = architecture;
  if (const auto name = file.GetString("general.name"); name.ok()) config.name = Printable(*name);

  const Hyperparameters keys(file, config.architecture);
  if (keys.Has("expert_count")) {
    STILLHOUSE_ASSIGN_OR_RETURN(const uint64_t experts, file.GetUnsigned(keys.Key("expert_count")));
    if (experts > 0)
      return absl::UnimplementedError(StrCat("the model is a mixture of ", experts, " experts; use a dense one"));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(config.layers, keys.Count("block_count", kMaxLayers));
  STILLHOUSE_ASSIGN_OR_RETURN(config.hidden, keys.Count("embedding_length", kMaxWidth));
  STILLHOUSE_ASSIGN_OR_RETURN(config.ffn, keys.Count("feed_forward_length", kMaxWidth));
  STILLHOUSE_ASSIGN_OR_RETURN(config.context_length, keys.Count("context_length", kMaxContext));
  STILLHOUSE_ASSIGN_OR_RETURN(config.heads, keys.Count("attention.head_count", kMaxHeads));
  STILLHOUSE_ASSIGN_OR_RETURN(config.kv_heads, keys.Count("attention.head_count_kv", kMaxHeads, config.heads));
  if (config.heads % config.kv_heads != 0) {
    return Invalid(
        StrCat("the model's ", config.heads, " heads are not a multiple of its ", config.kv_heads, " KV heads"));
  }
  if (!keys.Has("attention.key_length") && config.hidden % config.heads != 0) {
    return Invalid(
        StrCat("the model's hidden size ", config.hidden, " is not a multiple of its ", config.heads, " heads"));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(config.head_dim,
                              keys.Count("attention.key_length", kMaxHeadDim, config.hidden / config.heads));
  STILLHOUSE_ASSIGN_OR_RETURN(const int64_t value_dim,
                              keys.Count("attention.value_length", kMaxHeadDim, config.head_dim));
  if (value_dim != config.head_dim) {
    return absl::UnimplementedError(StrCat("the model's values have ", value_dim, " elements a head and its keys ",
                                           config.head_dim, "; only equal sizes are supported"));
  }
  if (config.head_dim % 2 != 0) return Invalid(StrCat("the model's head size ", config.head_dim, " is odd"));
  if (config.heads * config.head_dim > static_cast<int64_t>(kMaxWidth)) {
    return Invalid(StrCat("the model's attention is ", config.heads * config.head_dim, " wide; at most ", kMaxWidth));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(const double eps, keys.Positive("attention.layer_norm_rms_epsilon"));
  if (eps >= 1) return Invalid(StrCat(keys.Key("attention.layer_norm_rms_epsilon"), " is ", eps, ", not below 1"));
  config.norm_eps = static_cast<float>(eps);
  STILLHOUSE_RETURN_IF_ERROR(ReadRope(file, keys, &config));

  const GgufTensor* embedding = file.FindTensor("token_embd.weight");
  if (embedding == nullptr) return Invalid("the model lacks the tensor token_embd.weight");
  if (embedding->dims[1] > kMaxVocabulary) {
    return Invalid(StrCat("the model has ", embedding->dims[1], " embeddings; at most ", kMaxVocabulary));
  }
  config.vocabulary = static_cast<int64_t>(embedding->dims[1]);
  config.tied_embeddings = file.FindTensor("output.weight") == nullptr;
  return config;
}

absl::StatusOr<Weights> WeightsFromGguf(const std::shared_ptr<const GgufFile>& file) {
  Weights weights;
  STILLHOUSE_ASSIGN_OR_RETURN(weights.config, ModelConfigFromGguf(*file));
  const ModelConfig& c = weights.config;
  const int64_t q_rows = c.heads * c.head_dim;
  const int64_t kv_rows = c.kv_heads * c.head_dim;
  TensorReader tensors(file);
  STILLHOUSE_ASSIGN_OR_RETURN(weights.embedding, tensors.Matrix("token_embd.weight", c.vocabulary, c.hidden));
  STILLHOUSE_ASSIGN_OR_RETURN(weights.final_norm, tensors.Vector("output_norm.weight", c.hidden));
  if (c.tied_embeddings) {
    weights.output = weights.embedding;
  } else {
    STILLHOUSE_ASSIGN_OR_RETURN(weights.output, tensors.Matrix("output.weight", c.vocabulary, c.hidden));
  }
  tensors.Ignore("rope_freqs.weight");  // already in the frequencies
  const bool biases = c.architecture == "qwen2";
  const bool head_norms = c.architecture == "qwen3";
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string p = StrCat("blk.", i, ".");
    LayerWeights w;
    STILLHOUSE_ASSIGN_OR_RETURN(w.attn_norm, tensors.Vector(p + "attn_norm.weight", c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.q, tensors.Matrix(p + "attn_q.weight", q_rows, c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.k, tensors.Matrix(p + "attn_k.weight", kv_rows, c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.v, tensors.Matrix(p + "attn_v.weight", kv_rows, c.hidden));
    if (biases || tensors.Has(p + "attn_q.bias")) {
      STILLHOUSE_ASSIGN_OR_RETURN(w.q_bias, tensors.Vector(p + "attn_q.bias", q_rows));
      STILLHOUSE_ASSIGN_OR_RETURN(w.k_bias, tensors.Vector(p + "attn_k.bias", kv_rows));
      STILLHOUSE_ASSIGN_OR_RETURN(w.v_bias, tensors.Vector(p + "attn_v.bias", kv_rows));
    }
    if (head_norms) {
      STILLHOUSE_ASSIGN_OR_RETURN(w.q_norm, tensors.Vector(p + "attn_q_norm.weight", c.head_dim));
      STILLHOUSE_ASSIGN_OR_RETURN(w.k_norm, tensors.Vector(p + "attn_k_norm.weight", c.head_dim));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(w.o, tensors.Matrix(p + "attn_output.weight", c.hidden, q_rows));
    STILLHOUSE_ASSIGN_OR_RETURN(w.ffn_norm, tensors.Vector(p + "ffn_norm.weight", c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.gate, tensors.Matrix(p + "ffn_gate.weight", c.ffn, c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.up, tensors.Matrix(p + "ffn_up.weight", c.ffn, c.hidden));
    STILLHOUSE_ASSIGN_OR_RETURN(w.down, tensors.Matrix(p + "ffn_down.weight", c.hidden, c.ffn));
    weights.layers.push_back(std::move(w));
  }
  STILLHOUSE_RETURN_IF_ERROR(tensors.CheckAllUsed());
  weights.fingerprint = file->Sha256();
  return weights;
}

absl::StatusOr<GgufModel> LoadGgufModel(const Context& ctx, const std::string& path, const std::string& random_shape,
                                        const std::function<absl::Status(const ModelConfig&)>& admit) {
  STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const GgufFile> file, GgufFile::Open(path));
  const std::string name = Printable(path.substr(path.find_last_of('/') + 1));
  const auto about_file = [&](const absl::Status& status) {
    return absl::Status(status.code(), StrCat("'", name, "' cannot be used: ", ToStd(status.message())));
  };
  GgufModel model;
  auto tokenizer = TokenizerFromGguf(*file);
  if (!tokenizer.ok()) return about_file(tokenizer.status());
  model.tokenizer = *std::move(tokenizer);
  absl::StatusOr<Weights> raw = Weights();
  if (random_shape.empty()) {
    raw = WeightsFromGguf(file);
    if (!raw.ok()) return about_file(raw.status());
  } else {
    STILLHOUSE_ASSIGN_OR_RETURN(raw->config, RandomWeightConfig(random_shape));
  }
  if (model.tokenizer->vocab_size() > raw->config.vocabulary) {
    return about_file(Invalid(StrCat("its tokenizer has ", model.tokenizer->vocab_size(),
                                     " tokens, but there are only ", raw->config.vocabulary, " embeddings")));
  }
  auto source = ChatTemplateFromGguf(*file);
  if (!source.ok()) return about_file(source.status());
  auto chat = ChatTemplate::Create(model.tokenizer.get(), *source);
  if (chat.ok()) {
    model.chat = *std::move(chat);
  } else {
    model.chat_status = chat.status();
  }
  if (admit) STILLHOUSE_RETURN_IF_ERROR(admit(raw->config));
  auto weights = random_shape.empty() ? FinishWeights(ctx, *std::move(raw)) : RandomWeights(ctx, random_shape);
  if (!weights.ok()) return about_file(weights.status());
  model.weights = *std::move(weights);
  return model;
}

}  // namespace stillhouse
