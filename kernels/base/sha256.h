// SHA-256 (FIPS 180-4) through OpenSSL: names of blobs, fingerprints of models and tokenizers.
#ifndef STILLHOUSE_KERNELS_BASE_SHA256_H_
#define STILLHOUSE_KERNELS_BASE_SHA256_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace stillhouse {

// Incremental. One thread at a time.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void Update(std::string_view bytes);
  // A string with its length, so that neighbouring fields cannot be confused; an integer as 8 little-endian bytes.
  void UpdateField(std::string_view bytes);
  void UpdateNumber(int64_t value);
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

#endif  // STILLHOUSE_KERNELS_BASE_SHA256_H_
