// Rows by index: token embedding, and selection of rows of an activation.
#ifndef STILLHOUSE_KERNELS_OPS_GATHER_H_
#define STILLHOUSE_KERNELS_OPS_GATHER_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// out[r] = table[ids[r]]. table [V, D] of any dtype (quantised rows are decoded), ids i32 [R] in [0, V), out f32 [R,
// D].
struct EmbeddingArgs {
  Tensor table, ids, out;
};
// dtable[ids[r]] += dout[r], rows of one id in order of r (deterministic). Only for an f32 table.
struct EmbeddingGradArgs {
  Tensor ids, dout, dtable;
};
Tensor Embedding(const Context& ctx, const Tensor& table, const Tensor& ids);

// out[i] = x[rows[i]]; x f32 [R, D], rows i32 [n]. Gradient: dx[rows[i]] += dout[i].
struct GatherRowsArgs {
  Tensor x, rows, out;
};
struct GatherRowsGradArgs {
  Tensor rows, dout, dx;
};
Tensor GatherRows(const Context& ctx, const Tensor& x, const Tensor& rows);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_GATHER_H_
