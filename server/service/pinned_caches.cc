#include "server/service/pinned_caches.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "cache_store/store.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/metrics/metrics.h"
#include "server/service/convert.h"
#include "server/service/validation.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"

namespace stillhouse {
namespace {

// Below this share of what the full text gives, an answer deserves a warning.
constexpr double kLowRecovered = 0.6;

void WarnOfQuality(const std::string& name, const std::string& quality_json, std::vector<std::string>* warnings) {
  const nlohmann::json quality = nlohmann::json::parse(quality_json, nullptr, /*allow_exceptions=*/false);
  if (!quality.is_object()) return;
  const auto it = quality.find("recovered");
  if (it == quality.end() || !it->is_number()) return;
  const double recovered = it->get<double>();
  if (recovered >= kLowRecovered) return;
  warnings->push_back(absl::StrFormat(
      "%s gives %.0f %% of what the full text gives on held-out questions; build it with more slots or training", name,
      recovered * 100));
}

}  // namespace

absl::StatusOr<PinnedCaches> PinCaches(const ServiceContext& service, const Caller& caller,
                                       const google::protobuf::RepeatedPtrField<std::string>& names) {
  PinnedCaches out;
  if (names.empty()) {
    service.metrics->Increment(Metric::kCacheRoute, {"none", "none"});
    return out;
  }
  if (names.size() > kMaxCachesPerQuery) {
    return BadField("caches", StrCat("names ", names.size(), " memories; at most ", kMaxCachesPerQuery));
  }
  for (const std::string& written : names) {
    STILLHOUSE_ASSIGN_OR_RETURN(const CacheName name, ParseCacheOrCorpusName(written));
    STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, name.tenant, written));
    const absl::StatusOr<PinnedMemory> pinned = service.doors.pin(name.tenant, name.corpus, name.cache);
    if (!pinned.ok()) {
      if (!absl::IsNotFound(pinned.status())) return pinned.status();
      service.metrics->Increment(Metric::kCacheRoute, {"none", "not_found"});
      if (name.cache.empty() && service.store->GetCorpus(name.tenant, name.corpus).ok()) {
        return WithReason(absl::NotFoundError(StrCat(written, " has no cache yet; build one with BuildCache")),
                          "NO_CACHE");
      }
      return NotFound(written);
    }
    // One BOS column is enough: each further one takes attention that belongs to the documents.
    const std::shared_ptr<const Memory>& memory = out.memories.empty() ? pinned->memory : pinned->behind_another;
    const std::string full = CacheName{pinned->tenant, pinned->corpus_id, pinned->cache_id}.ToString();
    v1::CacheUse use;
    use.set_name(full);
    use.set_method(MethodFromName(pinned->method));
    use.set_slots(static_cast<int32_t>(memory->slots));
    use.set_logical_length(memory->next_position);
    use.set_was_resident(pinned->was_resident);
    out.uses.push_back(std::move(use));
    out.load_time += pinned->load_time;
    out.slots += memory->slots;
    WarnOfQuality(full, pinned->header.quality_json, &out.warnings);
    out.memories.push_back(memory);
  }
  if (out.memories.size() > 1) {
    out.warnings.push_back(StrCat("the answer comes from ", out.memories.size(),
                                  " memories that were not trained together; quality falls with their number"));
  }
  return out;
}

}  // namespace stillhouse
