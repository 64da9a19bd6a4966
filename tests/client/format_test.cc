#include "client/cli/format.h"

#include <gtest/gtest.h>

#include <limits>

namespace stillhouse::client {
namespace {

TEST(Bytes, PicksAUnit) {
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1023), "1023 B");
  EXPECT_EQ(Bytes(1024), "1.0 KiB");
  EXPECT_EQ(Bytes(1536), "1.5 KiB");
  EXPECT_EQ(Bytes((1 << 20) - 1), "1.0 MiB");
  EXPECT_EQ(Bytes(98362432), "93.8 MiB");
  EXPECT_EQ(Bytes(std::numeric_limits<int64_t>::max()), "8.0 EiB");
}

TEST(Seconds, PicksAUnit) {
  EXPECT_EQ(Seconds(0), "0 µs");
  EXPECT_EQ(Seconds(0.00087), "870 µs");
  EXPECT_EQ(Seconds(0.0123), "12.3 ms");
  EXPECT_EQ(Seconds(4.2), "4.2 s");
  EXPECT_EQ(Seconds(59.97), "1m00s");
  EXPECT_EQ(Seconds(185), "3m05s");
  EXPECT_EQ(Seconds(7800), "2h10m");
  EXPECT_EQ(Seconds(-1), "-");
  EXPECT_EQ(Seconds(std::numeric_limits<double>::quiet_NaN()), "-");
  EXPECT_EQ(Seconds(std::numeric_limits<double>::infinity()), "-");
}

TEST(Count, Groups) {
  EXPECT_EQ(Count(0), "0");
  EXPECT_EQ(Count(999), "999");
  EXPECT_EQ(Count(12345), "12,345");
  EXPECT_EQ(Count(-1234567), "-1,234,567");
}

TEST(Method, WordsGoBothWays) {
  for (int i = v1::Method_MIN; i <= v1::Method_MAX; ++i) {
    if (!v1::Method_IsValid(i) || i == v1::METHOD_UNSPECIFIED) continue;
    const auto method = static_cast<v1::Method>(i);
    ASSERT_TRUE(ParseMethod(MethodWord(method)).ok());
    EXPECT_EQ(*ParseMethod(MethodWord(method)), method);
  }
  EXPECT_EQ(*ParseMethod("Attention_Matching"), v1::ATTENTION_MATCHING);
  EXPECT_EQ(*ParseMethod("am"), v1::ATTENTION_MATCHING);
  EXPECT_FALSE(ParseMethod("").ok());
  EXPECT_FALSE(ParseMethod("method-unspecified").ok());
  EXPECT_EQ(*ParseProfile("thorough"), v1::THOROUGH);
  EXPECT_FALSE(ParseProfile("fast").ok());
}

TEST(Operation, InWords) {
  v1::Operation operation;
  operation.mutable_metadata()->set_stage(v1::OperationMetadata::QUEUED);
  EXPECT_EQ(OperationWord(operation), "queued");
  operation.mutable_metadata()->set_queue_position(2);
  EXPECT_EQ(OperationWord(operation), "queued behind 2");
  operation.mutable_metadata()->set_stage(v1::OperationMetadata::SELF_STUDY);
  operation.mutable_metadata()->set_fraction(0.42);
  EXPECT_EQ(OperationWord(operation), "self-study 42 %");
  operation.set_done(true);
  operation.mutable_error()->set_message("No.");
  EXPECT_EQ(OperationWord(operation), "failed: No.");
  operation.set_cache("c");
  EXPECT_EQ(OperationWord(operation), "done");
}

TEST(Ellipsis, CutsAtCodePoints) {
  EXPECT_EQ(Ellipsis("short", 10), "short");
  EXPECT_EQ(Ellipsis("äöüß", 4), "äöüß");
  EXPECT_EQ(Ellipsis("äöüßé", 4), "äöü…");
  EXPECT_EQ(Ellipsis("a\nb\tc", 10), "a b c");
  EXPECT_EQ(Ellipsis("abc", 1), "…");
  EXPECT_EQ(Ellipsis("abc", 0), "");
}

TEST(Table, AlignsColumns) {
  Table table({"NAME", "SIZE>"});
  EXPECT_TRUE(table.empty());
  table.Row({"é", "10"});
  table.Row({"long", "7"});
  table.Row({"x"});
  EXPECT_EQ(table.Text(),
            "NAME  SIZE\n"
            "é       10\n"
            "long     7\n"
            "x\n");
}

}  // namespace
}  // namespace stillhouse::client
