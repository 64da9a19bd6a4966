// The table of one instruction set. Included last, and only, by isa_*.cc.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_TABLE_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_TABLE_H_

#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_attention.h"
#include "kernels/cpu/simd_gemm.h"
#include "kernels/cpu/simd_packed.h"
#include "kernels/cpu/simd_quant.h"
#include "kernels/cpu/simd_softmax.h"
#include "kernels/cpu/simd_vector.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

constexpr SimdTable MakeTable(const char* name) {
  return {
      .name = name,
      .lanes = kLanes,
      .tile_rows = kTileRows,
      .tile_cols = kTileCols,
      .gemm_sweep = GemmSweep,
      .pack_transposed = PackTransposed,
      .pack_rows = PackRows,
      .dot_rows = DotRows,
      .int_dot = STILLHOUSE_INT_DOT,
      .split_digits = SplitDigits,
      .packed_dot = RunPackedDot,
      .unpack_panel = UnpackPanel,
      .unpack_group = UnpackGroup,
      .dequantize = Dequantize,
      .dot = Dot,
      .axpy = Axpy,
      .scale = Scale,
      .add = AddVectors,
      .add_squares = AddSquares,
      .sum_squares = SumOfSquares,
      .swiglu = SwiGluVectors,
      .swiglu_grad = SwiGluGradVectors,
      .row_max = RowMax,
      .find_above = FindAbove,
      .exp_sum = ExpSum,
      .exp_into = ExpInto,
      .shift_into = ShiftInto,
      .softmax_grad_row = SoftmaxGradRow,
      .scale_by_weight = ScaleByWeight,
      .attention_scores = AttentionScores,
      .attention_values = AttentionValues,
      .attention_row_softmax = AttentionRowSoftmax,
      .attention_panel_softmax = AttentionPanelSoftmax,
      .attention_panel_grad = AttentionPanelGrad,
  };
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_TABLE_H_
