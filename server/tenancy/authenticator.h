// Who is calling: from a bearer key to a tenant.
#ifndef STILLHOUSE_SERVER_TENANCY_AUTHENTICATOR_H_
#define STILLHOUSE_SERVER_TENANCY_AUTHENTICATOR_H_

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_store/store.h"

namespace stillhouse {

// The tenant of a server without keys.
inline constexpr std::string_view kDefaultTenant = "default";

struct Caller {
  std::string tenant;     // empty for the admin
  bool is_admin = false;  // may manage tenants and keys, and nothing else
};

// With an admin key, every call must carry a key: the admin's, or one that the store knows. Without one, the server
// belongs to whoever can reach it, and every caller is tenants/default. The store must outlive it. Thread-safe: holds
// nothing that changes.
class Authenticator {
 public:
  // `admin_key` empty: no keys. The key itself is not kept.
  Authenticator(Store* store, std::string_view admin_key);

  bool needs_keys() const { return !admin_hash_.empty(); }

  // `authorization` is the value of that metadata entry, if the call has one. UNAUTHENTICATED says what to send, and is
  // the same for a key that never was, one with a wrong secret and one that was revoked. A revoked key is refused from
  // the next call on.
  absl::StatusOr<Caller> Authenticate(std::optional<std::string_view> authorization) const;

 private:
  Store* store_;
  std::string admin_hash_;
};

// OK if `caller` is the tenant whose name was given; else the same NOT_FOUND as for a thing that does not exist, so
// that a caller cannot learn which names others use. `what` is the name as the caller wrote it.
absl::Status CheckOwns(const Caller& caller, std::string_view tenant, std::string_view what);
// The NOT_FOUND that CheckOwns gives.
absl::Status NotFound(std::string_view what);

// `text` is what the admin key file holds: surrounding white space is dropped. INVALID_ARGUMENT if fewer than 16
// characters remain, or one that a metadata value cannot carry.
absl::StatusOr<std::string> ParseAdminKey(std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_AUTHENTICATOR_H_
