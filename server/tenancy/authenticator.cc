#include "server/tenancy/authenticator.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

constexpr size_t kMinAdminKey = 16;

bool ConsumeBearer(std::string_view* text) {
  constexpr std::string_view kScheme = "bearer ";
  if (text->size() < kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = (*text)[i];
    if ((c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c) != kScheme[i]) return false;
  }
  text->remove_prefix(kScheme.size());
  while (!text->empty() && text->front() == ' ') text->remove_prefix(1);
  return true;
}

absl::Status BadKey() {
  return WithReason(absl::UnauthenticatedError("the key is not valid; ask the operator for a new one"), "INVALID_KEY");
}

}  // namespace

Authenticator::Authenticator(Store* store, std::string_view admin_key)
    : store_(store), admin_hash_(admin_key.empty() ? std::string() : HashAdminKey(admin_key)) {}

absl::StatusOr<Caller> Authenticator::Authenticate(std::optional<std::string_view> authorization) const {
  if (!needs_keys()) {
    if (authorization) {
      return WithReason(
          absl::UnauthenticatedError("this server runs without keys; call it without authorization metadata"),
          "KEYS_NOT_IN_USE");
    }
    return Caller{std::string(kDefaultTenant), false};
  }
  if (!authorization) {
    return WithReason(absl::UnauthenticatedError("no key was sent; send metadata 'authorization: Bearer <key>'"),
                      "KEY_MISSING");
  }
  std::string_view token = *authorization;
  if (!ConsumeBearer(&token)) {
    return WithReason(absl::UnauthenticatedError("the authorization metadata is not of the form 'Bearer <key>'"),
                      "KEY_MALFORMED");
  }
  if (ConstantTimeEquals(HashAdminKey(token), admin_hash_)) return Caller{"", true};
  const std::optional<ApiKey> key = ParseApiKey(token);
  if (!key) return BadKey();
  const std::string hash = HashApiKey(*key);
  const absl::StatusOr<ApiKeyRow> row = store_->GetApiKey(key->id);
  if (!row.ok()) return absl::IsNotFound(row.status()) ? BadKey() : row.status();
  if (!ConstantTimeEquals(hash, row->key_sha256) || row->revoke_time <= absl::Now()) return BadKey();
  return Caller{row->tenant, false};
}

absl::Status NotFound(std::string_view what) {
  return WithReason(absl::NotFoundError(absl::StrCat(std::string(what), " does not exist")), "NOT_FOUND");
}

absl::Status CheckOwns(const Caller& caller, std::string_view tenant, std::string_view what) {
  if (!caller.is_admin && caller.tenant == tenant) return absl::OkStatus();
  return NotFound(what);
}

absl::StatusOr<std::string> ParseAdminKey(std::string_view text) {
  const auto space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  if (text.size() < kMinAdminKey) {
    return absl::InvalidArgumentError(absl::StrCat("the admin key has ", text.size(), " characters and needs at least ",
                                                   kMinAdminKey, "; make one with: openssl rand -hex 32"));
  }
  for (char c : text) {
    if (c <= 0x20 || c >= 0x7f) {
      return absl::InvalidArgumentError("the admin key may hold printable ASCII only, without spaces");
    }
  }
  return std::string(text);
}

}  // namespace stillhouse
