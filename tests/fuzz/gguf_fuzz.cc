// Any bytes as a model file: refused with a status, or usable without touching memory outside the input.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/logging.h"
#include "server/load/gguf.h"
#include "server/load/llama_gguf.h"
#include "server/load/tokenizer_from_gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A copy at the alignment of a mapping.
  const std::unique_ptr<uint8_t[], void (*)(uint8_t*)> copy(
      static_cast<uint8_t*>(::operator new(size + 1, std::align_val_t(64))),
      [](uint8_t* p) { ::operator delete(p, std::align_val_t(64)); });
  std::memcpy(copy.get(), data, size);
  const auto file = stillhouse::GgufFile::Parse(absl::MakeConstSpan(copy.get(), size));
  if (!file.ok()) return 0;
  uint64_t sum = 0;
  for (const stillhouse::GgufTensor& tensor : (*file)->tensors()) {
    STILLHOUSE_CHECK((*file)->FindTensor(tensor.name) == &tensor);
    sum += tensor.data.front() + tensor.data.back();
  }
  for (const char* key : {"general.alignment", "general.architecture", "llama.block_count", "tokenizer.ggml.tokens",
                          "tokenizer.ggml.token_type", "a", "b"}) {
    (void)(*file)->GetUnsigned(key);
    (void)(*file)->GetFloat(key);
    (void)(*file)->GetBool(key);
    (void)(*file)->GetString(key);
    (void)(*file)->GetStrings(key);
    (void)(*file)->GetIntegers(key);
  }
  const auto tokenizer = stillhouse::TokenizerFromGguf(**file);
  if (tokenizer.ok()) {
    const std::vector<int32_t> ids = (*tokenizer)->Encode("The quick <|im_start|> 123", /*parse_control=*/true);
    for (const int32_t id : ids) STILLHOUSE_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
    (void)(*tokenizer)->Decode(ids);
    const auto source = stillhouse::ChatTemplateFromGguf(**file);
    if (source.ok()) (void)stillhouse::ChatTemplate::Create(tokenizer->get(), *source);
  }
  (void)stillhouse::WeightsFromGguf(*file);
  return sum == UINT64_MAX ? 1 : 0;
}
