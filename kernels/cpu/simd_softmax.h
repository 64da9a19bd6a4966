// Maxima and exponentials of one instruction set (see lanes.h): softmax, losses, sampling. Included only by isa_*.cc.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_SOFTMAX_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_SOFTMAX_H_

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/simd_vector.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

constexpr float kMinusInf = -__builtin_inff();

// e^x for x ≤ 0 (a softmax's exponents) within 2 ulp: about two thirds of the work of Exp. Below −87.3 the result is 0;
// NaN stays NaN. Up to x = 88 it is right, too.
STILLHOUSE_INLINE F32 ExpBelow(F32 x) {
  const F32 magic = Set1(12582912.0f);  // 1.5 · 2^23: adding it rounds to the nearest integer
  const F32 low = Set1(-87.33654f);
  const F32 clamped = Max(low, x);
  const F32 shifted = Fma(clamped, Set1(1.44269504f), magic);
  const F32 n = shifted - magic;
  F32 r = Fma(n, Set1(-0.693145752f), clamped);
  r = Fma(n, Set1(-1.42860677e-6f), r);
  F32 p = Set1(1.9875691500e-4f);
  p = Fma(p, r, Set1(1.3981999507e-3f));
  p = Fma(p, r, Set1(8.3334519073e-3f));
  p = Fma(p, r, Set1(4.1665795894e-2f));
  p = Fma(p, r, Set1(1.6666665459e-1f));
  p = Fma(p, r, Set1(5.0000001201e-1f));
  p = Fma(p * r, r, r + Set1(1.0f));
  // 2^n straight into the exponent: n ≥ −126, and p ≥ 1 there. The low bits of `shifted` are n. Lanes beyond a row's
  // end may hold anything, so the sum wraps.
  p = FromBits((I32)((U32)Bits(p) + ((U32)Bits(shifted) << 23)));
  return FromBits(Bits(p) & ~(I32)(x < low));
}

// The largest value, NaNs passed over; −inf for none. *unusable is set if there is a NaN or +inf.
static float RowMax(const float* z, int64_t n, bool* unusable) {
  const F32 low = Set1(kMinusInf), high = Set1(__builtin_inff());
  F32 best[4] = {low, low, low, low};
  I32 bad = SetI1(0);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) {
      const F32 v = Load(z + i + u * kLanes);
      best[u] = Max(v, best[u]);
      bad |= ~(I32)(v < high);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const F32 v = Load(z + i);
    best[0] = Max(v, best[0]);
    bad |= ~(I32)(v < high);
  }
  float result = ReduceMax(Max(Max(best[0], best[1]), Max(best[2], best[3])));
  bool any = false;
  for (; i < n; ++i) {
    result = z[i] > result ? z[i] : result;
    any |= !(z[i] < __builtin_inff());
  }
  if (unusable) {
    for (int l = 0; l < kLanes; ++l) any |= bad[l] != 0;
    *unusable = any;
  }
  return result;
}

// The first i ≥ begin with z[i] > threshold; n if there is none.
static int64_t FindAbove(const float* z, int64_t begin, int64_t n, float threshold) {
  if (begin < n && z[begin] > threshold) return begin;
  const F32 limit = Set1(threshold);
  int64_t i = begin;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    const F32 v = Max(Max(Load(z + i), Load(z + i + kLanes)), Max(Load(z + i + 2 * kLanes), Load(z + i + 3 * kLanes)));
    const I32 above = (I32)(v > limit);
    int32_t any = 0;
#if STILLHOUSE_LANES == 8
    any = _mm256_movemask_ps((__m256)above);
#else
    for (int l = 0; l < kLanes; ++l) any |= above[l];
#endif
    if (any) break;
  }
  for (; i < n; ++i) {
    if (z[i] > threshold) return i;
  }
  return n;
}

// Sums run in fp32 over at most 64 vectors, then in fp64: a vocabulary's worth of terms loses nothing.
constexpr int64_t kSumBlock = 64 * kLanes;

// Σ e^((z − shift)·factor); shift is the largest z, factor > 0.
static double ExpSum(const float* z, int64_t n, float shift, float factor) {
  const F32 s = Set1(shift), f = Set1(factor);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = n - begin < kSumBlock ? n : begin + kSumBlock;
    F32 a = Zero(), b = Zero();
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      a = a + ExpBelow((Load(z + i) - s) * f);
      b = b + ExpBelow((Load(z + i + kLanes) - s) * f);
    }
    for (; i + kLanes <= end; i += kLanes) a = a + ExpBelow((Load(z + i) - s) * f);
    float tail = 0;
    if (i < end) {
      const F32 v = ExpBelow((LoadN(z + i, (int)(end - i)) - s) * f);
      for (int l = 0; l < (int)(end - i); ++l) tail += v[l];
    }
    total += (double)ReduceAdd(a + b) + (double)tail;
  }
  return total;
}

// out = e^(z − shift), and their sum; shift ≥ z up to rounding. `out` may be z.
static double ExpInto(const float* z, int64_t n, float shift, float* out) {
  const F32 s = Set1(shift);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = n - begin < kSumBlock ? n : begin + kSumBlock;
    F32 a = Zero(), b = Zero();
    int64_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const F32 x = ExpBelow(Load(z + i) - s), y = ExpBelow(Load(z + i + kLanes) - s);
      Store(out + i, x);
      Store(out + i + kLanes, y);
      a = a + x;
      b = b + y;
    }
    for (; i + kLanes <= end; i += kLanes) {
      const F32 x = ExpBelow(Load(z + i) - s);
      Store(out + i, x);
      a = a + x;
    }
    float tail = 0;
    if (i < end) {
      const F32 v = ExpBelow(LoadN(z + i, (int)(end - i)) - s);
      StoreN(out + i, v, (int)(end - i));
      for (int l = 0; l < (int)(end - i); ++l) tail += v[l];
    }
    total += (double)ReduceAdd(a + b) + (double)tail;
  }
  return total;
}

// out = z − shift. `out` may be z.
static void ShiftInto(const float* z, float shift, float* out, int64_t n) {
  const F32 s = Set1(shift);
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) { StoreSome(out + i, LoadSome(z + i, m) - s, m); });
}

// dz += p ⊙ (g − dot).
static void SoftmaxGradRow(const float* p, const float* g, float dot, float* dz, int64_t n) {
  const F32 shift = Set1(dot);
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) {
        StoreSome(dz + i, Fma(LoadSome(p + i, m), LoadSome(g + i, m) - shift, LoadSome(dz + i, m)), m);
      });
}

// out = weight ⊙ x · factor; weight may be null.
static void ScaleByWeight(const float* x, float factor, const float* weight, float* out, int64_t n) {
  const F32 f = Set1(factor);
  if (weight) {
    ForLanes(
        n, [&](int64_t i, int m) __attribute__((always_inline)) {
          StoreSome(out + i, LoadSome(x + i, m) * f * LoadSome(weight + i, m), m);
        });
  } else {
    ForLanes(
        n, [&](int64_t i, int m) __attribute__((always_inline)) { StoreSome(out + i, LoadSome(x + i, m) * f, m); });
  }
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_SOFTMAX_H_
