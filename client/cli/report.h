#ifndef STILLHOUSE_CLIENT_CLI_REPORT_H_
#define STILLHOUSE_CLIENT_CLI_REPORT_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/cli/session.h"
#include "stillhouse/v1/caches.pb.h"

namespace stillhouse::client {

// The report as a table of memories (NLL, KL, bytes, recovered) and a line on how it was made.
std::string ReportText(const v1::QualityReport& report);

// The row of a memory ("none", "full", "cache", "truncated"), or null.
const v1::QualityReport::Row* FindRow(const v1::QualityReport& report, absl::string_view memory);

// Waits for a build with a progress bar that says `label` before the stage. Ctrl-C leaves the build running, says how
// to come back to it, and returns CANCELLED. Returns the finished cache.
absl::StatusOr<v1::Cache> FollowBuild(Session& session, Client& client, const v1::Operation& operation,
                                      const std::string& label = "");

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_REPORT_H_
