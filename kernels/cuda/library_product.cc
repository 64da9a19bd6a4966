#include "kernels/cuda/library_product.h"

#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/decompose_k_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kSuggestions = 16;
constexpr int64_t kAlign = 256;  // bytes: what cuBLAS's suggestions take for granted

// cuBLAS's name of a tile; 0: none that plans have (IsLibraryTile).
int TileId(int m, int n) {
  if (m == 64 && n == 32) return CUBLASLT_MATMUL_TILE_64x32;
  if (n != 64) return 0;
  switch (m) {
    case 64:
      return CUBLASLT_MATMUL_TILE_64x64;
    case 96:
      return CUBLASLT_MATMUL_TILE_96x64;
    case 112:
      return CUBLASLT_MATMUL_TILE_112x64;
    case 128:
      return CUBLASLT_MATMUL_TILE_128x64;
    case 144:
      return CUBLASLT_MATMUL_TILE_144x64;
    case 168:
      return CUBLASLT_MATMUL_TILE_168x64;
    default:
      return 0;
  }
}

cudaDataType TypeOf(bool bf16) { return bf16 ? CUDA_R_16BF : CUDA_R_32F; }
cublasOperation_t OperationOf(const MatrixOperand& operand) { return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

bool Aligned(const void* data, int64_t ld, int64_t batch_stride, bool bf16) {
  const int64_t bytes = bf16 ? 2 : 4;
  return reinterpret_cast<uintptr_t>(data) % kAlign == 0 && ld * bytes % kAlign == 0 &&
         batch_stride * bytes % kAlign == 0;
}

template <typename T>
void Set(cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t attribute, T value) {
  STILLHOUSE_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(of, attribute, &value, sizeof(value)));
}
template <typename T>
void Set(cublasLtMatrixLayout_t of, cublasLtMatrixLayoutAttribute_t attribute, T value) {
  STILLHOUSE_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(of, attribute, &value, sizeof(value)));
}
template <typename T>
void Set(cublasLtMatmulPreference_t of, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  STILLHOUSE_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(of, attribute, &value, sizeof(value)));
}

// What cublasLtMatmul is told of a product.
struct Description {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, c;

  explicit Description(const Product& p) {
    STILLHOUSE_CUBLAS_CHECK(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    Set(&operation, CUBLASLT_MATMUL_DESC_TRANSA, OperationOf(p.a));
    Set(&operation, CUBLASLT_MATMUL_DESC_TRANSB, OperationOf(p.b));
    const auto lay = [&](cublasLtMatrixLayout_t to, bool bf16, bool transposed, int64_t rows, int64_t columns,
                         int64_t ld, int64_t batch_stride) {
      STILLHOUSE_CUBLAS_CHECK(cublasLtMatrixLayoutInit(to, TypeOf(bf16),
                                                       static_cast<uint64_t>(transposed ? columns : rows),
                                                       static_cast<uint64_t>(transposed ? rows : columns), ld));
      Set(to, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(p.batch));
      Set(to, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, batch_stride);
    };
    lay(&a, p.bf16, p.a.transposed, p.m, p.k, p.a.ld, p.a.batch_stride);
    lay(&b, p.bf16, p.b.transposed, p.k, p.n, p.b.ld, p.b.batch_stride);
    lay(&c, p.c_bf16, false, p.m, p.n, p.ldc, p.c_batch_stride);
  }
};

// The first suggestion with the tile, or else the first, of those that need no workspace: K is not split.
std::optional<cublasLtMatmulAlgo_t> Suggestion(cublasLtHandle_t handle, Description& d, int tile) {
  cublasLtMatmulPreferenceOpaque_t preference;
  STILLHOUSE_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
  Set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, size_t{0});
  Set(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  std::vector<cublasLtMatmulHeuristicResult_t> found(kSuggestions);
  int count = 0;
  if (cublasLtMatmulAlgoGetHeuristic(handle, &d.operation, &d.a, &d.b, &d.c, &d.c, &preference, kSuggestions,
                                     found.data(), &count) != CUBLAS_STATUS_SUCCESS) {
    return std::nullopt;
  }
  std::optional<cublasLtMatmulAlgo_t> first;
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = found[static_cast<size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    int32_t id = 0;
    size_t written = 0;
    STILLHOUSE_CUBLAS_CHECK(
        cublasLtMatmulAlgoConfigGetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &id, sizeof(id), &written));
    if (id == tile) return result.algo;
    if (!first) first = result.algo;
  }
  return first;
}

}  // namespace

bool IsLibraryTile(int tile_m, int tile_n) { return (tile_m == 16 && tile_n == 16) || TileId(tile_n, tile_m) != 0; }

void Product::AskFor(const DecomposeKPlan& plan) {
  if (plan.way != DecomposeKWay::kLibrary) return;
  tile_m = plan.tile_n;
  tile_n = plan.tile_m;
}

bool LibraryTiles::Run(cublasLtHandle_t handle, cudaStream_t stream, const Product& p) {
  const int tile = TileId(p.tile_m, p.tile_n);
  if (tile == 0 || !Aligned(p.a.data, p.a.ld, p.a.batch_stride, p.bf16) ||
      !Aligned(p.b.data, p.b.ld, p.b.batch_stride, p.bf16) || !Aligned(p.c, p.ldc, p.c_batch_stride, p.c_bf16)) {
    return false;
  }
  Description d(p);
  const Key key{p.m, p.n, p.k, p.batch, p.a.ld, p.b.ld, p.ldc, tile, p.bf16, p.c_bf16, p.a.transposed, p.b.transposed};
  auto found = algorithms_.find(key);
  if (found == algorithms_.end()) found = algorithms_.emplace(key, Suggestion(handle, d, tile)).first;
  if (!found->second) return false;
  STILLHOUSE_CUBLAS_CHECK(cublasLtMatmul(handle, &d.operation, &p.alpha, p.a.data, &d.a, p.b.data, &d.b, &p.beta, p.c,
                                         &d.c, p.c, &d.c, &*found->second, nullptr, 0, stream));
  return true;
}

void RunProduct(Backend& backend, const Product& p) {
  Device& device = DeviceOf(backend);
  device.WithCublas([&](cublasHandle_t handle) {
    // A handle of the one is a handle of the other.
    if (p.tile_m > 0 && device.library_tiles().Run(reinterpret_cast<cublasLtHandle_t>(handle), device.Use(), p)) return;
    const cublasOperation_t ta = OperationOf(p.a), tb = OperationOf(p.b);
    const cudaDataType type = TypeOf(p.bf16), c_type = TypeOf(p.c_bf16);
    if (p.batch == 1) {
      STILLHOUSE_CUBLAS_CHECK(cublasGemmEx_64(handle, ta, tb, p.m, p.n, p.k, &p.alpha, p.a.data, type, p.a.ld, p.b.data,
                                              type, p.b.ld, &p.beta, p.c, c_type, p.ldc, CUBLAS_COMPUTE_32F,
                                              CUBLAS_GEMM_DEFAULT));
    } else {
      STILLHOUSE_CUBLAS_CHECK(cublasGemmStridedBatchedEx_64(
          handle, ta, tb, p.m, p.n, p.k, &p.alpha, p.a.data, type, p.a.ld, p.a.batch_stride, p.b.data, type, p.b.ld,
          p.b.batch_stride, &p.beta, p.c, c_type, p.ldc, p.c_batch_stride, p.batch, CUBLAS_COMPUTE_32F,
          CUBLAS_GEMM_DEFAULT));
    }
  });
}

}  // namespace stillhouse::cuda
