// What callers send and what the server reads back of it: requests as protobuf bytes, build specifications and reports
// as JSON, checkpoints. The first byte chooses the reader.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/base/logging.h"
#include "server/corpus/build_checkpoint.h"
#include "server/corpus/build_record.h"
#include "server/corpus/build_spec.h"
#include "server/service/artifact_summary.h"
#include "server/service/build_request.h"
#include "server/service/validation.h"
#include "server/token/chat_template.h"
#include "server/token/tokenizer.h"
#include "stillhouse/v1/caches.pb.h"
#include "stillhouse/v1/inference.pb.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

const Tokenizer& TheTokenizer() {
  static const Tokenizer* const tokenizer = Tokenizer::Create(testing::TinyTokenizerData())->release();
  return *tokenizer;
}

void Query(std::string_view bytes) {
  static const ChatTemplate* const chat = ChatTemplate::Create(&TheTokenizer(), "")->release();
  v1::QueryRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const int64_t vocabulary = TheTokenizer().vocab_size();
  if (const auto settings = ParseSampling(request.sampling(), vocabulary); settings.ok()) {
    const SampleRow& row = settings->row;
    STILLHOUSE_CHECK(row.temperature >= 0 && row.temperature <= 2 && row.top_p > 0 && row.top_p <= 1);
    STILLHOUSE_CHECK(row.top_k >= 0 && row.top_k <= vocabulary && row.min_p >= 0 && row.min_p <= 1);
    STILLHOUSE_CHECK(row.repetition_penalty > 0 && settings->max_tokens >= 1 && row.logprobs <= kMaxLogprobs);
  }
  if (const auto messages = ParseMessages(request.messages()); messages.ok()) {
    for (const bool after_memory : {false, true}) {
      const auto ids = RenderPrompt(*chat, *messages, after_memory);
      STILLHOUSE_CHECK(ids.ok() && !ids->empty()) << ids.status();
    }
  }
  if (const auto ids = EncodeRawPrompt(TheTokenizer(), request.prompt(), true); ids.ok()) {
    for (const int32_t id : *ids) STILLHOUSE_CHECK(id >= 0 && id < vocabulary);
  }
}

void CheckSpec(const BuildSpec& spec) {
  const std::string json = BuildSpecToJson(spec);
  const auto back = BuildSpecFromJson(json);
  STILLHOUSE_CHECK(back.ok()) << back.status();
  STILLHOUSE_CHECK(BuildSpecToJson(*back) == json);
}

void Build(std::string_view bytes) {
  v1::BuildCacheRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const auto spec = ParseBuildRequest(request, "acme", "book", "cache");
  if (!spec.ok()) return;
  STILLHOUSE_CHECK(ValidateBuildSpec(*spec).ok());
  CheckSpec(*spec);
}

void Spec(std::string_view text) {
  const auto spec = BuildSpecFromJson(text);
  if (!spec.ok()) return;
  ValidateBuildSpec(*spec).IgnoreError();
  CheckSpec(*spec);
}

void Summary(std::string_view text) {
  v1::Cache cache;
  FillFromSummary(text, &cache);
  // An imported file brings its own report and recipe.
  ArtifactHeader header;
  header.fingerprints.dtype = "F32";
  header.slots = 3;
  header.quality_json = header.hyperparameters_json = std::string(text);
  FillFromSummary(SummaryJson(header, text.substr(0, 40)), &cache);
  STILLHOUSE_CHECK(cache.slots() == 3);
}

void Checkpoint(std::string_view bytes) {
  const auto checkpoint = BuildCheckpoint::FromBytes(bytes);
  if (!checkpoint.ok()) return;
  const std::string again = checkpoint->ToBytes();
  const auto back = BuildCheckpoint::FromBytes(again);
  STILLHOUSE_CHECK(back.ok() && back->ToBytes() == again) << back.status();
}

}  // namespace
}  // namespace stillhouse

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stillhouse;  // NOLINT
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 5) {
    case 0:
      Query(rest);
      break;
    case 1:
      Build(rest);
      break;
    case 2:
      Spec(rest);
      break;
    case 3:
      Summary(rest);
      break;
    default:
      Checkpoint(rest);
  }
  return 0;
}
