// The baseline: 128-bit vectors without fused multiply-add (SSE4.2 on x86-64; plain GNU vectors elsewhere).
#define STILLHOUSE_ISA isa_v2
#include "kernels/cpu/simd_table.h"

namespace stillhouse::cpu {

const SimdTable* SimdV2() {
  static constexpr SimdTable table = isa_v2::MakeTable("v2");
  return &table;
}

}  // namespace stillhouse::cpu
