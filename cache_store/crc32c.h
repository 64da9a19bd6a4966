#ifndef STILLHOUSE_CACHE_STORE_CRC32C_H_
#define STILLHOUSE_CACHE_STORE_CRC32C_H_

#include <cstdint>
#include <string_view>

namespace stillhouse {

// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78; RFC 3720 §B.4). `crc` is the value of the bytes before `bytes`,
// so that Crc32c(b, Crc32c(a)) is the value of a followed by b. Uses the SSE4.2 instruction where the compiler may.
uint32_t Crc32c(std::string_view bytes, uint32_t crc = 0);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_CRC32C_H_
