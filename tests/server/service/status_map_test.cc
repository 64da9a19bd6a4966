#include "server/service/status_map.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include "server/service/convert.h"
#include "server/tenancy/reason.h"
#include "stillhouse/v1/errors.pb.h"
#include "stillhouse/v1/operations.pb.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::Status Details(const grpc::Status& status) {
  v1::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

TEST(StatusMapTest, CarriesCodeMessageReasonFactsAndRetry) {
  const grpc::Status status = ToGrpcStatus(WithRetryAfter(
      WithReason(absl::OutOfRangeError("too long"), "PROMPT_TOO_LONG", {{"limit", "8"}}), absl::Milliseconds(2500)));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(status.error_message(), "too long");
  const v1::Status details = Details(status);
  EXPECT_EQ(details.code(), 11);
  EXPECT_EQ(details.message(), "too long");
  ASSERT_EQ(details.details_size(), 2);
  v1::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "PROMPT_TOO_LONG");
  EXPECT_EQ(info.domain(), "stillhouse");
  EXPECT_EQ(info.metadata().at("limit"), "8");
  v1::RetryInfo retry;
  ASSERT_TRUE(details.details(1).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 2);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
}

TEST(StatusMapTest, EveryCodeKeepsItsNumberAndGetsAReason) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "m");
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(ReasonOf(status), absl::StatusCodeToString(status.code()));
    EXPECT_NE(std::string(CodeName(status.code())), "OK");
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(StatusMapTest, InternalErrorsSayNothingOfTheirCause) {
  const grpc::Status status = ToGrpcStatus(absl::InternalError("pointer 0xdeadbeef in frobnicate()"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), Not(HasSubstr("deadbeef")));
  EXPECT_THAT(status.error_details(), Not(HasSubstr("deadbeef")));
}

TEST(StatusMapTest, MessagesAreValidUtf8) {
  // Protobuf does not read others back: the reason would be lost with them.
  const std::string message = Details(ToGrpcStatus(absl::NotFoundError("cut within \xc3"))).message();
  EXPECT_EQ(message, "cut within \xef\xbf\xbd");
}

TEST(StatusMapTest, FailedBuildsSayWhatFailedCallsMaySay) {
  BuildInfo info;
  info.row.state = OperationState::kFailed;
  info.row.error_code = static_cast<int>(absl::StatusCode::kInvalidArgument);
  info.row.error_message = "cut within \xc3";
  v1::Operation read;
  EXPECT_TRUE(read.ParseFromString(ToProto(info).SerializeAsString()));
  info.row.error_code = static_cast<int>(absl::StatusCode::kInternal);
  info.row.error_message = "pointer 0xdeadbeef in frobnicate()";
  EXPECT_THAT(ToProto(info).error().message(), Not(HasSubstr("deadbeef")));
}

TEST(StatusMapTest, PathsAreCutDown) {
  EXPECT_EQ(WithoutPaths("cannot write /var/lib/stillhouse/blobs/ab/cd: disk full"), "cannot write cd: disk full");
  EXPECT_EQ(WithoutPaths("'/srv/x.gguf'"), "'x.gguf'");
  EXPECT_EQ(WithoutPaths("tenants/a/corpora/b has caches"), "tenants/a/corpora/b has caches");
  EXPECT_EQ(WithoutPaths("3 / 4 and http://host/path"), "3 / 4 and http:path");
  EXPECT_EQ(WithoutPaths("/"), "/");
  EXPECT_EQ(WithoutPaths(""), "");
  EXPECT_EQ(WithoutPaths("/a/b/"), "b/");
}

TEST(StatusMapTest, LongMessagesAreCutAtACodePoint) {
  std::string message;
  for (int i = 0; i < 1000; ++i) message += "é";
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError(message));
  EXPECT_LT(status.error_message().size(), 1100u);
  EXPECT_TRUE(Details(status).IsInitialized());
}

}  // namespace
}  // namespace stillhouse
