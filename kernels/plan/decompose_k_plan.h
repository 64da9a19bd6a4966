// A way to run a product of decompose-K (kernels/ops/decompose_k.h) on a GPU.
#ifndef STILLHOUSE_KERNELS_PLAN_DECOMPOSE_K_PLAN_H_
#define STILLHOUSE_KERNELS_PLAN_DECOMPOSE_K_PLAN_H_

#include <cstdint>

namespace stillhouse {

enum class DecomposeKWay : uint8_t {
  kSlices,      // slices of K through shared memory, then a reducer (none for a single slice)
  kFragments,   // slices of K from memory to registers, any operands, then a reducer
  kCluster,     // one launch: the slices are a cluster's blocks; splits is a power of two, at most 16
  kExchange,    // one launch, as kSlices: its blocks, one a multiprocessor, leave each other their sums in memory
  kWarpgroups,  // as kSlices, by warpgroups from what the copy engine brings; sides of 64, 128 or 256
  kLibrary,     // cuBLAS, its slices a batch; then a reducer, or what becomes of the product
  kSkinny,      // at most 16 rows times a weight (skinny.cu), with what follows where the kernel has it
  kWide,        // at most 128 rows times a large weight (wide_product.cu); tiles of 64x64 to 64x256, in steps of 32
};

struct DecomposeKPlan {
  DecomposeKWay way = DecomposeKWay::kFragments;
  // The output's tile of a block. kLibrary: 16 x 16 leaves all to cuBLAS, which may split K further; for others it is
  // asked, and takes K (or a slice) as a whole. kWarpgroups: tiles larger than 128 x 64 are a cluster's, and 64 x 128.
  int tile_m = 16, tile_n = 16;
  int splits = 1;  // slices of K

  friend bool operator==(const DecomposeKPlan&, const DecomposeKPlan&) = default;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_PLAN_DECOMPOSE_K_PLAN_H_
