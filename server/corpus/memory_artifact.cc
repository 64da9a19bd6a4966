// Memories as artifact sections and back.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/ops/quant.h"
#include "server/corpus/directory.h"

namespace stillhouse {
namespace {

// Values of a section of F32, F16 or BF16 into a contiguous tensor of f32 or bf16 on the context's device.
absl::Status LoadSection(const Context& ctx, const Artifact& artifact, const std::string& name, const Tensor& to) {
  const Artifact::Section* section = artifact.Find(name);
  if (section == nullptr) return absl::DataLossError(absl::StrCat("the artifact lacks ", name));
  const int64_t elements = to.elements();
  const uint64_t width = section->dtype == "F32" ? 4 : 2;
  if (section->size != static_cast<uint64_t>(elements) * width) {
    return absl::DataLossError(
        absl::StrCat(name, " has ", section->size, " bytes, expected ", static_cast<uint64_t>(elements) * width));
  }
  std::vector<char> bytes(section->size);
  STILLHOUSE_RETURN_IF_ERROR(artifact.Read(*section, absl::MakeSpan(bytes)));
  std::vector<float> values(static_cast<size_t>(elements));
  if (section->dtype == "F32") {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  } else if (section->dtype == "F16") {
    DequantizeRow(DType::kF16, bytes.data(), elements, values.data());
  } else if (section->dtype == "BF16") {
    DequantizeRow(DType::kBF16, bytes.data(), elements, values.data());
  } else {
    return absl::DataLossError(absl::StrCat(name, " has the unknown element type ", section->dtype));
  }
  if (to.dtype() == DType::kBF16) {
    std::vector<uint16_t> narrow(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow[i] = FloatToBf16(values[i]);
    ctx.backend->Upload(narrow.data(), to);
  } else {
    ctx.backend->Upload(values.data(), to);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Memory>> LoadMemory(const Context& ctx, const ModelConfig& config,
                                                         const Artifact& artifact, DType dtype) {
  const ArtifactHeader& header = artifact.header();
  if (static_cast<int64_t>(header.layers) != config.layers ||
      static_cast<int64_t>(header.kv_heads) != config.kv_heads ||
      static_cast<int64_t>(header.head_dim) != config.head_dim) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the artifact holds ", header.layers, " layers of ", header.kv_heads, " KV heads of width ", header.head_dim,
        ", the model has ", config.layers, " of ", config.kv_heads, " of ", config.head_dim));
  }
  if (header.logical_length >= static_cast<uint64_t>(config.context_length)) {
    return absl::FailedPreconditionError(absl::StrCat("the artifact ends at position ", header.logical_length,
                                                      ", the model's context has ", config.context_length));
  }
  auto memory = std::make_shared<Memory>();
  memory->slots = header.slots;
  memory->next_position = static_cast<int64_t>(header.logical_length);
  memory->label = header.method;
  // One buffer: its layers are at equal distances.
  const Tensor all =
      Tensor::TryEmpty(ctx.pool(), dtype, {config.layers, 2, config.kv_heads, memory->slots, config.head_dim});
  Tensor beta;
  if (header.has_beta) {
    beta = Tensor::TryEmpty(ctx.pool(), DType::kF32, {config.layers, config.kv_heads, memory->slots});
  }
  if (!all || beta.defined() != header.has_beta) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the memory needs ", LoadedBytes(ctx, header, dtype),
                     " bytes, and the device has none left: try again when other queries have ended"));
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string prefix = absl::StrCat("layer.", layer, ".");
    LayerKv kv{all.Select(0, layer).Select(0, 0), all.Select(0, layer).Select(0, 1), Tensor()};
    STILLHOUSE_RETURN_IF_ERROR(LoadSection(ctx, artifact, prefix + "k", kv.k));
    STILLHOUSE_RETURN_IF_ERROR(LoadSection(ctx, artifact, prefix + "v", kv.v));
    if (beta) {
      kv.beta = beta.Select(0, layer);
      STILLHOUSE_RETURN_IF_ERROR(LoadSection(ctx, artifact, prefix + "beta", kv.beta));
    }
    memory->layers.push_back(std::move(kv));
  }
  return memory;
}

int64_t LoadedBytes(const Context& ctx, const ArtifactHeader& header, DType dtype) {
  const int64_t rows = int64_t{header.layers} * header.kv_heads * header.slots;
  const auto block = [&](int64_t bytes) {
    return static_cast<int64_t>(ctx.pool().BlockBytes(static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  };
  return block(2 * rows * header.head_dim * BlockBytes(dtype)) + (header.has_beta ? block(4 * rows) : 0);
}

ArtifactHeader DescribeMemory(const ModelConfig& config, const Memory& memory, ArtifactHeader header,
                              bool has_positions) {
  header.layers = static_cast<uint32_t>(config.layers);
  header.kv_heads = static_cast<uint32_t>(config.kv_heads);
  header.head_dim = static_cast<uint32_t>(config.head_dim);
  header.slots = static_cast<uint32_t>(memory.slots);
  header.logical_length = static_cast<uint64_t>(memory.next_position);
  header.has_beta = !memory.layers.empty() && memory.layers[0].beta.defined();
  header.has_positions = has_positions;
  return header;
}

absl::Status StoreMemory(const Context& ctx, const ModelConfig& config, const Memory& memory, ArtifactHeader header,
                         BlobWriter* blob, absl::Span<const std::vector<int32_t>> positions) {
  header = DescribeMemory(config, memory, std::move(header), !positions.empty());
  const bool half = header.fingerprints.dtype == "F16", bfloat = header.fingerprints.dtype == "BF16";
  const uint64_t heads = header.kv_heads, slots = header.slots, width = header.head_dim;
  // Owns the bytes that the sections point to.
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<uint16_t>> halves;
  floats.reserve(memory.layers.size() * 3);
  halves.reserve(memory.layers.size() * 2);
  std::vector<ArtifactSection> sections;
  auto bytes_of = [](const auto& values) {
    return std::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  for (size_t layer = 0; layer < memory.layers.size(); ++layer) {
    const LayerKv& kv = memory.layers[layer];
    const std::string prefix = absl::StrCat("layer.", layer, ".");
    for (const auto& [name, tensor] : {std::pair<const char*, const Tensor*>{"k", &kv.k}, {"v", &kv.v}}) {
      std::vector<float> values = ctx.ToFloats(*tensor);
      ArtifactSection section{prefix + name, header.fingerprints.dtype, {heads, slots, width}, {}};
      if (half || bfloat) {
        std::vector<uint16_t> narrow(values.size());
        for (size_t i = 0; i < values.size(); ++i) narrow[i] = half ? FloatToHalf(values[i]) : FloatToBf16(values[i]);
        halves.push_back(std::move(narrow));
        section.bytes = bytes_of(halves.back());
      } else {
        floats.push_back(std::move(values));
        section.bytes = bytes_of(floats.back());
      }
      sections.push_back(std::move(section));
    }
    if (header.has_beta) {
      floats.push_back(ctx.ToFloats(kv.beta));
      sections.push_back({prefix + "beta", "F32", {heads, slots}, bytes_of(floats.back())});
    }
    if (header.has_positions) {
      STILLHOUSE_CHECK_EQ(positions[layer].size(), heads * slots);
      sections.push_back({prefix + "positions", "I32", {heads, slots}, bytes_of(positions[layer])});
    }
  }
  return WriteArtifact(header, std::move(sections), [blob](std::string_view piece) { return blob->Append(piece); });
}

}  // namespace stillhouse
