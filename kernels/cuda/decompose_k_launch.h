// Launches of decompose-K (kernels/ops/decompose_k.h).
#ifndef STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "kernels/plan/decompose_k_plan.h"

namespace stillhouse::cuda {

enum class ElementOp : uint8_t { kNone, kRelu, kSilu, kSigmoid, kScaleBias };
enum class RowOp : uint8_t { kSoftmax, kTopK, kSinkhorn };

// What a plan that is chosen by shape is to be; kOneLaunch only where all blocks run at once.
enum class DecomposeKCut : uint8_t { kAny, kTwoLaunches, kCluster, kOneLaunch };

struct Operand {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t stride_outer = 0;  // from row to row of A, from column to column of B
  int64_t stride_k = 0;
};

struct DecomposeKShape {
  Operand a, b;
  int64_t m = 0, n = 0, k = 0;
  ElementOp op = ElementOp::kNone;
  float scale = 1.0f;
  const float* bias = nullptr;  // [n] or null
  float* out = nullptr;         // [m, n]
  int64_t out_stride = 0;       // elements, from row to row
  bool add = false;             // to what is in `out`
  // B is a weight: no kernel that may still run when the product is launched writes it.
  bool constant_b = false;
};

struct DecomposeKRows {
  RowOp op = RowOp::kSoftmax;
  int32_t top_k = 0;
  float* top_values = nullptr;  // [m, top_k]
  int32_t* top_ids = nullptr;
  int32_t sinkhorn_n = 0, sinkhorn_rounds = 0;
  float sinkhorn_eps = 0.0f;
};

// Whether a plan may ask cuBLAS for this tile; 16 x 16: all is left to cuBLAS.
bool IsLibraryTile(int tile_m, int tile_n);
// Whether cuBLAS can read the operands as they lie.
bool CanUseLibrary(const DecomposeKShape& shape);
DecomposeKPlan ChooseDecomposeKPlan(const DecomposeKShape& shape, int multiprocessors, bool rows, int splits,
                                    DecomposeKCut cut);
bool TakesTensorCores(const DecomposeKShape& shape);
// Bytes of the buffer that kExchange's sums pass through, empty before and after (device/exchange.cuh).
inline constexpr int64_t kExchangeBytes = int64_t{4} << 20;
// Whether the plan can run this product: tiles that exist, operands that it can read, slices that K has.
bool CanRun(const DecomposeKShape& shape, const DecomposeKPlan& plan, bool rows, int multiprocessors);
// What is worth timing for this product (kernels/plan): all can run; of no more than kMostSlices slices each.
inline constexpr int kMostSlices = 512;
std::vector<DecomposeKPlan> DecomposeKCandidates(const DecomposeKShape& shape, int multiprocessors, bool rows);

// Partials are floats [splits, m, n]; none for a cluster, and kExchange's are the buffer of device/exchange.cuh.
int64_t DecomposeKScratch(const DecomposeKShape& shape, const DecomposeKPlan& plan);
// With kLibrary, `partials` hold the slices already. `rows` is null for the epilogues of single elements.
void LaunchDecomposeK(const DecomposeKShape& shape, const DecomposeKPlan& plan, const DecomposeKRows* rows,
                      float* partials, cudaStream_t stream);

// Whether a cluster's blocks take operands straight from memory: small tiles, and what cannot be copied in 16 bytes.
bool FromMemory(const DecomposeKShape& shape, const DecomposeKPlan& plan);

// kFragments, and kCluster from memory (decompose_k.cu): whether there is such a tile and K has so many slices; and
// what a warp takes of K at a time.
bool CanFragments(const DecomposeKShape& shape, const DecomposeKPlan& plan);
int64_t ChunksOf(const DecomposeKShape& shape);

// kSlices (decompose_k_slices.cu): whether operands lie so that 16 bytes can be copied at a time, whether there is such
// a tile, how many slices come of asking for `splits`, and the launches. Without partials the one slice finishes
// elements.
bool CanSlice(const DecomposeKShape& shape);
// Whether B is read along N, else along K.
bool AcrossN(const DecomposeKShape& shape);
bool HasSliceTile(int tile_m, int tile_n);
int SlicesOf(int64_t k, int splits);
// Whether kExchange can run it: blocks that wait for each other must all run at once.
bool CanExchange(const DecomposeKShape& shape, const DecomposeKPlan& plan, int multiprocessors);
void LaunchSlices(const DecomposeKShape& shape, const DecomposeKPlan& plan, float* partials, cudaStream_t stream);
void LaunchReduceSlices(const DecomposeKShape& shape, const DecomposeKPlan& plan, const float* partials,
                        cudaStream_t stream);

// kWarpgroups (decompose_k_warpgroups.cu): whether it can run it (operands that CanSlice takes and the copy engine too,
// slices that fit), how many blocks share a tile, and the launch. Without partials the one slice finishes elements.
bool CanWarpgroups(const DecomposeKShape& shape, const DecomposeKPlan& plan);
int WarpgroupBlocks(const DecomposeKPlan& plan);
void LaunchWarpgroups(const DecomposeKShape& shape, const DecomposeKPlan& plan, float* partials, cudaStream_t stream);
// kWide (wide_product_launch.h) as the shape of a product suggests it; `slices` may be left to what follows. False:
// another way.
bool ChooseWide(const DecomposeKShape& shape, int multiprocessors, bool slices, DecomposeKPlan* plan);

// The first of a way's two launches, which leaves slices; null: the way has none.
using LaunchOfSlices = void (*)(const DecomposeKShape&, const DecomposeKPlan&, float* partials, cudaStream_t);
LaunchOfSlices SlicesLaunch(DecomposeKWay way);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DECOMPOSE_K_LAUNCH_H_
