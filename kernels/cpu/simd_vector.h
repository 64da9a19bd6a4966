// Vector kernels of one instruction set (see lanes.h). Included only by isa_*.cc.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_VECTOR_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_VECTOR_H_

#include "kernels/cpu/lanes.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

// Calls body(i, n) with n == kLanes for whole vectors and once with the rest. `body` loads and stores with LoadSome and
// StoreSome, which compile to plain moves where n is the constant kLanes.
template <typename Body>
STILLHOUSE_INLINE void ForLanes(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, (int)(size - i));
}
STILLHOUSE_INLINE F32 LoadSome(const float* p, int n) { return n == kLanes ? Load(p) : LoadN(p, n); }
STILLHOUSE_INLINE void StoreSome(float* p, F32 v, int n) {
  if (n == kLanes) {
    Store(p, v);
  } else {
    StoreN(p, v, n);
  }
}

static float Dot(const float* a, const float* b, int64_t n) {
  F32 acc[4] = {Zero(), Zero(), Zero(), Zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) acc[u] = Fma(Load(a + i + u * kLanes), Load(b + i + u * kLanes), acc[u]);
  }
  for (; i < n; i += kLanes) {
    const int rest = n - i < kLanes ? (int)(n - i) : kLanes;
    acc[0] = Fma(LoadN(a + i, rest), LoadN(b + i, rest), acc[0]);
  }
  return ReduceAdd((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

static void Axpy(float alpha, const float* x, float* y, int64_t n) {
  const F32 factor = Set1(alpha);
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) {
        StoreSome(y + i, Fma(factor, LoadSome(x + i, m), LoadSome(y + i, m)), m);
      });
}

static void Scale(float alpha, float* x, int64_t n) {
  const F32 factor = Set1(alpha);
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) { StoreSome(x + i, factor * LoadSome(x + i, m), m); });
}

static void AddVectors(const float* a, const float* b, float* out, int64_t n) {
  ForLanes(
      n, [&](int64_t i, int m)
             __attribute__((always_inline)) { StoreSome(out + i, LoadSome(a + i, m) + LoadSome(b + i, m), m); });
}

static void AddSquares(const float* x, float* y, int64_t n) {
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) {
        const F32 v = LoadSome(x + i, m);
        StoreSome(y + i, Fma(v, v, LoadSome(y + i, m)), m);
      });
}

// Squares are summed in fp32 over at most 4 vectors, then in fp64.
static double SumOfSquares(const float* x, int64_t n) {
  double total = 0;
  int64_t i = 0;
  while (i < n) {
    F32 acc = Zero();
    const int64_t end = n - i < 4 * kLanes ? n : i + 4 * kLanes;
    for (; i < end; i += kLanes) {
      const F32 v = LoadN(x + i, end - i < kLanes ? (int)(end - i) : kLanes);
      acc = Fma(v, v, acc);
    }
    i = end;
    for (int l = 0; l < kLanes; ++l) total += (double)acc[l];
  }
  return total;
}

static void SwiGluVectors(const float* gate, const float* up, float* out, int64_t n) {
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) {
        const F32 g = LoadSome(gate + i, m);
        StoreSome(out + i, g * Sigmoid(g) * LoadSome(up + i, m), m);
      });
}

// silu'(x) = σ(x)·(1 + x·(1 − σ(x))).
static void SwiGluGradVectors(const float* gate, const float* up, const float* dout, float* dgate, float* dup,
                              int64_t n) {
  const F32 one = Set1(1.0f);
  ForLanes(
      n, [&](int64_t i, int m) __attribute__((always_inline)) {
        const F32 g = LoadSome(gate + i, m), u = LoadSome(up + i, m), d = LoadSome(dout + i, m);
        const F32 s = Sigmoid(g);
        if (dgate) StoreSome(dgate + i, Fma(d * u, s * Fma(g, one - s, one), LoadSome(dgate + i, m)), m);
        if (dup) StoreSome(dup + i, Fma(d, g * s, LoadSome(dup + i, m)), m);
      });
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_VECTOR_H_
