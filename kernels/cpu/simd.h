// The innermost kernels, compiled once per instruction set and reached through a table of pointers.
//
// To add a kernel: a pointer here, its code in a simd_*.h (written with lanes.h), its line in simd_table.h. All take
// raw pointers and run on the calling thread; lengths may be anything ≥ 0 and pointers need no alignment unless said.
#ifndef STILLHOUSE_KERNELS_CPU_SIMD_H_
#define STILLHOUSE_KERNELS_CPU_SIMD_H_

#include <cstdint>

#include "kernels/tensor/dtype.h"

namespace stillhouse {
class Backend;
enum class CpuIsa : uint8_t;  // cpu_backend.h
}  // namespace stillhouse

namespace stillhouse::cpu {

// One tile of a product: c[i, j] = alpha · Σ_k a[i, k] · b[k, j] (+ c[i, j]), i < rows ≤ tile_rows, j < cols ≤
// tile_cols. a has free strides (elements); b and c have contiguous rows.
struct GemmTile {
  int64_t rows = 0, cols = 0, depth = 0;
  const float* a = nullptr;
  int64_t a_row = 0, a_depth = 1;
  const float* b = nullptr;
  int64_t b_depth = 0;
  float* c = nullptr;
  int64_t c_row = 0;
  float alpha = 1.0f;
  bool accumulate = false;
};

// A packed weight (packed_weight.h), from the first of its groups.
enum class PackedFormat : uint8_t { kNibbles, kNibblesMin, kBytes };  // Q4_0, Q4_1, Q8_0
struct PackedMatrix {
  PackedFormat format;
  const uint8_t* groups;
  int64_t group_count, group_bytes, block_bytes;
  int64_t blocks;  // per row
};

// out[r, n] = Σ_k x[r, k] · weight[n, k] for few rows of x. The nibble formats read x as integers
// (`digits` to `sums`, made by split_digits), the bytes as it is. A unit is `lanes` rows of the weight; out
// points at the first row of unit_begin and has room for whole units.
struct PackedDot {
  PackedMatrix weight;
  int64_t rows;
  const float* x;
  int64_t x_row;
  const int8_t* digits;
  int64_t digit_row;
  const int32_t* offsets;  // [rows, blocks]
  const float* scales;     // [rows, blocks]
  const float* sums;       // [rows, blocks]
  float* out;
  int64_t out_row;
};

// Rows that the next kernel will read: a kernel bound by memory asks for them beside its own. Null: none.
struct NextRows {
  const float* rows = nullptr;
  int64_t row = 0;  // floats from one to the next
};

struct SimdTable {
  const char* name;
  int lanes;
  int tile_rows, tile_cols;

  // Products.
  void (*gemm_sweep)(const GemmTile& tile);
  // panel[k, j] = b[j, k] for j < cols ≤ tile_cols, rows of the panel are tile_cols long, missing columns are 0.
  void (*pack_transposed)(const float* b, int64_t b_row, int64_t cols, int64_t depth, float* panel);
  // The same from b[k, j].
  void (*pack_rows)(const float* b, int64_t b_row, int64_t cols, int64_t depth, float* panel);
  // out[i] = Σ_k a[i, k] · b[k] for i < rows.
  void (*dot_rows)(const float* a, int64_t a_row, int64_t rows, const float* b, int64_t depth, float* out);
  // Packed weights. int_dot: whether the nibble formats have their packed_dot.
  bool int_dot;
  void (*split_digits)(const float* x, int64_t blocks, int8_t* digits, int32_t* offsets, float* scales, float* sums);
  void (*packed_dot)(const PackedDot& dot, int64_t unit_begin, int64_t unit_end);
  void (*unpack_panel)(const PackedMatrix& weight, int64_t tile, int64_t block_begin, int64_t block_end, float* panel);
  void (*unpack_group)(const PackedMatrix& weight, int64_t group, int64_t block_begin, int64_t block_end, float* out,
                       int64_t out_row);
  // One row of any dtype as floats; n is a multiple of the block.
  void (*dequantize)(DType dtype, const void* row, int64_t n, float* out);

  // Vectors of n floats.
  float (*dot)(const float* a, const float* b, int64_t n);
  void (*axpy)(float alpha, const float* x, float* y, int64_t n);  // y += alpha · x
  void (*scale)(float alpha, float* x, int64_t n);                 // x *= alpha
  void (*add)(const float* a, const float* b, float* out, int64_t n);
  void (*add_squares)(const float* x, float* y, int64_t n);  // y += x²
  double (*sum_squares)(const float* x, int64_t n);
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t n);
  // Adds to dgate and dup; either may be null.
  void (*swiglu_grad)(const float* gate, const float* up, const float* dout, float* dgate, float* dup, int64_t n);

  // Softmax and sampling (simd_softmax.h says exactly what).
  float (*row_max)(const float* z, int64_t n, bool* unusable);
  int64_t (*find_above)(const float* z, int64_t begin, int64_t n, float threshold);
  double (*exp_sum)(const float* z, int64_t n, float shift, float factor);
  double (*exp_into)(const float* z, int64_t n, float shift, float* out);
  void (*shift_into)(const float* z, float shift, float* out, int64_t n);
  void (*softmax_grad_row)(const float* p, const float* g, float dot, float* dz, int64_t n);
  void (*scale_by_weight)(const float* x, float factor, const float* weight, float* out, int64_t n);

  // Attention (simd_attention.h). `next` are as many rows of the same width that are read after this call.
  void (*attention_scores)(const float* q, int64_t q_row, int64_t rows, const float* k, int64_t k_row, int64_t slots,
                           int64_t depth, float scale, const float* beta, float* s, int64_t s_row, NextRows next);
  void (*attention_values)(const float* p, int64_t p_row, int64_t rows, const float* v, int64_t v_row, int64_t slots,
                           int64_t width, float* o, int64_t o_row, NextRows next);
  float (*attention_row_softmax)(float* s, int64_t n, float* m, float* l);
  void (*attention_panel_softmax)(float* s, int64_t s_row, int64_t slots, int64_t columns, const float* beta,
                                  const int32_t* limit, float* m, float* l, float* factor);
  void (*attention_panel_grad)(float* s, float* dp, int64_t row, int64_t slots, int64_t columns, const float* beta,
                               const int32_t* limit, const float* lse, const float* delta, float* dbeta);
};

// Null where the compiler did not build the set.
const SimdTable* SimdV2();
const SimdTable* SimdAvx2();
const SimdTable* SimdAvx512();

// True if this machine (and its operating system) runs the set.
bool MachineHas(CpuIsa isa);
// The table of a set that the machine has; kAuto takes the best.
const SimdTable& FindSimd(CpuIsa isa);
// The table that a CPU backend was made with.
const SimdTable& SimdOf(Backend& backend);

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_SIMD_H_
