#include "server/corpus/build_record.h"

#include <utility>

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

std::string SummaryJson(const ArtifactHeader& h, std::string_view display_name) {
  json summary = {{"display_name", std::string(display_name)},
                  {"method", h.method},
                  {"fingerprints", {{"model", h.fingerprints.model}, {"dtype", h.fingerprints.dtype}}},
                  {"layers", h.layers},
                  {"kv_heads", h.kv_heads},
                  {"head_dim", h.head_dim},
                  {"slots", h.slots},
                  {"logical_length", h.logical_length},
                  {"has_beta", h.has_beta},
                  {"corpus_tokens", h.corpus_tokens}};
  for (const auto& [key, text] : {std::pair<const char*, const std::string&>{"quality", h.quality_json},
                                  {"hyperparameters", h.hyperparameters_json}}) {
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (value.is_object() && !value.empty()) summary[key] = std::move(value);
  }
  return summary.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace stillhouse
