// Attention kernels of one instruction set (see lanes.h). Included only by isa_*.cc.
//
// Two layouts of scores. Few queries: S [queries, slots], a softmax along contiguous slots. Many queries: Sᵀ [slots,
// queries], queries in the lanes: maxima and sums need no step across lanes, and no operand of any product is packed.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_ATTENTION_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_ATTENTION_H_

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_softmax.h"

namespace stillhouse::cpu::STILLHOUSE_ISA {

// out[u] = scale · Σ v[u] + beta[u] for four vectors.
STILLHOUSE_INLINE void FinishFour(const F32* v, float scale, const float* beta, float* out) {
#if STILLHOUSE_LANES == 8
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
  const __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
  const __m128 bias = beta ? _mm_loadu_ps(beta) : _mm_setzero_ps();
  _mm_storeu_ps(out, _mm_fmadd_ps(sums, _mm_set1_ps(scale), bias));
#else
  for (int u = 0; u < 4; ++u) out[u] = scale * ReduceAdd(v[u]) + (beta ? beta[u] : 0.0f);
#endif
}

STILLHOUSE_INLINE void AskFor(const float* row, int64_t width) {
  for (int64_t c = 0; c < width; c += 16) __builtin_prefetch(row + c, 0, 2);
}

// s[i, j] = scale · q_i·k_j + beta[j] for i < kRows, j < slots.
template <int kRows>
STILLHOUSE_INLINE void ScoreRows(const float* q, int64_t q_row, const float* k, int64_t k_row, int64_t slots,
                                 int64_t depth, float scale, const float* beta, float* s, int64_t s_row,
                                 NextRows next) {
  const int tail = (int)(depth % kLanes);
  const int64_t whole = depth - tail;
  int64_t j = 0;
  for (; j + 4 <= slots; j += 4) {
    F32 acc[kRows][4];
    for (int i = 0; i < kRows; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = Zero();
    const float* key = k + j * k_row;
#if defined(__SSE2__)
    // The rows after next: keys stream from memory once.
    for (int u = 0; u < 4; ++u) {
      const char* ahead = (const char*)(key + (8 + u) * k_row);
      for (int64_t line = 0; line < depth * 4; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
    }
#endif
    if (next.rows) {
      for (int u = 0; u < 4; ++u) AskFor(next.rows + (j + u) * next.row, depth);
    }
    for (int64_t c = 0; c < whole; c += kLanes) {
      // The queries first, then one key at a time: 12 sums, 3 queries and a key are the 16 registers.
      F32 y[kRows];
      for (int i = 0; i < kRows; ++i) y[i] = Load(q + i * q_row + c);
      for (int u = 0; u < 4; ++u) {
        const F32 x = Load(key + u * k_row + c);
        for (int i = 0; i < kRows; ++i) acc[i][u] = Fma(x, y[i], acc[i][u]);
      }
    }
    if (tail) {
      F32 x[4];
      for (int u = 0; u < 4; ++u) x[u] = LoadN(key + u * k_row + whole, tail);
      for (int i = 0; i < kRows; ++i) {
        const F32 y = LoadN(q + i * q_row + whole, tail);
        for (int u = 0; u < 4; ++u) acc[i][u] = Fma(x[u], y, acc[i][u]);
      }
    }
    for (int i = 0; i < kRows; ++i) FinishFour(acc[i], scale, beta ? beta + j : nullptr, s + i * s_row + j);
  }
  for (; j < slots; ++j) {
    F32 acc[kRows];
    for (int i = 0; i < kRows; ++i) acc[i] = Zero();
    const float* key = k + j * k_row;
    for (int64_t c = 0; c < whole; c += kLanes) {
      const F32 x = Load(key + c);
      for (int i = 0; i < kRows; ++i) acc[i] = Fma(x, Load(q + i * q_row + c), acc[i]);
    }
    if (tail) {
      const F32 x = LoadN(key + whole, tail);
      for (int i = 0; i < kRows; ++i) acc[i] = Fma(x, LoadN(q + i * q_row + whole, tail), acc[i]);
    }
    for (int i = 0; i < kRows; ++i) s[i * s_row + j] = scale * ReduceAdd(acc[i]) + (beta ? beta[j] : 0.0f);
  }
}

static void AttentionScores(const float* q, int64_t q_row, int64_t rows, const float* k, int64_t k_row, int64_t slots,
                            int64_t depth, float scale, const float* beta, float* s, int64_t s_row, NextRows next) {
  int64_t i = 0;
  for (; i + 3 <= rows; i += 3) {
    ScoreRows<3>(q + i * q_row, q_row, k, k_row, slots, depth, scale, beta, s + i * s_row, s_row, next);
    next = {};
  }
  if (rows - i == 2) {
    ScoreRows<2>(q + i * q_row, q_row, k, k_row, slots, depth, scale, beta, s + i * s_row, s_row, next);
  } else if (rows - i == 1) {
    ScoreRows<1>(q + i * q_row, q_row, k, k_row, slots, depth, scale, beta, s + i * s_row, s_row, next);
  }
}

// o[i, c] += Σ_j p[i, j] · v[j, c] for kRows rows and kVectors vectors of columns, the last of `last` lanes.
template <int kRows, int kVectors>
STILLHOUSE_INLINE void ValueBlock(const float* p, int64_t p_row, const float* v, int64_t v_row, int64_t slots, int last,
                                  float* o, int64_t o_row, NextRows next) {
  F32 acc[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int u = 0; u < kVectors; ++u) acc[i][u] = Zero();
  }
  for (int64_t j = 0; j < slots; ++j) {
    F32 weight[kRows];
    for (int i = 0; i < kRows; ++i) weight[i] = Set1(p[i * p_row + j]);
    if (next.rows) AskFor(next.rows + j * next.row, kVectors * kLanes);
    for (int u = 0; u < kVectors; ++u) {
      const F32 x = u + 1 < kVectors ? Load(v + j * v_row + u * kLanes) : LoadSome(v + j * v_row + u * kLanes, last);
      for (int i = 0; i < kRows; ++i) acc[i][u] = Fma(weight[i], x, acc[i][u]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int u = 0; u < kVectors; ++u) {
      float* to = o + i * o_row + u * kLanes;
      const int n = u + 1 < kVectors ? kLanes : last;
      StoreSome(to, LoadSome(to, n) + acc[i][u], n);
    }
  }
}

template <int kRows>
STILLHOUSE_INLINE void ValueRows(const float* p, int64_t p_row, const float* v, int64_t v_row, int64_t slots,
                                 int64_t width, float* o, int64_t o_row, NextRows next) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
    ValueBlock<kRows, 4>(p, p_row, v + c, v_row, slots, kLanes, o + c, o_row,
                         {next.rows ? next.rows + c : nullptr, next.row});
  }
  for (; c < width; c += kLanes) {
    const int last = width - c < kLanes ? (int)(width - c) : kLanes;
    ValueBlock<kRows, 1>(p, p_row, v + c, v_row, slots, last, o + c, o_row, {});
  }
}

static void AttentionValues(const float* p, int64_t p_row, int64_t rows, const float* v, int64_t v_row, int64_t slots,
                            int64_t width, float* o, int64_t o_row, NextRows next) {
  int64_t i = 0;
  for (; i + 3 <= rows; i += 3) {
    ValueRows<3>(p + i * p_row, p_row, v, v_row, slots, width, o + i * o_row, o_row, next);
    next = {};
  }
  if (rows - i == 2) {
    ValueRows<2>(p + i * p_row, p_row, v, v_row, slots, width, o + i * o_row, o_row, next);
  } else if (rows - i == 1) {
    ValueRows<1>(p + i * p_row, p_row, v, v_row, slots, width, o + i * o_row, o_row, next);
  }
}

// One row of scores joins a running softmax (ops/softmax_state.h): s becomes e^(s − m), *m and *l are brought up to
// date, and the factor is returned by which what was summed before shrinks.
static float AttentionRowSoftmax(float* s, int64_t n, float* m, float* l) {
  const float best = RowMax(s, n, nullptr);
  const float next = best > *m ? best : *m;
  if (next == kMinusInf) {  // nothing seen so far
    for (int64_t j = 0; j < n; ++j) s[j] = 0.0f;
    return 1.0f;
  }
  const float factor = *m == next ? 1.0f : ExpBelow(Set1(*m - next))[0];
  *l = *l * factor + (float)ExpInto(s, n, next, s);
  *m = next;
  return factor;
}

// The same for Sᵀ [slots, columns], columns (a multiple of the lanes) side by side: beta[j] is added to slot j first;
// column i sees the slots below limit[i]. beta and limit may be null.
static void AttentionPanelSoftmax(float* s, int64_t s_row, int64_t slots, int64_t columns, const float* beta,
                                  const int32_t* limit, float* m, float* l, float* factor) {
  const F32 minus_inf = Set1(kMinusInf);
  for (int64_t c = 0; c < columns; c += kLanes) {
    float* column = s + c;
    const F32 old = Load(m + c);
    F32 best = old, other = old;
    if (beta || limit) {
      I32 visible = SetI1(0x7fffffff);
      if (limit) memcpy(&visible, limit + c, sizeof(visible));
      for (int64_t j = 0; j < slots; ++j) {
        F32 v = Load(column + j * s_row);
        if (beta) v = v + Set1(beta[j]);
        v = (I32)(SetI1((int32_t)j) < visible) ? v : minus_inf;
        Store(column + j * s_row, v);
        best = Max(v, best);
      }
    } else {
      int64_t j = 0;
      for (; j + 2 <= slots; j += 2) {
        best = Max(Load(column + j * s_row), best);
        other = Max(Load(column + (j + 1) * s_row), other);
      }
      if (j < slots) best = Max(Load(column + j * s_row), best);
      best = Max(best, other);
    }
    // A column that saw nothing yet: any finite shift gives zeros.
    const F32 shift = best == minus_inf ? Zero() : best;
    F32 sum = Zero(), sum2 = Zero();
    int64_t j = 0;
    for (; j + 2 <= slots; j += 2) {
      const F32 p = ExpBelow(Load(column + j * s_row) - shift), p2 = ExpBelow(Load(column + (j + 1) * s_row) - shift);
      Store(column + j * s_row, p);
      Store(column + (j + 1) * s_row, p2);
      sum = sum + p;
      sum2 = sum2 + p2;
    }
    if (j < slots) {
      const F32 p = ExpBelow(Load(column + j * s_row) - shift);
      Store(column + j * s_row, p);
      sum = sum + p;
    }
    const F32 f = ExpBelow(old - shift);
    Store(factor + c, f);
    Store(l + c, Fma(Load(l + c), f, sum + sum2));
    Store(m + c, best);
  }
}

// Backward, Sᵀ [slots, columns] of scaled scores and dPᵀ alike: s becomes P = e^(s + beta − lse), dp becomes
// dS = P ⊙ (dP − delta), and dbeta[j] += Σ_columns dS. beta, limit and dbeta may be null; a column with lse = +inf has
// no weight.
static void AttentionPanelGrad(float* s, float* dp, int64_t row, int64_t slots, int64_t columns, const float* beta,
                               const int32_t* limit, const float* lse, const float* delta, float* dbeta) {
  for (int64_t j = 0; j < slots; ++j) {
    float* p_row = s + j * row;
    float* d_row = dp + j * row;
    const F32 bias = Set1(beta ? beta[j] : 0.0f);
    F32 sum = Zero();
    for (int64_t c = 0; c < columns; c += kLanes) {
      F32 p = ExpBelow(Load(p_row + c) + bias - Load(lse + c));
      if (limit) {
        I32 visible;
        memcpy(&visible, limit + c, sizeof(visible));
        p = (I32)(SetI1((int32_t)j) < visible) ? p : Zero();
      }
      const F32 d = p * (Load(d_row + c) - Load(delta + c));
      Store(p_row + c, p);
      Store(d_row + c, d);
      sum = sum + d;
    }
    if (dbeta) dbeta[j] += ReduceAdd(sum);
  }
}

}  // namespace stillhouse::cpu::STILLHOUSE_ISA

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_ATTENTION_H_
