// The form of a bearer key, and how it is kept.
//
// A key reads "sth_<id>_<secret>": id is 16 characters that name the row, secret 43 characters of base64url (256 random
// bits). The store keeps the id and a SHA-256 over a domain word, the id (the salt, unique to the key) and the secret;
// a secret of 256 random bits needs no slower hash.
#ifndef STILLHOUSE_SERVER_TENANCY_API_KEY_H_
#define STILLHOUSE_SERVER_TENANCY_API_KEY_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace stillhouse {

struct ApiKey {
  std::string id;
  std::string secret;
  // What the caller sends after "Bearer ".
  std::string ToString() const;
};

// A fresh key from the operating system's randomness.
ApiKey MakeApiKey();
// No value for anything that is not exactly of the form.
std::optional<ApiKey> ParseApiKey(std::string_view text);
bool IsKeyId(std::string_view text);

// 64 lower-case hex digits.
std::string HashApiKey(const ApiKey& key);
// The hash of the operator's admin key, which has no form of its own.
std::string HashAdminKey(std::string_view key);

// Takes the same time wherever the two differ.
bool ConstantTimeEquals(std::string_view a, std::string_view b);

// From the operating system; the process ends if it has none to give.
std::string RandomBytes(size_t count);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_API_KEY_H_
