#include "kernels/ops/gather.h"

#include "kernels/ops/kernel_table.h"

namespace stillhouse {

Tensor Embedding(const Context& ctx, const Tensor& table, const Tensor& ids) {
  Tensor out = ctx.EmptyF32({ids.elements(), table.dim(1)});
  ctx.kernels().Embedding(*ctx.backend, {table, ids, out});
  if (ctx.Wants(table)) {
    ctx.tape->Record("Embedding", {out}, [ctx, table, ids, out](Tape& tape) {
      ctx.kernels().EmbeddingGrad(*ctx.backend, {ids, tape.Grad(out), tape.Grad(table)});
    });
  }
  return out;
}

Tensor GatherRows(const Context& ctx, const Tensor& x, const Tensor& rows) {
  Tensor out = ctx.EmptyF32({rows.elements(), x.dim(1)});
  ctx.kernels().GatherRows(*ctx.backend, {x, rows, out});
  if (ctx.Wants(x)) {
    ctx.tape->Record("GatherRows", {out}, [ctx, x, rows, out](Tape& tape) {
      ctx.kernels().GatherRowsGrad(*ctx.backend, {rows, tape.Grad(out), tape.Grad(x)});
    });
  }
  return out;
}

}  // namespace stillhouse
