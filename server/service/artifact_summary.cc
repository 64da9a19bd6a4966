#include "server/service/artifact_summary.h"

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>

#include "stillhouse/v1/caches.pb.h"

namespace stillhouse {
namespace {

using nlohmann::json;

json ParseOrNull(std::string_view text) { return json::parse(text, nullptr, /*allow_exceptions=*/false); }

std::string Text(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

int64_t Integer(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number_integer() ? it->get<int64_t>() : 0;
}

int64_t ElementBytes(const std::string& dtype) { return dtype == "F32" ? 4 : dtype.empty() ? 0 : 2; }

}  // namespace

void FillFromSummary(std::string_view summary_json, v1::Cache* cache) {
  const json summary = ParseOrNull(summary_json);
  if (!summary.is_object()) return;
  const int64_t slots = Integer(summary, "slots");
  const int64_t corpus_tokens = Integer(summary, "corpus_tokens");
  cache->set_display_name(Text(summary, "display_name"));
  cache->set_slots(static_cast<int32_t>(slots));
  cache->set_logical_length(Integer(summary, "logical_length"));
  cache->set_next_position(Integer(summary, summary.contains("next_position") ? "next_position" : "logical_length"));
  cache->set_corpus_tokens(corpus_tokens);
  if (slots > 0) cache->set_compression_ratio(static_cast<double>(corpus_tokens) / static_cast<double>(slots));
  const auto prints = summary.find("fingerprints");
  if (prints != summary.end() && prints->is_object()) {
    cache->set_model_fingerprint(Text(*prints, "model"));
    cache->set_dtype(Text(*prints, "dtype"));
  }
  const int64_t rows = Integer(summary, "layers") * Integer(summary, "kv_heads") * slots;
  const auto beta = summary.find("has_beta");
  const bool has_beta = beta != summary.end() && beta->is_boolean() && beta->get<bool>();
  cache->set_canonical_bytes(rows *
                             (2 * Integer(summary, "head_dim") * ElementBytes(cache->dtype()) + (has_beta ? 4 : 0)));
  const auto quality = summary.find("quality");
  if (quality != summary.end() && quality->is_object() && !quality->empty()) {
    google::protobuf::util::JsonParseOptions options;
    options.ignore_unknown_fields = true;
    v1::QualityReport report;
    if (google::protobuf::util::JsonStringToMessage(quality->dump(), &report, options).ok()) {
      *cache->mutable_quality() = std::move(report);
    }
  }
  const auto recipe = summary.find("hyperparameters");
  if (recipe != summary.end() && recipe->is_object()) cache->set_provenance_json(recipe->dump());
}

}  // namespace stillhouse
