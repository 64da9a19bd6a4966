// Single-threaded products of float matrices, for use inside the body of a parallel loop.
//
// Row-major with leading dimensions in elements. C = alpha · A·B, or added to C where `accumulate` is set; A, B and C
// do not overlap. Sums run in fp32 along the depth; the order does not depend on the machine's load. Any sizes, also 0
// (depth 0 gives 0). Scratch memory is kept per thread.
#ifndef STILLHOUSE_KERNELS_CPU_GEMM_H_
#define STILLHOUSE_KERNELS_CPU_GEMM_H_

#include <cstdint>

#include "kernels/cpu/simd.h"

namespace stillhouse::cpu {

// C[m, n] from A[m, depth] and B[n, depth]ᵀ: scores from queries and keys.
void GemmNT(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate = false);
// C[m, n] from A[m, depth] and B[depth, n]: outputs from weights and values.
void GemmNN(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate = false);
// C[m, n] from A[depth, m]ᵀ and B[depth, n]: gradients of keys and values.
void GemmTN(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate = false);

// Where the right operand of a product comes from when it is not a plain matrix (a quantised weight): it writes tiles
// of itself as floats. Read by several threads at once.
class PanelSource {
 public:
  virtual ~PanelSource() = default;
  // panel[k − k_begin, j] = B[k, n_begin + j] for j < cols ≤ tile_cols, in rows of tile_cols floats; missing columns
  // are written as 0. k_begin and k_end are multiples of `depth_step` (or the end of the depth).
  virtual void Fill(const SimdTable& simd, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t cols,
                    float* panel) const = 0;
  virtual int64_t depth_step() const { return 1; }
};

// Columns [n_begin, n_end) of C (which points at column 0). n_begin is a multiple of tile_cols.
void GemmPanels(const SimdTable& simd, int64_t m, int64_t n_begin, int64_t n_end, int64_t depth, float alpha,
                const float* a, int64_t a_row, int64_t a_depth, const PanelSource& b, float* c, int64_t ldc,
                bool accumulate);

// Depth of one pass over a panel: the panel of one tile (20 KiB with 8 lanes) and a tile of A stay in a 32 KiB L1.
inline constexpr int64_t kDepthBlock = 320;
// Rows of A of one sweep: that many rows of one depth block stay in L2, with room for what the sweep writes.
inline constexpr int64_t kRowBlock = 256;

// Memory of the calling thread that keeps its size between calls: at least `count` floats, 64-byte aligned, contents
// undefined. One slot serves one purpose at a time.
enum class ScratchSlot { kPanel, kOperand, kDigits, kAttention, kAttention2, kRows, kLogits, kSlots };
float* ThreadScratch(ScratchSlot slot, int64_t count);

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_GEMM_H_
