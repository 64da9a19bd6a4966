// Facts for programs, carried by an absl::Status beside its message: the service room sends them as ErrorInfo.
#ifndef STILLHOUSE_SERVER_TENANCY_REASON_H_
#define STILLHOUSE_SERVER_TENANCY_REASON_H_

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace stillhouse {

using ReasonFacts = std::initializer_list<std::pair<std::string_view, std::string>>;

// `status` with a reason in UPPER_SNAKE_CASE and facts such as {"field", "temperature"}. A reason that is already there
// stays: whoever is nearest to the failure knows best. OK stays OK.
absl::Status WithReason(absl::Status status, std::string_view reason, ReasonFacts facts = {});
// `status` with the time after which a retry may succeed.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);

struct Reason {
  std::string reason;  // empty: none was given
  std::map<std::string, std::string> facts;
  std::optional<absl::Duration> retry_after;
};
Reason GetReason(const absl::Status& status);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_REASON_H_
