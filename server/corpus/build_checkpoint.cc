#include "server/corpus/build_checkpoint.h"

#include "kernels/base/status.h"

namespace stillhouse {
namespace {

// Changes with every change of what follows: an older checkpoint is refused, and the build begins again.
constexpr std::string_view kMagic = "stillhouse build checkpoint 1";

}  // namespace

MemoryBytes MemoryBytes::From(const Context& ctx, const StartMemory& memory) {
  MemoryBytes out;
  out.present = true;
  out.slots = memory.memory->slots;
  out.next_position = memory.memory->next_position;
  out.label = memory.memory->label;
  out.positions = memory.positions;
  for (const LayerKv& kv : memory.memory->layers) {
    out.k.push_back(ctx.ToFloats(kv.k));
    out.v.push_back(ctx.ToFloats(kv.v));
    if (kv.beta) out.beta.push_back(ctx.ToFloats(kv.beta));
  }
  out.has_beta = !out.beta.empty();
  return out;
}

absl::StatusOr<StartMemory> MemoryBytes::ToMemory(const Context& ctx, const ModelConfig& config) const {
  const size_t layers = static_cast<size_t>(config.layers);
  const size_t rows = static_cast<size_t>(config.kv_heads * slots);
  const size_t elements = rows * static_cast<size_t>(config.head_dim);
  auto sound = [&](const auto& values, size_t each) {
    if (values.size() != layers) return false;
    for (const auto& v : values) {
      if (v.size() != each) return false;
    }
    return true;
  };
  if (!present || slots <= 0 || !sound(k, elements) || !sound(v, elements) || (has_beta && !sound(beta, rows)) ||
      (!positions.empty() && !sound(positions, rows))) {
    return absl::DataLossError("a checkpoint's memory is not of this model");
  }
  StartMemory out;
  out.positions = positions;
  out.memory = std::make_shared<Memory>();
  out.memory->slots = slots;
  out.memory->next_position = next_position;
  out.memory->label = label;
  for (size_t l = 0; l < layers; ++l) {
    LayerKv kv{ctx.Floats(k[l], {config.kv_heads, slots, config.head_dim}),
               ctx.Floats(v[l], {config.kv_heads, slots, config.head_dim}), Tensor()};
    if (has_beta) kv.beta = ctx.Floats(beta[l], {config.kv_heads, slots});
    out.memory->layers.push_back(std::move(kv));
  }
  return out;
}

void MemoryBytes::AppendTo(ByteWriter* out) const {
  out->Int(present ? 1 : 0);
  if (!present) return;
  out->Int(slots);
  out->Int(next_position);
  out->Text(label);
  out->Int(has_beta ? 1 : 0);
  for (const auto* values : {&k, &v, &beta}) {
    out->Int(static_cast<int64_t>(values->size()));
    for (const std::vector<float>& layer : *values) out->Array(layer);
  }
  out->Int(static_cast<int64_t>(positions.size()));
  for (const std::vector<int32_t>& layer : positions) out->Array(layer);
}

absl::Status MemoryBytes::ReadFrom(ByteReader* in) {
  *this = MemoryBytes();
  int64_t flag = 0, count = 0;
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&flag));
  if (flag == 0) return absl::OkStatus();
  present = true;
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&slots));
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&next_position));
  STILLHOUSE_RETURN_IF_ERROR(in->Text(&label));
  STILLHOUSE_RETURN_IF_ERROR(in->Int(&flag));
  has_beta = flag != 0;
  for (auto* values : {&k, &v, &beta}) {
    STILLHOUSE_RETURN_IF_ERROR(in->Length(8, &count));
    values->resize(static_cast<size_t>(count));
    for (std::vector<float>& layer : *values) STILLHOUSE_RETURN_IF_ERROR(in->Array(&layer));
  }
  STILLHOUSE_RETURN_IF_ERROR(in->Length(8, &count));
  positions.resize(static_cast<size_t>(count));
  for (std::vector<int32_t>& layer : positions) STILLHOUSE_RETURN_IF_ERROR(in->Array(&layer));
  return absl::OkStatus();
}

std::string BuildCheckpoint::ToBytes() const {
  ByteWriter out;
  out.Text(kMagic);
  out.Text(corpus_sha256);
  out.Double(elapsed_seconds);
  out.Double(prefill_seconds);
  out.Int(generated_tokens);
  study.AppendTo(&out);
  start.AppendTo(&out);
  out.Text(trainer);
  finished.AppendTo(&out);
  out.Text(QualityReportToJson(report));
  out.Int(static_cast<int64_t>(uploaded.size()));
  for (const Conversation& c : uploaded) AppendConversation(c, &out);
  out.Int(uploaded_ready ? 1 : 0);
  out.Int(judged ? 1 : 0);
  out.Int(create_unix_micros);
  return out.Take();
}

absl::StatusOr<BuildCheckpoint> BuildCheckpoint::FromBytes(std::string_view bytes) {
  ByteReader in(bytes);
  BuildCheckpoint out;
  std::string magic, report;
  int64_t count = 0, uploaded_ready = 0, judged = 0;
  STILLHOUSE_RETURN_IF_ERROR(in.Text(&magic));
  if (magic != kMagic) return absl::DataLossError("a checkpoint of another version");
  STILLHOUSE_RETURN_IF_ERROR(in.Text(&out.corpus_sha256));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&out.elapsed_seconds));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&out.prefill_seconds));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&out.generated_tokens));
  STILLHOUSE_RETURN_IF_ERROR(out.study.ReadFrom(&in));
  STILLHOUSE_RETURN_IF_ERROR(out.start.ReadFrom(&in));
  STILLHOUSE_RETURN_IF_ERROR(in.Text(&out.trainer));
  STILLHOUSE_RETURN_IF_ERROR(out.finished.ReadFrom(&in));
  STILLHOUSE_RETURN_IF_ERROR(in.Text(&report));
  STILLHOUSE_ASSIGN_OR_RETURN(out.report, QualityReportFromJson(report));
  STILLHOUSE_RETURN_IF_ERROR(in.Length(24, &count));
  out.uploaded.resize(static_cast<size_t>(count));
  for (Conversation& c : out.uploaded) STILLHOUSE_RETURN_IF_ERROR(ReadConversation(&in, &c));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&uploaded_ready));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&judged));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&out.create_unix_micros));
  out.uploaded_ready = uploaded_ready != 0;
  out.judged = judged != 0;
  return out;
}

}  // namespace stillhouse
