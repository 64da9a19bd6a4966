#include "client/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "stillhouse/v1/errors.pb.h"

namespace stillhouse::client {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string Details(const std::string& reason, int retry_seconds = -1) {
  v1::Status status;
  v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("stillhouse");
  (*info.mutable_metadata())["committed_bytes"] = "65536";
  auto* any = status.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value(info.SerializeAsString());
  if (retry_seconds >= 0) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(retry_seconds);
    any = status.add_details();
    any->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
    any->set_value(retry.SerializeAsString());
  }
  return status.SerializeAsString();
}

TEST(FromRpc, CarriesTheServersSentenceAndReason) {
  const absl::Status status = FromRpc(5, "There is no cache \"x\".", Details("CACHE_NOT_FOUND"), true);
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(OriginOf(status), Origin::kServer);
  EXPECT_EQ(Reason(status), "CACHE_NOT_FOUND");
  EXPECT_EQ(Fact(status, "committed_bytes"), "65536");
  EXPECT_EQ(Fact(status, "field"), std::nullopt);
  EXPECT_EQ(Describe(status), "NOT_FOUND: There is no cache \"x\". (CACHE_NOT_FOUND)");
  EXPECT_FALSE(IsTransient(status));
}

TEST(FromRpc, OkStaysOk) { EXPECT_TRUE(FromRpc(0, "", "", true).ok()); }

TEST(FromRpc, UnavailableWithoutDetailsIsTheConnection) {
  const absl::Status status = FromRpc(14, "failed to connect to all addresses", "", false);
  EXPECT_EQ(OriginOf(status), Origin::kTransport);
  EXPECT_TRUE(IsTransient(status));
  EXPECT_THAT(Hint(status, "127.0.0.1:7070"), HasSubstr("127.0.0.1:7070"));
}

TEST(FromRpc, UnavailableWithDetailsIsTheServer) {
  const absl::Status status = FromRpc(14, "The server is draining.", Details("DRAINING", 3), true);
  EXPECT_EQ(OriginOf(status), Origin::kServer);
  EXPECT_TRUE(IsTransient(status));
  EXPECT_EQ(RetryDelay(status), absl::Seconds(3));
  EXPECT_EQ(Hint(status, ""), "Try again in 3s.");
}

TEST(FromRpc, DeadlineBeforeAnyConnectionIsTheConnection) {
  EXPECT_EQ(OriginOf(FromRpc(4, "Deadline Exceeded", "", false)), Origin::kTransport);
  EXPECT_EQ(OriginOf(FromRpc(4, "Deadline Exceeded", "", true)), Origin::kServer);
}

TEST(FromRpc, ResourceExhaustedIsTransientOnlyWithARetryHint) {
  EXPECT_TRUE(IsTransient(FromRpc(8, "Queue full.", Details("QUEUE_FULL", 1), true)));
  EXPECT_FALSE(IsTransient(FromRpc(8, "Disk full.", Details("STORE_FULL"), true)));
}

TEST(FromRpc, GarbageDetailsAreIgnored) {
  const absl::Status status = FromRpc(3, "Bad.", "\xff\xff\xff\xff", true);
  EXPECT_EQ(Reason(status), "");
  EXPECT_EQ(OriginOf(status), Origin::kServer);
  EXPECT_EQ(status.message(), "Bad.");
}

TEST(FromRpc, CodesOutsideTheCanonicalOnesBecomeUnknown) {
  const absl::Status status = FromRpc(99, "", "", true);
  EXPECT_TRUE(absl::IsUnknown(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("CODE_99"));
}

TEST(FromRpc, NegativeRetryDelaysAreZero) {
  v1::Status rich;
  v1::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(-5);
  auto* any = rich.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  any->set_value(retry.SerializeAsString());
  EXPECT_EQ(RetryDelay(FromRpc(14, "x", rich.SerializeAsString(), true)), absl::ZeroDuration());
}

TEST(FromOperation, KeepsCodeAndReason) {
  const absl::Status status = FromOperation(9, "The document is too short.", "CORPUS_TOO_SHORT");
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(Reason(status), "CORPUS_TOO_SHORT");
  EXPECT_EQ(OriginOf(status), Origin::kServer);
}

TEST(Describe, LocalErrorsAreTheirSentence) {
  const absl::Status status = absl::InvalidArgumentError("Name the document with --id.");
  EXPECT_EQ(OriginOf(status), Origin::kLocal);
  EXPECT_EQ(Describe(status), "Name the document with --id.");
  EXPECT_EQ(Hint(status, "x"), "");
}

TEST(Hint, TellsWhatIsWrongWithTls) {
  const auto hint = [](const char* message) { return Hint(FromRpc(14, message, "", false), "h:1"); };
  EXPECT_THAT(hint("Ssl handshake failed: SSL routines::certificate verify failed"), HasSubstr("--ca-file"));
  EXPECT_THAT(hint("Peer name h is not in peer certificate"), HasSubstr("--server-name"));
  EXPECT_THAT(hint("SSL routines::wrong version number"), HasSubstr("does not speak TLS"));
  EXPECT_THAT(hint("last error: UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed"), HasSubstr("--cert-file"));
  EXPECT_THAT(hint("Connection refused"), HasSubstr("stillhouse-server"));
}

TEST(Hint, SaysWhereTheKeyGoes) {
  EXPECT_THAT(Hint(FromRpc(16, "No key.", Details("NO_KEY"), true), ""), HasSubstr("STILLHOUSE_KEY"));
}

}  // namespace
}  // namespace stillhouse::client
