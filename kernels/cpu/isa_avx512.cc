// AVX-512 (F, BW, VL, DQ): Skylake-SP, Zen 4, and later.
#define STILLHOUSE_ISA isa_avx512
#include "kernels/cpu/simd_table.h"

namespace stillhouse::cpu {

const SimdTable* SimdAvx512() {
#if defined(__AVX512F__)
  static constexpr SimdTable table = isa_avx512::MakeTable("avx512");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace stillhouse::cpu
