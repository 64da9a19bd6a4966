#ifndef STILLHOUSE_CACHE_STORE_SHA256_H_
#define STILLHOUSE_CACHE_STORE_SHA256_H_

#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace stillhouse {

// Incremental SHA-256 (FIPS 180-4) through OpenSSL. One thread at a time.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void Update(std::string_view bytes);
  // 64 lower-case hex digits; the object is then as new.
  std::string FinishHex();

 private:
  struct Deleter {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Deleter> context_;
};

std::string Sha256Hex(std::string_view bytes);

// Whether `text` is 64 lower-case hex digits.
bool IsSha256Hex(std::string_view text);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_SHA256_H_
