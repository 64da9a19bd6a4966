// Kernels of one instruction set (see lanes.h) on packed weights (packed_weight.h). Included only by isa_*.cc.
//
// A unit is kLanes rows: a group of eight with 8 lanes, half of one with 4, two with 16.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_PACKED_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_PACKED_H_

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_gemm.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

#if defined(__SSSE3__)
#define STILLHOUSE_INT_DOT 1
#else
#define STILLHOUSE_INT_DOT 0
#endif

// Where a unit's part of each block lies: `p` for the first (or only) group, `q` for the second with 16 lanes.
struct Unit {
  const uint8_t* p;
  const uint8_t* q;
};

// `half` tells the two units of a group apart with 4 lanes. A unit past the last group repeats it: its rows are
// padding.
STILLHOUSE_INLINE Unit UnitAt(const PackedMatrix& w, int64_t unit) {
#if STILLHOUSE_LANES == 16
  const int64_t first = 2 * unit, second = first + 1 < w.group_count ? first + 1 : first;
  return {w.groups + first * w.group_bytes, w.groups + second * w.group_bytes};
#else
  const uint8_t* p = w.groups + unit * kLanes / 8 * w.group_bytes;
  return {p, p};
#endif
}
STILLHOUSE_INLINE int HalfOf(int64_t unit) { return kLanes == 4 ? (int)(unit & 1) : 0; }

// kLanes halves of a block's header (which: 0 for d, 1 for m).
STILLHOUSE_INLINE F32 LoadScales(Unit u, int64_t offset, int which, int half) {
#if STILLHOUSE_LANES == 16
  const __m128i low = _mm_loadu_si128((const __m128i*)(u.p + offset + 16 * which));
  const __m128i high = _mm_loadu_si128((const __m128i*)(u.q + offset + 16 * which));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
#else
  return LoadHalf((const uint16_t*)(u.p + offset + 16 * which) + 4 * half);
#endif
}

// kLanes dwords, one of each row.
STILLHOUSE_INLINE I32 LoadRows32(Unit u, int64_t offset, int half) {
#if STILLHOUSE_LANES == 16
  const __m256i low = _mm256_loadu_si256((const __m256i*)(u.p + offset));
  const __m256i high = _mm256_loadu_si256((const __m256i*)(u.q + offset));
  return (I32)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  I32 v;
  memcpy(&v, u.p + offset + 16 * half, sizeof(v));
  return v;
#endif
}

// kLanes signed bytes, one of each row, as floats.
STILLHOUSE_INLINE F32 LoadRows8(Unit u, int64_t offset, int half) {
#if STILLHOUSE_LANES == 16
  int64_t low, high;
  memcpy(&low, u.p + offset, 8);
  memcpy(&high, u.q + offset, 8);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_set_epi64x(high, low)));
#else
  return LoadI8((const int8_t*)(u.p + offset) + 4 * half);
#endif
}

// Asks for the lines of [p + begin, p + end) ahead of their use: the hardware follows a stream, but stops at every page
// and loses it between bursts.
STILLHOUSE_INLINE void Prefetch(const uint8_t* p, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(p + at, 0, 3);
}

// The bytes that the next kUnits units need at this place: the groups of some units lie one after another, so while
// these are worked through, the same share of what follows them is asked for.
template <int kUnits>
STILLHOUSE_INLINE void PrefetchNext(const PackedMatrix& w, const Unit* units, int64_t offset) {
  constexpr int kGroups = kUnits * kLanes / 8 > 0 ? kUnits * kLanes / 8 : 1;
  Prefetch(units[0].p + kGroups * w.group_bytes, kGroups * offset, kGroups * (offset + w.block_bytes));
}

constexpr int kHeader4_0 = 16, kHeader4_1 = 32, kHeader8_0 = 16;

// --- activations as integers ---------------------------------------------------------------------------------------

#if STILLHOUSE_INT_DOT
STILLHOUSE_INLINE I32 RoundToInt(F32 v) {
#if STILLHOUSE_LANES == 16
  return (I32)_mm512_cvtps_epi32(v);
#elif STILLHOUSE_LANES == 8
  return (I32)_mm256_cvtps_epi32(v);
#else
  return (I32)_mm_cvtps_epi32(v);
#endif
}

// Within each 128 bits, four dwords become their four byte planes.
STILLHOUSE_INLINE I32 BytePlanes(I32 v) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if STILLHOUSE_LANES == 16
  return (I32)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(order));
#elif STILLHOUSE_LANES == 8
  return (I32)_mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(order));
#else
  return (I32)_mm_shuffle_epi8((__m128i)v, order);
#endif
}
#endif

// Splits x into integers of 23 bits and a sign, per block of 32 with a power of two as scale: |error| ≤ 2^-23 of the
// block's largest element, as exact as fp32 itself where it matters. An integer is three signed digits to base 256,
// each fit for an 8-bit multiply: digit p of columns 4j..4j+3 of block b is the dword digits[(8b + j)·16 + 4p].
// offsets[2b] is 8 times the sum of the lowest digits of block b, offsets[2b + 1] of what is above them.
static void SplitDigits(const float* x, int64_t blocks, int8_t* digits, int32_t* offsets, float* scales, float* sums) {
#if STILLHOUSE_INT_DOT
  for (int64_t b = 0; b < blocks; ++b, x += 32, digits += 128) {
    I32 largest = SetI1(0);
    F32 sum = Zero();
    for (int i = 0; i < 32; i += kLanes) {
      const F32 v = Load(x + i);
      const I32 magnitude = Bits(v) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      sum = sum + v;
    }
    const int32_t top = ReduceMax(largest);
    sums[b] = ReduceAdd(sum);
    if (top >= 0x7f800000) {
      // An infinity or a NaN: whatever depends on this block is NaN.
      memset(digits, 0, 128);
      offsets[b] = 0;
      scales[b] = __builtin_nanf("");
      continue;
    }
    // Exponent e such that |x| · 2^(22−e) ≤ 2^22 · 1.985 < 127.5 · 2^16: the largest top digit is 127. Where the factor
    // would overflow (|x| < 2^-103) the error is below 2^-125.
    int e = (top + 0x00020000) >> 23;
    if (e < 24) e = 24;
    const int32_t up_bits = (127 + 22 + 127 - e) << 23, down_bits = (e - 22) << 23;
    float up, down;
    memcpy(&up, &up_bits, 4);
    memcpy(&down, &down_bits, 4);
    scales[b] = down;
    const F32 factor = Set1(up);
    I32 total = SetI1(0);
    for (int i = 0; i < 32; i += kLanes) {
      // Adding 128 to each digit makes the digits plain bytes; flipping their top bits takes it away again.
      const I32 n = RoundToInt(Load(x + i) * factor);
      total += n;
      const I32 planes = BytePlanes((n + 0x808080) ^ 0x808080);
      memcpy(digits + 4 * i, &planes, sizeof(planes));
    }
    offsets[b] = (int32_t)(8u * (uint32_t)ReduceAdd(total));
  }
#else
  (void)offsets, (void)x, (void)blocks, (void)digits, (void)scales, (void)sums;
  __builtin_trap();
#endif
}

// --- few rows of x -------------------------------------------------------------------------------------------------

#if STILLHOUSE_INT_DOT
#if STILLHOUSE_LANES == 16
using Bytes = __m512i;
STILLHOUSE_INLINE Bytes Broadcast32(const int8_t* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
STILLHOUSE_INLINE Bytes MulPairs(Bytes u, Bytes s) { return _mm512_maddubs_epi16(u, s); }
STILLHOUSE_INLINE Bytes Add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
STILLHOUSE_INLINE I32 SumPairs(Bytes a, int16_t factor) { return (I32)_mm512_madd_epi16(a, _mm512_set1_epi16(factor)); }
#elif STILLHOUSE_LANES == 8
using Bytes = __m256i;
STILLHOUSE_INLINE Bytes Broadcast32(const int8_t* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
STILLHOUSE_INLINE Bytes MulPairs(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
STILLHOUSE_INLINE Bytes Add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
STILLHOUSE_INLINE I32 SumPairs(Bytes a, int16_t factor) { return (I32)_mm256_madd_epi16(a, _mm256_set1_epi16(factor)); }
#else
using Bytes = __m128i;
STILLHOUSE_INLINE Bytes Broadcast32(const int8_t* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return _mm_set1_epi32(v);
}
STILLHOUSE_INLINE Bytes MulPairs(Bytes u, Bytes s) { return _mm_maddubs_epi16(u, s); }
STILLHOUSE_INLINE Bytes Add16(Bytes a, Bytes b) { return _mm_add_epi16(a, b); }
STILLHOUSE_INLINE I32 SumPairs(Bytes a, int16_t factor) { return (I32)_mm_madd_epi16(a, _mm_set1_epi16(factor)); }
#endif

// Keeps a running sum in its register: without it the compiler reorders the integer sums of a whole block into a tree,
// and spills the leaves.
STILLHOUSE_INLINE void Pin(Bytes& v) {
#if STILLHOUSE_LANES >= 8
  asm("" : "+v"(v));
#else
  asm("" : "+x"(v));
#endif
}

// Nibbles are bytes 0..15 and digits −128..127: eight sums of two products stay within 16 bits (30720), so a block is
// summed in 16 bits per digit, and turned into a float once. The block's value is d·Σ(q−8)x + (m+8d)·Σx with the first
// sum exact: taking the 8 away in floats would cancel, and cost digits where a large x meets a small weight.
template <int kUnits, int kRows, bool kHasMin>
STILLHOUSE_INLINE void DotNibbles(const PackedDot& d, int64_t unit0, int64_t row0, float* to) {
  constexpr int kHeader = kHasMin ? kHeader4_1 : kHeader4_0;
  const PackedMatrix& w = d.weight;
  Unit units[kUnits];
  int half[kUnits];
  F32 out[kUnits][kRows];
  for (int u = 0; u < kUnits; ++u) {
    units[u] = UnitAt(w, unit0 + u);
    half[u] = HalfOf(unit0 + u);
    for (int r = 0; r < kRows; ++r) out[u][r] = Zero();
  }
  const int8_t* digits = d.digits + row0 * d.digit_row;
  int64_t offset = 0;
  for (int64_t b = 0; b < w.blocks; ++b, offset += w.block_bytes, digits += 128) {
    Bytes sums[kUnits][kRows][3];
    if (row0 == 0) PrefetchNext<kUnits>(w, units, offset);
      // Low nibbles (columns 0..15), then high ones: one at a time leaves more registers to the sums.
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        I32 q[kUnits];
        for (int u = 0; u < kUnits; ++u) {
          const I32 v = LoadRows32(units[u], offset + kHeader + 32 * j, half[u]);
          q[u] = (part == 0 ? v : v >> 4) & 0x0f0f0f0f;
        }
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
          for (int p = 0; p < 3; ++p) {
            const Bytes x = Broadcast32(digits + r * d.digit_row + 64 * part + 16 * j + 4 * p);
            for (int u = 0; u < kUnits; ++u) {
              Bytes& sum = sums[u][r][p];
              const Bytes product = MulPairs((Bytes)q[u], x);
              sum = part == 0 && j == 0 ? product : Add16(sum, product);
              Pin(sum);
            }
          }
        }
      }
    }
    for (int u = 0; u < kUnits; ++u) {
      const F32 scale = LoadScales(units[u], offset, 0, half[u]);
      const F32 min = kHasMin ? Fma(scale, Set1(8.0f), LoadScales(units[u], offset, 1, half[u])) : Zero();
      for (int r = 0; r < kRows; ++r) {
        // Σ(q−8)x < 2^31 though its parts are not: they wrap, the result is right.
        const int64_t at = (row0 + r) * w.blocks + b;
        I32 total = (SumPairs(sums[u][r][2], 256) + SumPairs(sums[u][r][1], 1)) << 8;
        total = total + SumPairs(sums[u][r][0], 1) - d.offsets[at];
        out[u][r] = Fma(ToFloat(total), scale * Set1(d.scales[at]), out[u][r]);
        if (kHasMin) out[u][r] = Fma(min, Set1(d.sums[at]), out[u][r]);
      }
    }
  }
  for (int u = 0; u < kUnits; ++u) {
    for (int r = 0; r < kRows; ++r) Store(to + (row0 + r) * d.out_row + u * kLanes, out[u][r]);
  }
}
#endif

// Eight sums or more hide the latency of the multiply-add: where there are fewer, odd columns have sums of their own.
template <int kUnits, int kRows>
STILLHOUSE_INLINE void DotBytes(const PackedDot& d, int64_t unit0, int64_t row0, float* to) {
  constexpr int kParts = kUnits * kRows < 8 ? 2 : 1;
  const PackedMatrix& w = d.weight;
  Unit units[kUnits];
  int half[kUnits];
  F32 out[kUnits][kRows];
  for (int u = 0; u < kUnits; ++u) {
    units[u] = UnitAt(w, unit0 + u);
    half[u] = HalfOf(unit0 + u);
    for (int r = 0; r < kRows; ++r) out[u][r] = Zero();
  }
  const float* x = d.x + row0 * d.x_row;
  int64_t offset = 0;
  for (int64_t b = 0; b < w.blocks; ++b, offset += w.block_bytes, x += 32) {
    F32 sums[kUnits][kRows][kParts];
    if (row0 == 0) PrefetchNext<kUnits>(w, units, offset);
    for (int u = 0; u < kUnits; ++u) {
      for (int r = 0; r < kRows; ++r) {
        for (int part = 0; part < kParts; ++part) sums[u][r][part] = Zero();
      }
    }
#pragma GCC unroll 2
    for (int k = 0; k < 32; k += 2) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        F32 values[kUnits];
        for (int u = 0; u < kUnits; ++u) {
          values[u] = LoadRows8(units[u], offset + kHeader8_0 + 8 * (k + odd), half[u]);
        }
        for (int r = 0; r < kRows; ++r) {
          const F32 a = Set1(x[r * d.x_row + k + odd]);
          for (int u = 0; u < kUnits; ++u) {
            F32& sum = sums[u][r][odd % kParts];
            sum = Fma(values[u], a, sum);
          }
        }
      }
    }
    for (int u = 0; u < kUnits; ++u) {
      const F32 scale = LoadScales(units[u], offset, 0, half[u]);
      for (int r = 0; r < kRows; ++r) {
        const F32 sum = kParts == 2 ? sums[u][r][0] + sums[u][r][kParts - 1] : sums[u][r][0];
        out[u][r] = Fma(sum, scale, out[u][r]);
      }
    }
  }
  for (int u = 0; u < kUnits; ++u) {
    for (int r = 0; r < kRows; ++r) Store(to + (row0 + r) * d.out_row + u * kLanes, out[u][r]);
  }
}

template <int kUnits, int kRows>
static void DotUnits(const PackedDot& d, int64_t unit, int64_t row, float* to) {
  switch (d.weight.format) {
    case PackedFormat::kBytes:
      DotBytes<kUnits, kRows>(d, unit, row, to);
      return;
#if STILLHOUSE_INT_DOT
    case PackedFormat::kNibbles:
      DotNibbles<kUnits, kRows, false>(d, unit, row, to);
      return;
    case PackedFormat::kNibblesMin:
      DotNibbles<kUnits, kRows, true>(d, unit, row, to);
      return;
#endif
    default:
      __builtin_trap();
  }
}

// All rows of x on some units: those units' bytes stay in L1 between the passes. Two rows by two units is what the
// registers hold of nibbles (three sums each); bytes take four rows.
template <int kUnits>
static void DotAllRows(const PackedDot& d, int64_t unit, float* to) {
  int64_t row = 0;
  if (d.weight.format == PackedFormat::kBytes) {
    for (; row + 4 <= d.rows; row += 4) DotUnits<kUnits, 4>(d, unit, row, to);
  }
  for (; row + 2 <= d.rows; row += 2) DotUnits<kUnits, 2>(d, unit, row, to);
  if (row < d.rows) DotUnits<kUnits, 1>(d, unit, row, to);
}

static void RunPackedDot(const PackedDot& d, int64_t unit_begin, int64_t unit_end) {
  int64_t unit = unit_begin;
  for (; unit + 2 <= unit_end; unit += 2) {
    float* to = d.out + (unit - unit_begin) * kLanes;
    DotAllRows<2>(d, unit, to);
  }
  if (unit < unit_end) DotAllRows<1>(d, unit, d.out + (unit - unit_begin) * kLanes);
}

// --- panels --------------------------------------------------------------------------------------------------------

// One block of one unit as 32 vectors of kLanes rows, `step` floats apart.
STILLHOUSE_INLINE void UnpackBlock(PackedFormat format, Unit unit, int half, int64_t offset, float* out, int64_t step) {
  const F32 scale = LoadScales(unit, offset, 0, half);
  if (format == PackedFormat::kBytes) {
    for (int k = 0; k < 32; ++k) Store(out + k * step, scale * LoadRows8(unit, offset + kHeader8_0 + 8 * k, half));
    return;
  }
  const bool has_min = format == PackedFormat::kNibblesMin;
  const F32 min = has_min ? LoadScales(unit, offset, 1, half) : scale * Set1(-8.0f);
  const int header = has_min ? kHeader4_1 : kHeader4_0;
  for (int j = 0; j < 4; ++j) {
    const I32 v = LoadRows32(unit, offset + header + 32 * j, half);
    for (int i = 0; i < 4; ++i) {
      Store(out + (4 * j + i) * step, Fma(ToFloat((v >> (8 * i)) & 15), scale, min));
      Store(out + (16 + 4 * j + i) * step, Fma(ToFloat((v >> (8 * i + 4)) & 15), scale, min));
    }
  }
}

// Columns [32·block_begin, 32·block_end) of the two units of a tile, as a panel of kTileCols columns.
static void UnpackPanel(const PackedMatrix& w, int64_t tile, int64_t block_begin, int64_t block_end, float* panel) {
  for (int u = 0; u < 2; ++u, panel += kLanes) {
    const int64_t unit_index = 2 * tile + u;
    float* out = panel;
    if (unit_index * kLanes >= w.group_count * 8) {
      for (int64_t k = 32 * block_begin; k < 32 * block_end; ++k, out += kTileCols) Store(out, Zero());
      continue;
    }
    const Unit unit = UnitAt(w, unit_index);
    const int half = HalfOf(unit_index);
    // The next tile's bytes arrive while this one's panel is multiplied.
    const int64_t ahead = 2 * kLanes / 8 * w.group_bytes;
    Prefetch(unit.p, ahead + block_begin * w.block_bytes, ahead + block_end * w.block_bytes);
    for (int64_t b = block_begin; b < block_end; ++b, out += 32 * kTileCols) {
      UnpackBlock(w.format, unit, half, b * w.block_bytes, out, kTileCols);
    }
  }
}

// The eight rows of a group as rows: out[r · out_row + k].
static void UnpackGroup(const PackedMatrix& w, int64_t group, int64_t block_begin, int64_t block_end, float* out,
                        int64_t out_row) {
  float columns[32 * 16];
  const uint8_t* p = w.groups + group * w.group_bytes;
  const Unit unit = {p, p};
  // Few blocks of many groups are read in a row: far apart, so that the hardware does not see it coming.
  const int64_t ahead = 4 * w.group_bytes;
  Prefetch(p, ahead + block_begin * w.block_bytes, ahead + block_end * w.block_bytes);
  for (int64_t b = block_begin; b < block_end; ++b, out += 32) {
    for (int half = 0; half < (kLanes == 4 ? 2 : 1); ++half) {
      UnpackBlock(w.format, unit, half, b * w.block_bytes, columns + kLanes * half, 16);
    }
    for (int k = 0; k < 32; k += kTransposeBlock) {
      for (int r = 0; r < 8; r += kTransposeBlock) {
        TransposeBlock(columns + 16 * k + r, 16, out + r * out_row + k, out_row);
      }
    }
  }
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_PACKED_H_
