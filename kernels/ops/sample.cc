#include "kernels/ops/sample.h"

#include <array>

#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

}  // namespace

double UniformDraw(uint64_t seed, uint64_t step) {
  const auto words = Philox({static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0},
                            {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  // 53 bits: 27 of the first word, 26 of the second.
  const uint64_t bits = (uint64_t{words[0] >> 5} << 26) | (words[1] >> 6);
  return static_cast<double>(bits) * 0x1.0p-53;
}

std::vector<SampledToken> Sample(const Context& ctx, const Tensor& logits, int64_t vocabulary,
                                 const std::vector<SampleRow>& rows) {
  STILLHOUSE_CHECK(logits.dtype() == DType::kF32 && logits.rank() == 2 && (logits.dim(1) == 1 || logits.stride(1) == 1))
      << logits.DebugString();
  STILLHOUSE_CHECK(vocabulary > 0 && vocabulary <= logits.dim(1)) << vocabulary << " of " << logits.DebugString();
  STILLHOUSE_CHECK_EQ(logits.dim(0), static_cast<int64_t>(rows.size()));
  std::vector<SampledToken> out(rows.size());
  if (!rows.empty()) ctx.kernels().Sample(*ctx.backend, {logits, vocabulary, &rows, &out});
  return out;
}

}  // namespace stillhouse
