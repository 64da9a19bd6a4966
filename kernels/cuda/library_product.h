// Products by cuBLAS.
#ifndef STILLHOUSE_KERNELS_CUDA_LIBRARY_PRODUCT_H_
#define STILLHOUSE_KERNELS_CUDA_LIBRARY_PRODUCT_H_

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "kernels/ops/context.h"
#include "kernels/plan/decompose_k_plan.h"

namespace stillhouse::cuda {

// A matrix as cuBLAS sees one: column-major, so that a row-major matrix is its own transpose.
struct MatrixOperand {
  const void* data;
  int64_t ld;
  bool transposed = false;
  int64_t batch_stride = 0;
};

// C [m, n] = alpha · op(A) [m, k] · op(B) [k, n] + beta · C, all column-major; A and B of one type, C f32, or bf16
// where they are.
struct Product {
  int64_t m, n, k;
  MatrixOperand a, b;
  void* c;
  int64_t ldc;
  int64_t c_batch_stride = 0;
  int64_t batch = 1;
  float alpha = 1.0f, beta = 0.0f;
  bool bf16 = false, c_bf16 = false;
  // Of C: the tile that is taken if cuBLAS suggests it for this product, with K as a whole. 0: all is left to cuBLAS.
  int tile_m = 0, tile_n = 0;

  // The tile of a plan for rows (B) times a weight (A).
  void AskFor(const DecomposeKPlan& plan);
};
void RunProduct(Backend& backend, const Product& product);

// Which algorithm cuBLAS suggests for a product and a tile, by shape. The device's; used under its cuBLAS lock.
class LibraryTiles {
 public:
  // False where there is none, or the operands do not lie at multiples of 256 bytes, as is asked for.
  bool Run(cublasLtHandle_t handle, cudaStream_t stream, const Product& product);

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, bool, bool, bool>;
  std::map<Key, std::optional<cublasLtMatmulAlgo_t>> algorithms_;
};

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_LIBRARY_PRODUCT_H_
