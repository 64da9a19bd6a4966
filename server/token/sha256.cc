#include "server/token/sha256.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "kernels/base/logging.h"

namespace stillhouse {

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  STILLHOUSE_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) == 1)
      << "OpenSSL has no SHA-256";
}

Sha256::~Sha256() { EVP_MD_CTX_free(context_); }

void Sha256::Add(std::string_view bytes) {
  STILLHOUSE_CHECK(EVP_DigestUpdate(context_, bytes.data(), bytes.size()) == 1) << "SHA-256";
}

void Sha256::AddField(std::string_view bytes) {
  AddNumber(static_cast<int64_t>(bytes.size()));
  Add(bytes);
}

void Sha256::AddNumber(int64_t value) {
  char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  Add(std::string_view(bytes, sizeof(bytes)));
}

std::string Sha256::Hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  STILLHOUSE_CHECK(EVP_DigestFinal_ex(context_, digest, &size) == 1) << "SHA-256";
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), size));
}

}  // namespace stillhouse
