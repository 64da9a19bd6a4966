// Prefix sums.
#ifndef STILLHOUSE_KERNELS_OPS_SCAN_H_
#define STILLHOUSE_KERNELS_OPS_SCAN_H_

#include <cstdint>

#include "kernels/ops/context.h"

namespace stillhouse {

// How a backend adds up; `kAuto` is its best. The CPU has one way and takes any name for it.
//
// Hierarchical: every block scans a tile, the tiles' totals are scanned in the same way (as many levels as it takes),
// and are added. Kogge & Stone 1973 and Brent & Kung 1982 are the networks within a block; "coarsened" has each thread
// add eight neighbours first.
//
// Single pass: a tile's prefix comes from the tiles before it, which publish what they have. All blocks run at once and
// take tiles in turn, so that a tile only ever waits for one that is being worked on. Domino waits for its neighbour's
// prefix; look-back (Merrill & Garland 2016) adds up neighbours' totals until it meets a prefix, one at a time or a
// warp's window at a time; the tree adds totals of tiles, of groups of 32 tiles and of groups of 32 groups, always in
// the same order. Pipeline has every block add up all totals before its tiles itself, in the same order, while its
// other warps bring, sum and write neighbouring tiles. Resident adds up likewise where every tile can have a block of
// its own at once that holds it in registers (4 Mi floats on 132 multiprocessors; more go through the pipeline). Totals
// first reads twice: sums of tiles, then the scan.
enum class ScanAlgorithm : uint8_t {
  kAuto,
  kKoggeStone,
  kKoggeStoneDoubleBuffered,
  kKoggeStoneCoarsened,
  kBrentKung,
  kBrentKungCoarsened,
  kWarpTiled,
  kWarpTiledCoarsened,
  kDomino,
  kLookBack,
  kLookBackWindow,
  kTree,
  kPipeline,
  kResident,
  kTotalsFirst,
};

struct ScanOptions {
  bool exclusive = false;  // out[i] is the sum before i
  // Floats: the same bits in every run. Look-back is not: with it, kAuto and this flag choose another way; named
  // explicitly it is a CHECK failure.
  bool deterministic = true;
  ScanAlgorithm algorithm = ScanAlgorithm::kAuto;
};

// Sums along the last dimension of f32, i32 or i64 [N] or [R, N] (elements of a row contiguous, rows of `in` may be
// strided), every row for itself. heads: u8 of the same shape, contiguous, or empty; a nonzero one starts a new
// segment: the sum begins anew with that element. Floats add in fp32 on CUDA, in fp64 rounded once on the CPU; integers
// wrap around. Not differentiated.
struct ScanArgs {
  Tensor in, heads, out;  // out: contiguous
  ScanOptions options;
};
Tensor Scan(const Context& ctx, const Tensor& in, const ScanOptions& options = {}, const Tensor& heads = Tensor());

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_SCAN_H_
