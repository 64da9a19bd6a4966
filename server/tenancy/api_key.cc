#include "server/tenancy/api_key.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/logging.h"
#include "kernels/base/sha256.h"

namespace stillhouse {
namespace {

constexpr std::string_view kPrefix = "sth_";
constexpr size_t kIdSize = 16;
constexpr size_t kSecretSize = 43;

bool IsBase64Url(std::string_view text) {
  for (char c : text) {
    const bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    if (!ok) return false;
  }
  return true;
}

}  // namespace

std::string ApiKey::ToString() const { return absl::StrCat(std::string(kPrefix), id, "_", secret); }

std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  STILLHOUSE_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(count)) == 1)
      << "the operating system gives no randomness";
  return bytes;
}

ApiKey MakeApiKey() {
  ApiKey key;
  // Hex, so that an id is a plain word in names and logs.
  key.id = absl::BytesToHexString(RandomBytes(kIdSize / 2));
  key.secret = absl::WebSafeBase64Escape(RandomBytes(32));
  STILLHOUSE_CHECK_EQ(key.secret.size(), kSecretSize);
  return key;
}

bool IsKeyId(std::string_view text) {
  if (text.size() != kIdSize) return false;
  for (char c : text) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
  }
  return true;
}

std::optional<ApiKey> ParseApiKey(std::string_view text) {
  if (text.size() != kPrefix.size() + kIdSize + 1 + kSecretSize || text.substr(0, kPrefix.size()) != kPrefix) {
    return std::nullopt;
  }
  text.remove_prefix(kPrefix.size());
  const std::string_view id = text.substr(0, kIdSize);
  const std::string_view secret = text.substr(kIdSize + 1);
  if (text[kIdSize] != '_' || !IsKeyId(id) || !IsBase64Url(secret)) return std::nullopt;
  return ApiKey{std::string(id), std::string(secret)};
}

std::string HashApiKey(const ApiKey& key) {
  Sha256 hash;
  hash.Update(std::string_view("stillhouse api key\0", 19));
  hash.Update(key.id);
  hash.Update(std::string_view("\0", 1));
  hash.Update(key.secret);
  return hash.FinishHex();
}

std::string HashAdminKey(std::string_view key) {
  Sha256 hash;
  hash.Update(std::string_view("stillhouse admin key\0", 21));
  hash.Update(key);
  return hash.FinishHex();
}

bool ConstantTimeEquals(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace stillhouse
