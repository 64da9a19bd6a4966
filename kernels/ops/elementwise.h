// Elementwise ops: residual add, gated activation, row copies.
#ifndef STILLHOUSE_KERNELS_OPS_ELEMENTWISE_H_
#define STILLHOUSE_KERNELS_OPS_ELEMENTWISE_H_

#include "kernels/ops/context.h"

namespace stillhouse {

// out = silu(gate) · up, silu(x) = x·σ(x) (Shazeer 2020). f32 [R, I]; rows may be strided (halves of one product).
struct SwiGluArgs {
  Tensor gate, up, out;
};
struct SwiGluGradArgs {
  Tensor gate, up, dout, dgate, dup;
};
Tensor SwiGlu(const Context& ctx, const Tensor& gate, const Tensor& up);

// out = a + b, same shapes, f32, contiguous. out may be a or b when nothing is recorded.
struct AddArgs {
  Tensor a, b, out;
};
struct AddGradArgs {
  Tensor dout, da, db;
};
Tensor Add(const Context& ctx, const Tensor& a, const Tensor& b);

// to[h, slot_begin + i, :] = from[row_begin + i, h, :]: appends a step's keys or values to a page. from [R, H_kv, d],
// to [H_kv, slots, d], f32; on CUDA either may be bf16 (rounded to nearest even). Not differentiated.
struct CopyRowsArgs {
  Tensor from, to;
  int64_t row_begin = 0, row_count = 0, slot_begin = 0;
};
void CopyRows(const Context& ctx, const CopyRowsArgs& args);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_ELEMENTWISE_H_
