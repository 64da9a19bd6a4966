#include "server/corpus/build_record.h"

#include "nlohmann/json.hpp"

namespace stillhouse {

using nlohmann::json;

std::string ProvenanceJson(const BuildSpec& spec) {
  json recipe = json::parse(BuildSpecToJson(spec), nullptr, /*allow_exceptions=*/false);
  if (!recipe.is_object()) return "{}";
  for (const char* name : {"tenant", "corpus_id", "cache_id", "display_name", "replace", "expected_etag"}) {
    recipe.erase(name);
  }
  recipe["self_study"]["questions"] = spec.self_study.questions.size();
  recipe["evaluation"]["questions"] = spec.evaluation.questions.size();
  recipe["evaluation"]["answers"] = spec.evaluation.answers.size();
  return recipe.dump();
}

std::string SummaryJson(const ArtifactHeader& h, const std::string& display_name) {
  auto object = [](const std::string& text) {
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    return value.is_object() ? value : json::object();
  };
  const json summary = {{"display_name", display_name},
                        {"method", h.method},
                        {"fingerprints", {{"model", h.fingerprints.model}, {"dtype", h.fingerprints.dtype}}},
                        {"layers", h.layers},
                        {"kv_heads", h.kv_heads},
                        {"head_dim", h.head_dim},
                        {"slots", h.slots},
                        {"logical_length", h.logical_length},
                        {"has_beta", h.has_beta},
                        {"corpus_tokens", h.corpus_tokens},
                        {"quality", object(h.quality_json)},
                        {"hyperparameters", object(h.hyperparameters_json)}};
  return summary.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace stillhouse
