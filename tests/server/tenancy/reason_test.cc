#include "server/tenancy/reason.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stillhouse {
namespace {

TEST(ReasonTest, CarriesReasonFactsAndRetry) {
  const absl::Status status =
      WithRetryAfter(WithReason(absl::UnavailableError("full"), "QUEUE_FULL", {{"limit", "8"}, {"field", "x"}}),
                     absl::Milliseconds(1500));
  const Reason reason = GetReason(status);
  EXPECT_EQ(reason.reason, "QUEUE_FULL");
  EXPECT_THAT(reason.facts, testing::ElementsAre(testing::Pair("field", "x"), testing::Pair("limit", "8")));
  EXPECT_EQ(reason.retry_after, absl::Milliseconds(1500));
  EXPECT_EQ(status.message(), "full");
}

TEST(ReasonTest, TheNearestReasonStays) {
  const absl::Status status = WithReason(WithReason(absl::NotFoundError("x"), "INNER"), "OUTER", {{"a", "b"}});
  EXPECT_EQ(GetReason(status).reason, "INNER");
  EXPECT_TRUE(GetReason(status).facts.empty());
}

TEST(ReasonTest, OkStaysOk) {
  EXPECT_TRUE(WithRetryAfter(WithReason(absl::OkStatus(), "X"), absl::Seconds(1)).ok());
  EXPECT_EQ(GetReason(absl::OkStatus()).reason, "");
  EXPECT_FALSE(GetReason(absl::InternalError("x")).retry_after);
}

}  // namespace
}  // namespace stillhouse
