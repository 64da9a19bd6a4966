// Product kernels of one instruction set (see lanes.h). Included only by isa_*.cc.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_GEMM_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_GEMM_H_

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/simd.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

// The tile is two vectors wide and as many rows high as registers allow: kTileRows · 2 accumulators, two vectors of b
// and one broadcast element of a, of 16 registers (32 with AVX-512).
constexpr int kTileCols = 2 * kLanes;
#if STILLHOUSE_LANES == 16
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Rows are addressed from a base per three rows (base, base + s, base + 2s: x86 addressing modes), so that no pointer
// spills.
template <int kRows, bool kFull>
static void GemmTileRows(const GemmTile& t) {
  constexpr int kBases = (kRows + 2) / 3;
  const int n0 = kFull ? kLanes : (t.cols < kLanes ? (int)t.cols : kLanes);
  const int n1 = kFull ? kLanes : (int)t.cols - n0;
  F32 acc[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = Zero();
  const char* base[kBases];
#pragma GCC unroll 8
  for (int i = 0; i < kBases; ++i) base[i] = (const char*)(t.a + 3 * i * t.a_row);
  const int64_t step = t.a_row * 4, advance = t.a_depth * 4;
  const float* b = t.b;
  if (t.accumulate) {
    // c is needed at the end, and seldom in cache.
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(t.c + i * t.c_row, 1);
      __builtin_prefetch(t.c + i * t.c_row + kTileCols - 1, 1);
    }
  }
  for (int64_t k = 0; k < t.depth; ++k) {
    F32 b0, b1;
    if (kFull) {
      b0 = Load(b);
      b1 = Load(b + kLanes);
    } else {
      b0 = n0 == kLanes ? Load(b) : LoadN(b, n0);
      b1 = n1 > 0 ? LoadN(b + kLanes, n1) : Zero();
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const F32 a = Set1(*(const float*)(base[i / 3] + (i % 3) * step));
      acc[i][0] = Fma(a, b0, acc[i][0]);
      acc[i][1] = Fma(a, b1, acc[i][1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kBases; ++i) base[i] += advance;
    b += t.b_depth;
  }
  const F32 alpha = Set1(t.alpha);
  const bool accumulate = t.accumulate;
  float* c = t.c;
  const int64_t c_row = t.c_row;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i, c += c_row) {
    float* d = c + kLanes;
    if (kFull) {
      Store(c, accumulate ? Fma(alpha, acc[i][0], Load(c)) : alpha * acc[i][0]);
      Store(d, accumulate ? Fma(alpha, acc[i][1], Load(d)) : alpha * acc[i][1]);
    } else {
      StoreN(c, accumulate ? Fma(alpha, acc[i][0], LoadN(c, n0)) : alpha * acc[i][0], n0);
      if (n1 > 0) StoreN(d, accumulate ? Fma(alpha, acc[i][1], LoadN(d, n1)) : alpha * acc[i][1], n1);
    }
  }
}

// All rows of a panel, a tile at a time.
template <bool kFull>
static void SweepTiles(GemmTile t) {
  const int64_t m = t.rows;
  for (int64_t i = 0; i < m;) {
    // The last two tiles share their rows evenly, so that none is nearly empty.
    const int64_t left = m - i;
    t.rows = left > kTileRows && left < 2 * kTileRows ? (left + 1) / 2 : left < kTileRows ? left : kTileRows;
    switch (t.rows) {
#define STILLHOUSE_ROWS(n)     \
  case n:                      \
    GemmTileRows<n, kFull>(t); \
    break;
      STILLHOUSE_ROWS(1)
      STILLHOUSE_ROWS(2)
      STILLHOUSE_ROWS(3)
      STILLHOUSE_ROWS(4)
      STILLHOUSE_ROWS(5)
      STILLHOUSE_ROWS(6)
#if STILLHOUSE_LANES == 16
      STILLHOUSE_ROWS(7)
      STILLHOUSE_ROWS(8)
      STILLHOUSE_ROWS(9)
      STILLHOUSE_ROWS(10)
      STILLHOUSE_ROWS(11)
      STILLHOUSE_ROWS(12)
#endif
#undef STILLHOUSE_ROWS
      default:
        __builtin_trap();
    }
    i += t.rows;
    t.a += t.rows * t.a_row;
    t.c += t.rows * t.c_row;
  }
}

static void GemmSweep(const GemmTile& t) {
  if (t.cols == kTileCols) {
    SweepTiles<true>(t);
  } else {
    SweepTiles<false>(t);
  }
}

#if STILLHOUSE_LANES >= 8
// out[k, j] = in[j, k] for a block of 8 × 8, or 4 × 4 in the baseline.
STILLHOUSE_INLINE void TransposeBlock(const float* in, int64_t in_row, float* out, int64_t out_row) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * in_row);
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
constexpr int kTransposeBlock = 8;
#else
constexpr int kTransposeBlock = 4;
STILLHOUSE_INLINE void TransposeBlock(const float* in, int64_t in_row, float* out, int64_t out_row) {
  for (int j = 0; j < 4; ++j) {
    for (int k = 0; k < 4; ++k) out[k * out_row + j] = in[j * in_row + k];
  }
}
#endif

static void PackTransposed(const float* b, int64_t b_row, int64_t cols, int64_t depth, float* panel) {
  int64_t j = 0;
  for (; j + kTransposeBlock <= cols; j += kTransposeBlock) {
    const float* rows = b + j * b_row;
    int64_t k = 0;
    for (; k + kTransposeBlock <= depth; k += kTransposeBlock) {
      TransposeBlock(rows + k, b_row, panel + k * kTileCols + j, kTileCols);
    }
    for (; k < depth; ++k) {
      for (int i = 0; i < kTransposeBlock; ++i) panel[k * kTileCols + j + i] = rows[i * b_row + k];
    }
  }
  for (; j < kTileCols; ++j) {
    if (j < cols) {
      for (int64_t k = 0; k < depth; ++k) panel[k * kTileCols + j] = b[j * b_row + k];
    } else {
      for (int64_t k = 0; k < depth; ++k) panel[k * kTileCols + j] = 0.0f;
    }
  }
}

static void PackRows(const float* b, int64_t b_row, int64_t cols, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; ++k, b += b_row, panel += kTileCols) {
    if (cols == kTileCols) {
      Store(panel, Load(b));
      Store(panel + kLanes, Load(b + kLanes));
    } else {
      for (int64_t j = 0; j < kTileCols; ++j) panel[j] = j < cols ? b[j] : 0.0f;
    }
  }
}

template <int kRows>
STILLHOUSE_INLINE void DotFew(const float* a, int64_t a_row, const float* b, int64_t depth, float* out) {
  F32 acc[kRows][2];
  for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = Zero();
  int64_t k = 0;
  for (; k + 2 * kLanes <= depth; k += 2 * kLanes) {
    const F32 b0 = Load(b + k), b1 = Load(b + k + kLanes);
    for (int i = 0; i < kRows; ++i) {
      acc[i][0] = Fma(Load(a + i * a_row + k), b0, acc[i][0]);
      acc[i][1] = Fma(Load(a + i * a_row + k + kLanes), b1, acc[i][1]);
    }
  }
  for (; k < depth; k += kLanes) {
    const int n = depth - k < kLanes ? (int)(depth - k) : kLanes;
    const F32 b0 = LoadN(b + k, n);
    for (int i = 0; i < kRows; ++i) acc[i][0] = Fma(LoadN(a + i * a_row + k, n), b0, acc[i][0]);
  }
  for (int i = 0; i < kRows; ++i) out[i] = ReduceAdd(acc[i][0] + acc[i][1]);
}

static void DotRows(const float* a, int64_t a_row, int64_t rows, const float* b, int64_t depth, float* out) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) DotFew<4>(a + i * a_row, a_row, b, depth, out + i);
  for (; i < rows; ++i) DotFew<1>(a + i * a_row, a_row, b, depth, out + i);
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_GEMM_H_
