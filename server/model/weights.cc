#include "server/model/weights.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/matmul.h"

namespace stillhouse {
namespace {

// What Forward, sampling, scoring and training call.
constexpr const char* kNeeded[] = {"Embedding",   "RmsNorm",       "RmsNormGrad",   "Linear", "LinearGrad",
                                   "Rope",        "RopeGrad",      "Attention",     "SwiGlu", "SwiGluGrad",
                                   "Add",         "AddGrad",       "CopyRows",      "Sample", "GatherRows",
                                   "TopLogprobs", "AttentionGrad", "GatherRowsGrad"};

absl::Status CheckShape(const std::string& name, const Tensor& t, const Shape& shape) {
  if (t.defined() && t.shape() == shape) return absl::OkStatus();
  const std::string expected = absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
  if (!t.defined()) return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " ", expected, " is missing"));
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", name, " has shape [", absl::StrJoin(t.shape(), ", "), "], expected ", expected));
}

// Row-wise concatenation of matrices of one dtype and width; an empty tensor if they differ. Matrices that lie one
// after another in one buffer are joined as they are.
Tensor JoinRows(const Context& ctx, std::initializer_list<Tensor> parts) {
  int64_t rows = 0;
  const Tensor& first = *parts.begin();
  bool joined_already = true;
  for (const Tensor& part : parts) {
    joined_already = joined_already && part.buffer() == first.buffer() && part.dtype() == first.dtype() &&
                     part.dim(1) == first.dim(1) && part.contiguous() &&
                     part.offset() == first.offset() + rows * first.dim(1);
    rows += part.dim(0);
  }
  if (joined_already) {
    const Tensor whole = Tensor::Wrap(nullptr, first.dtype(), {first.offset() / first.dim(1) + rows, first.dim(1)})
                             .WithBuffer(first.buffer(), first.dtype());
    return whole.Slice(0, whole.dim(0) - rows, whole.dim(0));
  }
  rows = 0;
  for (const Tensor& part : parts) {
    if (part.dtype() != first.dtype() || part.dim(1) != first.dim(1) || part.device() != DeviceType::kCpu)
      return Tensor();
    rows += part.dim(0);
  }
  // Joined on the host; the backend lays it out, and uploads it, as it prepares the weight.
  BufferPool staging(HostMemory(), 0);
  const bool host = ctx.pool().device() == DeviceType::kCpu;
  Tensor joined = Tensor::Empty(host ? ctx.pool() : staging, first.dtype(), {rows, first.dim(1)});
  char* to = joined.data<char>();
  for (const Tensor& part : parts) {
    std::memcpy(to, part.raw(), static_cast<size_t>(part.bytes()));
    to += part.bytes();
  }
  return joined;
}

// Norm weights and biases are read by kernels as they are.
Tensor ToDevice(const Context& ctx, const Tensor& vector) {
  if (!vector.defined() || vector.device() == ctx.pool().device()) return vector;
  Tensor device = ctx.Empty(vector.dtype(), vector.shape());
  ctx.backend->Upload(vector.raw(), device);
  return device;
}

}  // namespace

int64_t Weights::bytes() const {
  std::unordered_set<const Buffer*> seen;
  int64_t total = 0;
  auto add = [&](const Tensor& t) {
    if (t.defined() && seen.insert(t.buffer().get()).second) total += static_cast<int64_t>(t.buffer()->bytes());
  };
  add(embedding);
  add(final_norm);
  add(output);
  for (const LayerWeights& w : layers) {
    for (const Tensor* t : {&w.attn_norm, &w.qkv, &w.q, &w.k, &w.v, &w.q_bias, &w.k_bias, &w.v_bias, &w.q_norm,
                            &w.k_norm, &w.o, &w.ffn_norm, &w.gate_up, &w.gate, &w.up, &w.down}) {
      add(*t);
    }
  }
  return total;
}

absl::StatusOr<std::shared_ptr<const Weights>> FinishWeights(const Context& ctx, Weights raw) {
  const std::vector<std::string> missing = MissingOps(ctx.kernels());
  std::vector<std::string> needed;
  for (const std::string& name : missing) {
    if (std::find(std::begin(kNeeded), std::end(kNeeded), name) != std::end(kNeeded)) needed.push_back(name);
  }
  if (!needed.empty()) {
    return absl::UnimplementedError(absl::StrCat("the backend \"", ctx.backend->name(), "\" lacks the kernels ",
                                                 absl::StrJoin(needed, ", "),
                                                 " that this model needs; use --device cpu"));
  }

  const ModelConfig& c = raw.config;
  const int64_t q_rows = c.heads * c.head_dim, kv_rows = c.kv_heads * c.head_dim;
  STILLHOUSE_RETURN_IF_ERROR(CheckShape("token_embd", raw.embedding, {c.vocabulary, c.hidden}));
  STILLHOUSE_RETURN_IF_ERROR(CheckShape("output", raw.output, {c.vocabulary, c.hidden}));
  STILLHOUSE_RETURN_IF_ERROR(CheckShape("output_norm", raw.final_norm, {c.hidden}));
  if (static_cast<int64_t>(raw.layers.size()) != c.layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", raw.layers.size(), " layers, expected ", c.layers));
  }
  const bool tied = raw.output.buffer() == raw.embedding.buffer() && raw.output.offset() == raw.embedding.offset();
  raw.output = PrepareWeight(ctx, raw.output);
  raw.embedding = tied ? raw.output : PrepareWeight(ctx, raw.embedding);
  raw.final_norm = ToDevice(ctx, raw.final_norm);
  for (int64_t i = 0; i < c.layers; ++i) {
    LayerWeights& w = raw.layers[static_cast<size_t>(i)];
    const std::string prefix = absl::StrCat("blk.", i, ".");
    const struct {
      const char* name;
      const Tensor* tensor;
      Shape shape;
      bool optional;
    } checks[] = {
        {"attn_norm", &w.attn_norm, {c.hidden}, false}, {"attn_q", &w.q, {q_rows, c.hidden}, false},
        {"attn_k", &w.k, {kv_rows, c.hidden}, false},   {"attn_v", &w.v, {kv_rows, c.hidden}, false},
        {"attn_q bias", &w.q_bias, {q_rows}, true},     {"attn_k bias", &w.k_bias, {kv_rows}, true},
        {"attn_v bias", &w.v_bias, {kv_rows}, true},    {"attn_q_norm", &w.q_norm, {c.head_dim}, true},
        {"attn_k_norm", &w.k_norm, {c.head_dim}, true}, {"attn_output", &w.o, {c.hidden, q_rows}, false},
        {"ffn_norm", &w.ffn_norm, {c.hidden}, false},   {"ffn_gate", &w.gate, {c.ffn, c.hidden}, false},
        {"ffn_up", &w.up, {c.ffn, c.hidden}, false},    {"ffn_down", &w.down, {c.hidden, c.ffn}, false},
    };
    for (const auto& check : checks) {
      if (check.optional && !check.tensor->defined()) continue;
      STILLHOUSE_RETURN_IF_ERROR(CheckShape(absl::StrCat(prefix, check.name), *check.tensor, check.shape));
    }
    for (Tensor* t : {&w.attn_norm, &w.q_bias, &w.k_bias, &w.v_bias, &w.q_norm, &w.k_norm, &w.ffn_norm}) {
      *t = ToDevice(ctx, *t);
    }
    if (Tensor joined = JoinRows(ctx, {w.q, w.k, w.v})) {
      w.qkv = PrepareWeight(ctx, joined);
      w.q = w.k = w.v = Tensor();
    } else {
      w.q = PrepareWeight(ctx, w.q);
      w.k = PrepareWeight(ctx, w.k);
      w.v = PrepareWeight(ctx, w.v);
    }
    if (Tensor joined = JoinRows(ctx, {w.gate, w.up})) {
      w.gate_up = PrepareWeight(ctx, joined);
      w.gate = w.up = Tensor();
    } else {
      w.gate = PrepareWeight(ctx, w.gate);
      w.up = PrepareWeight(ctx, w.up);
    }
    w.o = PrepareWeight(ctx, w.o);
    w.down = PrepareWeight(ctx, w.down);
  }
  return std::make_shared<const Weights>(std::move(raw));
}

}  // namespace stillhouse
