// What lists show of a cache without opening its file: the `summary_json` of its row (SummaryJson of build_record.h).
#ifndef STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_
#define STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_

#include <string_view>

namespace stillhouse {

namespace v1 {
class Cache;
}

// Fills what a summary says; what it does not say, or says in another form, stays unset.
void FillFromSummary(std::string_view summary_json, v1::Cache* cache);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_ARTIFACT_SUMMARY_H_
