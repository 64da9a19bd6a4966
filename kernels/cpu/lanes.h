// Vectors of floats for the kernels that are compiled once per instruction set.
//
// Included only by isa_*.cc, which define STILLHOUSE_ISA (a namespace) and are compiled with that set's flags. Nothing
// in such a translation unit may use an inline function or template of another header (the standard library's
// included): the linker keeps one copy of those for the whole program, and it could be the one that this machine cannot
// run.
#ifndef STILLHOUSE_KERNELS_CPU_LANES_H_
#define STILLHOUSE_KERNELS_CPU_LANES_H_

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STILLHOUSE_INLINE static inline __attribute__((always_inline))

namespace stillhouse::cpu::STILLHOUSE_ISA {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define STILLHOUSE_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define STILLHOUSE_LANES 8
#else
#define STILLHOUSE_LANES 4
#endif

constexpr int kLanes = STILLHOUSE_LANES;

// One vector register. + − · / and comparisons work lane by lane; a comparison gives an I32 of 0 and −1, and
// `mask ? a : b` selects.
#if STILLHOUSE_LANES == 16
using F32 = __m512;
#elif STILLHOUSE_LANES == 8
using F32 = __m256;
#else
typedef float F32 __attribute__((vector_size(16), may_alias));
#endif
typedef int32_t I32 __attribute__((vector_size(4 * STILLHOUSE_LANES), may_alias));
typedef uint32_t U32 __attribute__((vector_size(4 * STILLHOUSE_LANES), may_alias));  // wraps

STILLHOUSE_INLINE F32 Load(const float* p) {
  F32 v;
  memcpy(&v, p, sizeof(v));
  return v;
}
STILLHOUSE_INLINE void Store(float* p, F32 v) { memcpy(p, &v, sizeof(v)); }
STILLHOUSE_INLINE F32 Set1(float x) {
#if STILLHOUSE_LANES == 16
  return _mm512_set1_ps(x);
#elif STILLHOUSE_LANES == 8
  return _mm256_set1_ps(x);
#else
  return F32{x, x, x, x};
#endif
}
STILLHOUSE_INLINE F32 Zero() { return Set1(0.0f); }
STILLHOUSE_INLINE I32 SetI1(int32_t x) { return I32{} + x; }
STILLHOUSE_INLINE I32 Bits(F32 v) { return (I32)v; }
STILLHOUSE_INLINE F32 FromBits(I32 v) { return (F32)v; }

// The first n of kLanes lanes (0 < n < kLanes); the others are 0 on load and untouched on store.
STILLHOUSE_INLINE F32 LoadN(const float* p, int n) {
#if STILLHOUSE_LANES == 16
  return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif STILLHOUSE_LANES == 8
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_maskload_ps(p, mask);
#else
  F32 v = Zero();
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
#endif
}
STILLHOUSE_INLINE void StoreN(float* p, F32 v, int n) {
#if STILLHOUSE_LANES == 16
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
#elif STILLHOUSE_LANES == 8
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  _mm256_maskstore_ps(p, mask, v);
#else
  for (int i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// a·b + c: one rounding where the set has fused multiply-add, two in the baseline.
STILLHOUSE_INLINE F32 Fma(F32 a, F32 b, F32 c) {
#if STILLHOUSE_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif STILLHOUSE_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
// If either is NaN, the result is b.
STILLHOUSE_INLINE F32 Max(F32 a, F32 b) {
#if STILLHOUSE_LANES == 16
  return _mm512_max_ps(a, b);
#elif STILLHOUSE_LANES == 8
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
STILLHOUSE_INLINE F32 Min(F32 a, F32 b) {
#if STILLHOUSE_LANES == 16
  return _mm512_min_ps(a, b);
#elif STILLHOUSE_LANES == 8
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
STILLHOUSE_INLINE F32 Sqrt(F32 a) {
#if STILLHOUSE_LANES == 16
  return _mm512_sqrt_ps(a);
#elif STILLHOUSE_LANES == 8
  return _mm256_sqrt_ps(a);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(a);
#else
  return F32{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
#endif
}
STILLHOUSE_INLINE F32 Abs(F32 a) { return FromBits(Bits(a) & 0x7fffffff); }
STILLHOUSE_INLINE F32 ToFloat(I32 v) { return __builtin_convertvector(v, F32); }

STILLHOUSE_INLINE float ReduceAdd(F32 v) {
#if STILLHOUSE_LANES == 16
  return _mm512_reduce_add_ps(v);
#elif STILLHOUSE_LANES == 8
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
STILLHOUSE_INLINE int32_t ReduceAdd(I32 v) {
#if STILLHOUSE_LANES == 16
  return _mm512_reduce_add_epi32((__m512i)v);
#elif STILLHOUSE_LANES == 8
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
STILLHOUSE_INLINE int32_t ReduceMax(I32 v) {
#if STILLHOUSE_LANES == 16
  return _mm512_reduce_max_epi32((__m512i)v);
#elif STILLHOUSE_LANES == 8
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
#else
  int32_t best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
STILLHOUSE_INLINE float ReduceMax(F32 v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// kLanes small integers, or halves, as floats.
STILLHOUSE_INLINE F32 LoadI8(const int8_t* p) {
#if STILLHOUSE_LANES == 16
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif STILLHOUSE_LANES == 8
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__SSE4_1__)
  int32_t four;
  memcpy(&four, p, 4);
  return _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(four)));
#else
  return F32{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
#endif
}

STILLHOUSE_INLINE float HalfToFloat1(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  // Exponent and mantissa moved into place and rescaled by 2^112: exact, denormals included; then infinities and NaNs.
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float f, scale;
  const uint32_t scale_bits = 0x77800000u;
  memcpy(&f, &bits, 4);
  memcpy(&scale, &scale_bits, 4);
  f *= scale;
  memcpy(&bits, &f, 4);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= (uint32_t)(half & 0x8000) << 16;
  memcpy(&f, &bits, 4);
  return f;
#endif
}
STILLHOUSE_INLINE F32 LoadHalf(const uint16_t* p) {
#if STILLHOUSE_LANES == 16
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif STILLHOUSE_LANES == 8
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return F32{HalfToFloat1(p[0]), HalfToFloat1(p[1]), HalfToFloat1(p[2]), HalfToFloat1(p[3])};
#endif
}

// e^x within 2 ulp. Below −87.3 the result is 0 (no denormals), above 88.72 it is +inf; NaN stays NaN.
STILLHOUSE_INLINE F32 Exp(F32 x) {
  const F32 magic = Set1(12582912.0f);  // 1.5 · 2^23: adding it rounds to the nearest integer
  const F32 low = Set1(-87.33654f), high = Set1(88.72283f);
  const F32 clamped = Min(Max(x, low), high);
  const F32 shifted = Fma(clamped, Set1(1.44269504f), magic);
  const F32 n = shifted - magic;
  F32 r = Fma(n, Set1(-0.693145752f), clamped);  // ln 2 in two parts
  r = Fma(n, Set1(-1.42860677e-6f), r);
  F32 p = Set1(1.9875691500e-4f);
  p = Fma(p, r, Set1(1.3981999507e-3f));
  p = Fma(p, r, Set1(8.3334519073e-3f));
  p = Fma(p, r, Set1(4.1665795894e-2f));
  p = Fma(p, r, Set1(1.6666665459e-1f));
  p = Fma(p, r, Set1(5.0000001201e-1f));
  p = Fma(p * r, r, r + Set1(1.0f));
  // 2^n in two factors: n reaches 128.
  const I32 exponent = Bits(shifted) - Bits(magic);
  const I32 half = exponent >> 1;
  p = p * FromBits((half + 127) << 23) * FromBits((exponent - half + 127) << 23);
  p = x < low ? Zero() : p;
  p = x > high ? FromBits(SetI1(0x7f800000)) : p;
  return x == x ? p : x;
}

// x·σ(x)'s σ, for any x.
STILLHOUSE_INLINE F32 Sigmoid(F32 x) { return Set1(1.0f) / (Set1(1.0f) + Exp(-x)); }

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_LANES_H_
