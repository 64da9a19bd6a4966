#ifndef STILLHOUSE_SERVER_TOKEN_SHA256_H_
#define STILLHOUSE_SERVER_TOKEN_SHA256_H_

#include <cstdint>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace stillhouse {

// SHA-256 of what is added, for fingerprints. One thread at a time; Hex ends it.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  // The bytes alone.
  void Add(std::string_view bytes);
  // A string with its length, so that neighbouring fields cannot be confused.
  void AddField(std::string_view bytes);
  void AddNumber(int64_t value);
  // 64 lower-case hexadecimal digits. Call once.
  std::string Hex();

 private:
  evp_md_ctx_st* context_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_SHA256_H_
