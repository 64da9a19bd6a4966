#include "server/tenancy/authenticator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/base/strings.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/tenant_registry.h"

namespace stillhouse {
namespace {

constexpr char kAdminKey[] = "an-admin-key-of-some-length";

class AuthenticatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = testing::TempDir() + "/authenticator_test_" + std::to_string(getpid());
    std::filesystem::remove_all(directory_);
    StoreOptions options;
    options.directory = directory_;
    options.min_free_bytes = 0;
    absl::StatusOr<std::unique_ptr<Store>> store = OpenEmbeddedStore(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    registry_ = std::make_unique<TenantRegistry>(store_.get());
  }
  void TearDown() override {
    registry_.reset();
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::string NewTenantKey(const std::string& tenant) {
    if (!registry_->Get(tenant).ok()) {
      EXPECT_TRUE(registry_->Create(tenant, "", "").ok());
    }
    const absl::StatusOr<NewKey> key = registry_->CreateKey(tenant, "test");
    EXPECT_TRUE(key.ok()) << key.status();
    last_key_id_ = key->row.key_id;
    return key->secret;
  }

  std::string directory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<TenantRegistry> registry_;
  std::string last_key_id_;
};

TEST_F(AuthenticatorTest, WithoutKeysEverybodyIsTheDefaultTenant) {
  const Authenticator open(store_.get(), "");
  EXPECT_FALSE(open.needs_keys());
  const absl::StatusOr<Caller> caller = open.Authenticate(std::nullopt);
  ASSERT_TRUE(caller.ok());
  EXPECT_EQ(caller->tenant, "default");
  EXPECT_FALSE(caller->is_admin);
  // A key that would be ignored is refused: its owner expects another tenant.
  EXPECT_EQ(open.Authenticate("Bearer x").status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AuthenticatorTest, KeysDecideTheTenant) {
  const Authenticator auth(store_.get(), kAdminKey);
  const std::string acme = NewTenantKey("acme"), other = NewTenantKey("other");
  EXPECT_EQ(auth.Authenticate("Bearer " + acme)->tenant, "acme");
  EXPECT_EQ(auth.Authenticate("bearer   " + other)->tenant, "other");
  EXPECT_FALSE(auth.Authenticate("Bearer " + acme)->is_admin);
  const absl::StatusOr<Caller> admin = auth.Authenticate(std::string("Bearer ") + kAdminKey);
  ASSERT_TRUE(admin.ok());
  EXPECT_TRUE(admin->is_admin);
  EXPECT_EQ(admin->tenant, "");
}

TEST_F(AuthenticatorTest, WrongKeysLookAlike) {
  const Authenticator auth(store_.get(), kAdminKey);
  std::string wrong_secret = NewTenantKey("acme");
  wrong_secret.back() = wrong_secret.back() == 'A' ? 'B' : 'A';
  const std::string revoked = NewTenantKey("acme");
  ASSERT_TRUE(auth.Authenticate("Bearer " + revoked).ok());
  ASSERT_TRUE(registry_->RevokeKey("acme", last_key_id_).ok());
  const std::string never_was = MakeApiKey().ToString();
  const std::string message(ToStd(auth.Authenticate("Bearer " + never_was).status().message()));
  for (const std::string& key : {wrong_secret, revoked, never_was, std::string("x"), std::string()}) {
    const absl::Status status = auth.Authenticate("Bearer " + key).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << key;
    EXPECT_EQ(std::string(ToStd(status.message())), message) << key;
  }
  EXPECT_EQ(auth.Authenticate(std::nullopt).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(GetReason(auth.Authenticate("Basic abc").status()).reason, "KEY_MALFORMED");
}

TEST_F(AuthenticatorTest, TheStoreHoldsNoSecret) {
  const std::string secret = NewTenantKey("acme");
  const absl::StatusOr<ApiKeyRow> row = store_->GetApiKey(last_key_id_);
  ASSERT_TRUE(row.ok());
  EXPECT_EQ(row->key_sha256.size(), 64u);
  EXPECT_THAT(secret, testing::Not(testing::HasSubstr(row->key_sha256)));
  EXPECT_EQ(row->key_sha256, HashApiKey(*ParseApiKey(secret)));
}

TEST_F(AuthenticatorTest, DeletingATenantEndsItsKeys) {
  const Authenticator auth(store_.get(), kAdminKey);
  const std::string key = NewTenantKey("acme");
  ASSERT_TRUE(registry_->Delete("acme", "").ok());
  EXPECT_EQ(auth.Authenticate("Bearer " + key).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AuthenticatorTest, AStaleEtagChangesNothing) {
  const absl::StatusOr<TenantRow> first = registry_->Create("acme", "one", "");
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(registry_->SetDisplayName("acme", "two", first->etag).ok());
  EXPECT_EQ(registry_->SetDisplayName("acme", "three", first->etag).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(registry_->Get("acme")->display_name, "two");
  EXPECT_EQ(registry_->Create("Acme", "", "").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(OwnershipTest, AnotherTenantsNameIsTheSameNotFound) {
  const Caller caller{"acme", false};
  EXPECT_TRUE(CheckOwns(caller, "acme", "tenants/acme/corpora/x").ok());
  EXPECT_EQ(CheckOwns(caller, "other", "tenants/other/corpora/x"), NotFound("tenants/other/corpora/x"));
  EXPECT_EQ(CheckOwns({"", true}, "", "x"), NotFound("x"));
}

TEST(AdminKeyTest, TrimsAndRefuses) {
  EXPECT_EQ(*ParseAdminKey("  0123456789abcdef\n"), "0123456789abcdef");
  EXPECT_FALSE(ParseAdminKey("").ok());
  EXPECT_FALSE(ParseAdminKey("short\n").ok());
  EXPECT_FALSE(ParseAdminKey("0123456789 abcdef").ok());
  EXPECT_FALSE(ParseAdminKey("0123456789abcdef\xc3\xa4").ok());
}

}  // namespace
}  // namespace stillhouse
