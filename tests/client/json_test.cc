#include "client/cli/json.h"

#include <gtest/gtest.h>

#include <limits>

#include "client/error.h"
#include "stillhouse/v1/caches.pb.h"
#include "stillhouse/v1/inference.pb.h"

namespace stillhouse::client {
namespace {

TEST(ToJson, NumbersEnumsAndTimes) {
  v1::Cache cache;
  cache.set_name("tenants/t/corpora/c/caches/k");
  cache.set_method(v1::CARTRIDGE);
  cache.set_canonical_bytes(int64_t{1} << 53);
  cache.mutable_create_time()->set_seconds(1700000000);
  cache.mutable_create_time()->set_nanos(500000000);
  const Json json = ToJson(cache);
  EXPECT_EQ(json["method"], "CARTRIDGE");
  EXPECT_EQ(json["canonical_bytes"], int64_t{1} << 53);
  EXPECT_EQ(json["create_time"], "2023-11-14T22:13:20.500Z");
  EXPECT_EQ(json["slots"], 0);
  EXPECT_FALSE(json.contains("quality"));
}

TEST(ToJson, OptionalFieldsOnlyWhereSet) {
  v1::QualityReport report;
  auto* row = report.add_rows();
  row->set_memory("none");
  EXPECT_FALSE(ToJson(report)["rows"][0].contains("recovered"));
  row->set_recovered(0);
  EXPECT_EQ(ToJson(report)["rows"][0]["recovered"], 0.0);
  row->set_mean_nll(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(ToJson(report)["rows"][0]["mean_nll"].is_null());
}

TEST(ToJson, OneofsShowTheirMember) {
  v1::QueryEvent event;
  event.mutable_token()->set_text("a");
  const Json json = ToJson(event);
  EXPECT_EQ(json.size(), 1u);
  EXPECT_EQ(json["token"]["text"], "a");
}

TEST(Dump, BadUtf8IsReplacedNotThrown) {
  v1::TokenizeResponse response;
  response.add_pieces("\xe2\x82");
  EXPECT_NE(Dump(ToJson(response)).find("\xef\xbf\xbd"), std::string::npos);
}

TEST(ErrorJson, SaysWhoRefused) {
  EXPECT_EQ(Dump(ErrorJson(FromOperation(5, "No.", "X_NOT_FOUND"))),
            R"({"error":{"code":"NOT_FOUND","message":"No.","origin":"server","reason":"X_NOT_FOUND"}})");
  EXPECT_EQ(ErrorJson(absl::InvalidArgumentError("a"))["error"]["origin"], "client");
}

}  // namespace
}  // namespace stillhouse::client
