// Products of small matrices over a long K, cut along K into independent partial products, with what follows them.
#ifndef STILLHOUSE_KERNELS_OPS_DECOMPOSE_K_H_
#define STILLHOUSE_KERNELS_OPS_DECOMPOSE_K_H_

#include <cstdint>

#include "kernels/ops/context.h"

namespace stillhouse {

// What becomes of an element, or a row, of A · B.
enum class Epilogue : uint8_t {
  kNone,
  kRelu,
  kSilu,
  kSigmoid,
  kScaleBias,  // scale · c + bias[n]
  kSoftmax,    // over a row
  kTopK,       // the row's `top_k` largest, best first, ties to the lower n
  kSinkhorn,   // the last n² columns of a row are an n × n matrix: exp, then `rounds` times columns and rows to sum 1
};

// How the work is cut. Both give the same bits in every run; they need not give each other's.
enum class DecomposeKDesign : uint8_t {
  kAuto,
  kTwoLaunches,  // partial products [S, M, N] in memory, then a reducer over flat elements, or rows
  kCluster,      // one launch: the slices of K are a cluster's blocks, which add up through shared memory
  kExchange,     // one launch: blocks leave each other their sums in memory, where all of them run at once
};

struct DecomposeKOptions {
  Epilogue epilogue = Epilogue::kNone;
  float scale = 1.0f;  // kScaleBias
  int32_t top_k = 0;   // kTopK, at most 64
  int32_t sinkhorn_n = 0;
  int32_t sinkhorn_rounds = 20;
  float sinkhorn_eps = 1e-6f;  // added to every sum that divides
  // Left alone, chosen by shape. The designs of one launch have the epilogues of single elements only.
  DecomposeKDesign design = DecomposeKDesign::kAuto;
  int32_t splits = 0;  // slices of K; 0: chosen
  // b is a weight, which nothing that may still run when the op is called writes: a kernel may read it ahead of time.
  bool constant_b = false;
};

// out = epilogue(A · B). a f32 or bf16 [M, K] and b f32 or bf16 [K, N], any strides (a weight [N, K] is transposed,
// every second row is a view); bias f32 [N] (kScaleBias); out f32 [M, N], contiguous (kTopK: empty). N ≤ 1024 where the
// epilogue is over rows. Products of the operands' exact values, sums in fp32 in a fixed order: no atomics, the same
// bits in every run. Not differentiated.
struct DecomposeKArgs {
  Tensor a, b, bias, out;
  Tensor top_values, top_ids;  // kTopK: f32 and i32 [M, top_k]
  DecomposeKOptions options;
};
Tensor DecomposeK(const Context& ctx, const Tensor& a, const Tensor& b, const DecomposeKOptions& options = {},
                  const Tensor& bias = Tensor());

struct TopKOfRows {
  Tensor values, ids;
};
TopKOfRows DecomposeKTopK(const Context& ctx, const Tensor& a, const Tensor& b, int32_t k);

inline bool OverRows(Epilogue epilogue) {
  return epilogue == Epilogue::kSoftmax || epilogue == Epilogue::kTopK || epilogue == Epilogue::kSinkhorn;
}

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_DECOMPOSE_K_H_
