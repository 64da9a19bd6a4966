// What lists show of a cache without opening its file: the `summary_json` of its row.
#ifndef STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_
#define STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_

#include <string>
#include <string_view>

#include "cache_store/artifact.h"

namespace stillhouse {

namespace v1 {
class Cache;
}

// The summary of an imported file: the keys of the file's own header, and the display name.
std::string ArtifactSummaryJson(const ArtifactHeader& header, std::string_view display_name);

// Fills what a summary says; what it does not say, or says in another form, stays unset.
void FillFromSummary(std::string_view summary_json, v1::Cache* cache);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_
