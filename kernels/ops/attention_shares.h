// Attention's shares made explicit, a tile at a time, with what compaction reads from them: the share of every key
// (attention matching's selection, and the scores of eviction) and each query's log-sum.
#ifndef STILLHOUSE_KERNELS_OPS_ATTENTION_SHARES_H_
#define STILLHOUSE_KERNELS_OPS_ATTENTION_SHARES_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// Of one query's own mass, what the keys of another set may seem to hold: e^{own − reference} is cut here.
inline constexpr float kMostAttentionShare = 1e6f;

// z f32 [R, T] (rows may be strided): logits in, shares out, in place. With y = z + column_bias and own_r = log Σ_j
// e^{y_rj}, shares_rj = e^{y_rj − own_r}; with a reference, shares_rj = e^{y_rj − own_r} · min(e^{own_r − reference_r},
// kMostAttentionShare): shares of a larger set of keys whose log-sum is known. A row of −inf gives zeros and own =
// −inf. columns_j += Σ_r shares_rj^power, in a fixed order. fp32; sums over rows are taken in runs, so that many rows
// lose no more than few.
struct AttentionSharesArgs {
  Tensor z;
  Tensor column_bias;  // f32 [T], or empty
  Tensor reference;    // f32 [R], or empty
  Tensor own;          // f32 [R], or empty
  Tensor columns;      // f32 [T], or empty
  int power = 1;       // 1 or 2
};
// Not differentiated.
void AttentionShares(const Context& ctx, const AttentionSharesArgs& args);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_ATTENTION_SHARES_H_
