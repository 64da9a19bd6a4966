#include "server/service/artifact_summary.h"

#include <gtest/gtest.h>

#include "server/corpus/build_record.h"
#include "stillhouse/v1/caches.pb.h"

namespace stillhouse {
namespace {

TEST(ArtifactSummaryTest, WhatGoesInComesOut) {
  ArtifactHeader header;
  header.fingerprints.model = "m1";
  header.fingerprints.dtype = "F32";
  header.method = "CARTRIDGE";
  header.layers = 2;
  header.kv_heads = 3;
  header.head_dim = 16;
  header.slots = 10;
  header.logical_length = 95;
  header.has_beta = true;
  header.corpus_tokens = 100;
  header.quality_json =
      R"({"rows":[{"memory":"cache","mean_nll":1.5,"kv_bytes":7,"recovered":0.9}],"recovered":0.9,"questions":8,"new":1})";
  header.hyperparameters_json = R"({"steps":170})";
  v1::Cache cache;
  FillFromSummary(SummaryJson(header, "The book"), &cache);
  EXPECT_EQ(cache.display_name(), "The book");
  EXPECT_EQ(cache.slots(), 10);
  EXPECT_EQ(cache.logical_length(), 95);
  EXPECT_EQ(cache.next_position(), 95);
  EXPECT_EQ(cache.compression_ratio(), 10.0);
  EXPECT_EQ(cache.model_fingerprint(), "m1");
  EXPECT_EQ(cache.dtype(), "F32");
  // 2·L·H_kv·d·slots·4 + L·H_kv·slots·4 of β
  EXPECT_EQ(cache.canonical_bytes(), 2 * 2 * 3 * 16 * 10 * 4 + 2 * 3 * 10 * 4);
  ASSERT_TRUE(cache.has_quality());
  EXPECT_EQ(cache.quality().recovered(), 0.9);
  EXPECT_EQ(cache.quality().questions(), 8);
  EXPECT_EQ(cache.quality().rows(0).memory(), "cache");
  EXPECT_EQ(cache.provenance_json(), R"({"steps":170})");
}

TEST(ArtifactSummaryTest, OddSummariesLeaveFieldsUnset) {
  for (const char* odd : {"", "null", "[]", "{", "{\"slots\":\"ten\",\"fingerprints\":3,\"quality\":\"good\"}",
                          "{\"slots\":1e300,\"quality\":{\"rows\":5}}"}) {
    v1::Cache cache;
    FillFromSummary(odd, &cache);
    EXPECT_EQ(cache.slots(), 0) << odd;
    EXPECT_FALSE(cache.has_quality()) << odd;
  }
}

}  // namespace
}  // namespace stillhouse
