#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "kernels/base/logging.h"

namespace stillhouse::cpu {
namespace {

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
struct ScratchBlock {
  std::unique_ptr<float[], FreeDeleter> data;
  int64_t count = 0;
};

// Few rows of A are swept whole by every panel: both stay in L1 if the block is shallow enough.
constexpr int64_t kSweptRows = 32;
constexpr int64_t kSweptFloats = 7168;

int64_t DepthBlock(int64_t m, int64_t tile_cols, int64_t depth, int64_t step) {
  const int64_t most = m <= kSweptRows ? std::min(kDepthBlock, kSweptFloats / (m + tile_cols)) : kDepthBlock;
  const int64_t blocks = (depth + most - 1) / most;
  const int64_t even = (depth + std::max<int64_t>(blocks, 1) - 1) / std::max<int64_t>(blocks, 1);
  return (even + step - 1) / step * step;
}

// Below this many rows of A a panel is not worth packing.
constexpr int64_t kFewRows = 3;

void ZeroRows(int64_t m, int64_t n, float* c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0f);
}

}  // namespace

float* ThreadScratch(ScratchSlot slot, int64_t count) {
  thread_local ScratchBlock blocks[static_cast<int>(ScratchSlot::kSlots)];
  ScratchBlock& block = blocks[static_cast<int>(slot)];
  if (block.count < count) {
    block.data.reset();
    const size_t bytes = (static_cast<size_t>(count) * sizeof(float) + 4095) / 4096 * 4096;
    block.data.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    STILLHOUSE_CHECK(block.data != nullptr) << "out of memory: " << bytes << " bytes of scratch asked for";
    block.count = static_cast<int64_t>(bytes / sizeof(float));
  }
  return block.data.get();
}

void GemmPanels(const SimdTable& simd, int64_t m, int64_t n_begin, int64_t n_end, int64_t depth, float alpha,
                const float* a, int64_t a_row, int64_t a_depth, const PanelSource& b, float* c, int64_t ldc,
                bool accumulate) {
  if (m <= 0 || n_begin >= n_end) return;
  if (depth == 0) {
    if (!accumulate) ZeroRows(m, n_end - n_begin, c + n_begin, ldc);
    return;
  }
  const int64_t block = DepthBlock(m, simd.tile_cols, depth, b.depth_step());
  float* panel = ThreadScratch(ScratchSlot::kPanel, block * simd.tile_cols);
  GemmTile tile;
  tile.a_row = a_row;
  tile.a_depth = a_depth;
  tile.b = panel;
  tile.b_depth = simd.tile_cols;
  tile.c_row = ldc;
  tile.alpha = alpha;
  const int64_t row_blocks = (m + kRowBlock - 1) / kRowBlock;
  const int64_t row_step = (m + row_blocks - 1) / row_blocks;
  for (int64_t row = 0; row < m; row += row_step) {
    for (int64_t k = 0; k < depth; k += block) {
      tile.depth = std::min(block, depth - k);
      tile.a = a + row * a_row + k * a_depth;
      tile.accumulate = accumulate || k > 0;
      for (int64_t n = n_begin; n < n_end; n += simd.tile_cols) {
        tile.cols = std::min<int64_t>(simd.tile_cols, n_end - n);
        tile.c = c + row * ldc + n;
        b.Fill(simd, k, k + tile.depth, n, tile.cols, panel);
        tile.rows = std::min(row_step, m - row);
        simd.gemm_sweep(tile);
      }
    }
  }
}

void GemmNT(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m <= 0 || n <= 0) return;
  if (m <= kFewRows) {
    float dots[kFewRows];
    for (int64_t j = 0; j < n; ++j) {
      simd.dot_rows(a, lda, m, b + j * ldb, depth, dots);
      for (int64_t i = 0; i < m; ++i) {
        float& out = c[i * ldc + j];
        out = accumulate ? out + alpha * dots[i] : alpha * dots[i];
      }
    }
    return;
  }
  class Rows final : public PanelSource {
   public:
    Rows(const float* b, int64_t ldb) : b_(b), ldb_(ldb) {}
    void Fill(const SimdTable& simd, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t cols,
              float* panel) const override {
      simd.pack_transposed(b_ + n_begin * ldb_ + k_begin, ldb_, cols, k_end - k_begin, panel);
    }

   private:
    const float* b_;
    int64_t ldb_;
  };
  GemmPanels(simd, m, 0, n, depth, alpha, a, lda, 1, Rows(b, ldb), c, ldc, accumulate);
}

namespace {

// B is used where it lies: its rows are contiguous.
void GemmDirect(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t a_row,
                int64_t a_depth, const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m <= 0 || n <= 0) return;
  if (depth <= 0) {
    if (!accumulate) ZeroRows(m, n, c, ldc);
    return;
  }
  GemmTile tile;
  tile.a_row = a_row;
  tile.a_depth = a_depth;
  tile.b_depth = ldb;
  tile.c_row = ldc;
  tile.alpha = alpha;
  for (int64_t k = 0; k < depth; k += kDepthBlock) {
    tile.depth = std::min(kDepthBlock, depth - k);
    tile.a = a + k * a_depth;
    tile.accumulate = accumulate || k > 0;
    for (int64_t j = 0; j < n; j += simd.tile_cols) {
      tile.cols = std::min<int64_t>(simd.tile_cols, n - j);
      tile.b = b + k * ldb + j;
      tile.c = c + j;
      tile.rows = m;
      simd.gemm_sweep(tile);
    }
  }
}

}  // namespace

void GemmNN(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  GemmDirect(simd, m, n, depth, alpha, a, lda, 1, b, ldb, c, ldc, accumulate);
}

void GemmTN(const SimdTable& simd, int64_t m, int64_t n, int64_t depth, float alpha, const float* a, int64_t lda,
            const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  GemmDirect(simd, m, n, depth, alpha, a, 1, lda, b, ldb, c, ldc, accumulate);
}

}  // namespace stillhouse::cpu
