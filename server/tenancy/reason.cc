#include "server/tenancy/reason.h"

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stillhouse {
namespace {

constexpr char kReasonUrl[] = "stillhouse/reason";
constexpr char kRetryUrl[] = "stillhouse/retry_after_ms";
constexpr char kFactPrefix[] = "stillhouse/fact/";

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason, ReasonFacts facts) {
  if (status.ok() || status.GetPayload(kReasonUrl)) return status;
  status.SetPayload(kReasonUrl, absl::Cord(std::string(reason)));
  for (const auto& [key, value] : facts) {
    status.SetPayload(absl::StrCat(kFactPrefix, std::string(key)), absl::Cord(value));
  }
  return status;
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  if (!status.ok()) status.SetPayload(kRetryUrl, absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(delay))));
  return status;
}

Reason GetReason(const absl::Status& status) {
  Reason out;
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& value) {
    const std::string text(value);
    int64_t milliseconds = 0;
    if (url == kReasonUrl) {
      out.reason = text;
    } else if (absl::StartsWith(url, kFactPrefix)) {
      out.facts.emplace(std::string(url.substr(sizeof(kFactPrefix) - 1)), text);
    } else if (url == kRetryUrl && absl::SimpleAtoi(text, &milliseconds)) {
      out.retry_after = absl::Milliseconds(milliseconds);
    }
  });
  return out;
}

}  // namespace stillhouse
