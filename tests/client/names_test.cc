#include "client/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "absl/strings/str_cat.h"
#include "client/client.h"

namespace stillhouse::client {
namespace {

using ::testing::HasSubstr;

TEST(IsValidId, AgreesWithTheRule) {
  const std::regex rule("^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$");
  for (const std::string& id :
       {std::string("a"), std::string("a1"), std::string("a-b"), std::string("a-"), std::string("-a"),
        std::string("1a"), std::string(""), std::string("A"), std::string("a_b"), std::string("a.b"), std::string("é"),
        std::string("a b"), std::string(63, 'x'), std::string(64, 'x'), absl::StrCat("a", std::string(61, '-'), "b"),
        std::string("a\n")}) {
    EXPECT_EQ(IsValidId(id), std::regex_match(id, rule)) << id;
  }
}

TEST(DeriveId, MakesTheFileNameValid) {
  EXPECT_EQ(DeriveId("/a/Employee Handbook (v2).txt"), "employee-handbook-v2");
  EXPECT_EQ(DeriveId("/usr/share/common-licenses/Apache-2.0"), "apache-2-0");
  EXPECT_EQ(DeriveId("notes.tar.gz"), "notes-tar");
  EXPECT_EQ(DeriveId("2024 report.md"), "d2024-report");
  EXPECT_EQ(DeriveId("__x__"), "x");
  EXPECT_EQ(DeriveId(".profile"), "profile");
  EXPECT_EQ(DeriveId("日本語.txt"), "document");
  EXPECT_EQ(DeriveId(""), "document");
  EXPECT_EQ(DeriveId("/"), "document");
  EXPECT_EQ(DeriveId("folder/"), "folder");
}

TEST(DeriveId, AlwaysGivesAValidId) {
  for (const std::string& text : {std::string(200, 'x'), std::string(62, 'a') + "--b", std::string(81, '9'),
                                  std::string("\0\xff weird", 8), std::string("a.") + std::string(70, 'b')}) {
    EXPECT_TRUE(IsValidId(DeriveId(text))) << DeriveId(text);
  }
}

TEST(CheckId, ShowsTheNearestValidId) {
  EXPECT_TRUE(CheckId("corpus id", "handbook").ok());
  EXPECT_THAT(std::string(CheckId("corpus id", "Hand Book").message()), HasSubstr("\"hand-book\""));
}

TEST(Names, ShortAndFullForms) {
  EXPECT_EQ(*CorpusName("tenants/t", "handbook"), "tenants/t/corpora/handbook");
  EXPECT_EQ(*CorpusName("tenants/t", "tenants/u/corpora/x"), "tenants/u/corpora/x");
  EXPECT_EQ(*CacheName("tenants/t", "handbook/quick"), "tenants/t/corpora/handbook/caches/quick");
  EXPECT_EQ(*CacheName("tenants/t", "tenants/u/corpora/x/caches/y"), "tenants/u/corpora/x/caches/y");
  EXPECT_EQ(*MemoryName("tenants/t", "handbook"), "tenants/t/corpora/handbook");
  EXPECT_EQ(*MemoryName("tenants/t", "handbook/quick"), "tenants/t/corpora/handbook/caches/quick");
  EXPECT_EQ(*OperationName("x1"), "operations/x1");
  EXPECT_EQ(*OperationName("operations/x1"), "operations/x1");
  EXPECT_EQ(*TenantName("legal"), "tenants/legal");
}

TEST(Names, RefusesOtherForms) {
  for (const char* text : {"", "/", "a/b/c", "Handbook", "handbook/", "/quick", "tenants/t/corpora", "../x",
                           "tenants/t/corpora/x/caches/"}) {
    EXPECT_FALSE(CacheName("tenants/t", text).ok()) << text;
    EXPECT_FALSE(MemoryName("tenants/t", text).ok()) << text;
  }
  EXPECT_FALSE(CacheName("tenants/t", "handbook").ok());
  EXPECT_FALSE(CorpusName("tenants/t", "handbook/quick").ok());
  EXPECT_FALSE(OperationName("a/b").ok());
  EXPECT_FALSE(OperationName("").ok());
}

TEST(ShortName, InvertsTheLongForm) {
  EXPECT_EQ(ShortName("tenants/t/corpora/handbook"), "handbook");
  EXPECT_EQ(ShortName("tenants/t/corpora/handbook/caches/quick"), "handbook/quick");
  EXPECT_EQ(ShortName("operations/x"), "x");
  EXPECT_EQ(ShortName("anything else"), "anything else");
}

TEST(RequestId, IsAVersion4Uuid) {
  const std::regex uuid("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}");
  EXPECT_TRUE(std::regex_match(NewRequestId(), uuid)) << NewRequestId();
  EXPECT_NE(NewRequestId(), NewRequestId());
}

TEST(LocalAddress, LoopbackAndSocketsOnly) {
  for (const char* address : {"127.0.0.1:1", "127.9.9.9:1", "localhost:7070", "[::1]:7070", "unix:/run/x"}) {
    EXPECT_TRUE(IsLocalAddress(address)) << address;
  }
  for (const char* address : {"10.0.0.1:1", "example.org:443", "localhost.example.org:1", "127.example.org:1",
                              "127.0.0.1.example.org:1", "[::2]:1", "0.0.0.0:1"}) {
    EXPECT_FALSE(IsLocalAddress(address)) << address;
  }
}

}  // namespace
}  // namespace stillhouse::client
