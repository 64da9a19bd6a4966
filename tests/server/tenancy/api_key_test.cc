#include "server/tenancy/api_key.h"

#include <gtest/gtest.h>

#include <set>

namespace stillhouse {
namespace {

TEST(ApiKeyTest, RoundTripsAndDiffers) {
  std::set<std::string> ids, secrets;
  for (int i = 0; i < 100; ++i) {
    const ApiKey key = MakeApiKey();
    const std::optional<ApiKey> parsed = ParseApiKey(key.ToString());
    ASSERT_TRUE(parsed) << key.ToString();
    EXPECT_EQ(parsed->id, key.id);
    EXPECT_EQ(parsed->secret, key.secret);
    EXPECT_TRUE(ids.insert(key.id).second);
    EXPECT_TRUE(secrets.insert(key.secret).second);
  }
}

TEST(ApiKeyTest, RefusesOtherForms) {
  const std::string good = MakeApiKey().ToString();
  for (const std::string& bad :
       {std::string(), std::string("sth_"), good + "x", good.substr(0, good.size() - 1), "xth_" + good.substr(4),
        good.substr(0, 20) + "-" + good.substr(21), good.substr(0, good.size() - 1) + "!",
        "sth_" + std::string(16, 'Z') + good.substr(20), std::string(good.size(), '\0')}) {
    EXPECT_FALSE(ParseApiKey(bad)) << bad;
  }
}

TEST(ApiKeyTest, HashDependsOnIdAndSecret) {
  const ApiKey a{"0123456789abcdef", std::string(43, 'a')};
  const ApiKey other_salt{"1123456789abcdef", a.secret};
  const ApiKey other_secret{a.id, std::string(42, 'a') + "b"};
  // printf 'stillhouse api key\0000123456789abcdef\000aaa…(43)' | sha256sum
  EXPECT_EQ(HashApiKey(a), "60cb88a571d543c5e8b951f28feff0b9142922005d671618391da820294d9ca4");
  EXPECT_NE(HashApiKey(a), HashApiKey(other_salt));
  EXPECT_NE(HashApiKey(a), HashApiKey(other_secret));
}

TEST(ApiKeyTest, ComparesEqualOnlyWhenEqual) {
  EXPECT_TRUE(ConstantTimeEquals("", ""));
  EXPECT_TRUE(ConstantTimeEquals("abc", "abc"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "abd"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "ab"));
  EXPECT_FALSE(ConstantTimeEquals("", "a"));
}

}  // namespace
}  // namespace stillhouse
