#include "server/tenancy/resource_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(ResourceNameTest, ParsesEveryForm) {
  EXPECT_EQ(*ParseTenantName("tenants/acme"), "acme");
  EXPECT_EQ(*ParseCorpusName("tenants/acme/corpora/hand-book2"), (CorpusName{"acme", "hand-book2"}));
  EXPECT_EQ(*ParseCacheName("tenants/a/corpora/b/caches/c"), (CacheName{"a", "b", "c"}));
  EXPECT_EQ(*ParseOperationName("operations/op-1"), "op-1");
  EXPECT_EQ(ParseKeyName("tenants/a/keys/0123456789abcdef")->key, "0123456789abcdef");
  EXPECT_EQ(ParseCacheOrCorpusName("tenants/a/corpora/b")->cache, "");
  EXPECT_EQ(ParseCacheOrCorpusName("tenants/a/corpora/b/caches/c")->cache, "c");
  EXPECT_EQ(ParseCorpusNameOrAll("tenants/a/corpora/-")->corpus, "");
  EXPECT_EQ(ParseCorpusNameOrAll("tenants/a/corpora/b")->corpus, "b");
  EXPECT_EQ((CacheName{"a", "b", "c"}).ToString(), "tenants/a/corpora/b/caches/c");
}

TEST(ResourceNameTest, RefusesEverythingElse) {
  const std::string long_id(64, 'a');
  for (const std::string& bad :
       {std::string(), std::string("acme"), std::string("tenants"), std::string("tenants/"), std::string("tenants/A"),
        std::string("tenants/1a"), std::string("tenants/a-"), std::string("tenants/-"), std::string("tenants/a/"),
        std::string("/tenants/a"), std::string("tenants//a"), std::string("tenants/a/b"), std::string("tenants/.."),
        std::string("tenants/a b"), std::string("tenants/a\0b", 11), "tenants/" + long_id, std::string("tenants/ä"),
        std::string("xtenants/a"), std::string("tenantsx/a")}) {
    EXPECT_EQ(ParseTenantName(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(ParseTenantName("tenants/" + std::string(63, 'a')).ok());
  for (const char* bad : {"tenants/a", "tenants/a/corpora", "tenants/a/corpora/", "tenants/a/caches/b",
                          "tenants/a/corpora/b/caches/c", "tenants/a/corpora/../x", "tenants/a/corpora/-"}) {
    EXPECT_FALSE(ParseCorpusName(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseCacheName("tenants/a/corpora/b/caches/c/d").ok());
  EXPECT_FALSE(ParseKeyName("tenants/a/keys/zzz").ok());
  EXPECT_FALSE(ParseOperationName("operations/UPPER").ok());
}

TEST(ResourceNameTest, MessagesQuoteNoControlCharactersAndNoFloods) {
  const absl::Status status = ParseTenantName("tenants/\x1b[31m" + std::string(5000, 'x')).status();
  EXPECT_LT(status.message().size(), 400u);
  EXPECT_THAT(std::string(ToStd(status.message())), Not(HasSubstr("\x1b")));
  EXPECT_THAT(std::string(ToStd(status.message())), HasSubstr("tenants/{tenant}"));
}

TEST(ResourceNameTest, Uuids) {
  EXPECT_TRUE(IsUuid("123e4567-e89b-12d3-a456-426614174000"));
  EXPECT_TRUE(IsUuid("123E4567-E89B-12D3-A456-426614174000"));
  for (const char* bad : {"", "123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400",
                          "g23e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-4266141740000"}) {
    EXPECT_FALSE(IsUuid(bad)) << bad;
  }
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string uuid = MakeUuid();
    EXPECT_TRUE(IsUuid(uuid)) << uuid;
    EXPECT_EQ(uuid[14], '4');
    EXPECT_TRUE(seen.insert(uuid).second);
  }
  EXPECT_EQ(RandomSuffix(8).size(), 8u);
  EXPECT_TRUE(CheckResourceId("cache-" + RandomSuffix(8), "cache_id").ok());
}

}  // namespace
}  // namespace stillhouse
