// AVX2 with FMA and F16C: Haswell, Zen, and later.
#define STILLHOUSE_ISA isa_avx2
#include "kernels/cpu/simd_table.h"

namespace stillhouse::cpu {

const SimdTable* SimdAvx2() {
#if defined(__AVX2__)
  static constexpr SimdTable table = isa_avx2::MakeTable("avx2");
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace stillhouse::cpu
