// Which ways can run a product of decompose-K, and which one its shape suggests.
#include <algorithm>

#include "kernels/cuda/decompose_k_launch.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/wide_product_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kMaxCluster = 16;
constexpr int64_t kLibrary = int64_t{1} << 27;  // products (m·n·k) from which cuBLAS is faster than threads that copy
constexpr int64_t kMostOutputs = int64_t{1} << 16;  // of warpgroups: more make too many partials

// Slices of at least two stages where warpgroups have work: a block for every second multiprocessor, as measured, or
// for nearly each where the slices would be too long: blocks of a cluster lie in one part of the GPU, so that few sizes
// fill it. Clusters for more than 64 rows: fewer are not bound by what is read. False: another way.
bool ChooseWarpgroups(const DecomposeKShape& s, int multiprocessors, bool rows, int splits, DecomposeKPlan* plan) {
  // One row of a weight is read before the kernel ahead has ended: by few instructions, here.
  const bool row = s.m == 1 && !rows && s.constant_b && s.n > 128 && s.n <= 256;
  if (!CanSlice(s) || (s.m <= 32 && !row) || s.n <= 32 || s.m * s.n > kMostOutputs) return false;
  const auto side = [](int64_t x) { return x <= 64 ? 64 : x <= 128 ? 128 : 256; };
  DecomposeKPlan chosen{DecomposeKWay::kWarpgroups, side(s.m), row || s.m > 64 ? side(s.n) : 64, splits};
  const int64_t blocks = CeilDiv(s.m, chosen.tile_m) * CeilDiv(s.n, chosen.tile_n) * WarpgroupBlocks(chosen);
  const int64_t most = CeilDiv(s.k, 128), half = multiprocessors / 2, nearly = multiprocessors - multiprocessors / 8;
  for (int64_t fill : {row ? nearly : half, nearly}) {
    if (splits == 0) chosen.splits = SlicesOf(s.k, static_cast<int>(std::min(fill / blocks, most)));
    if (!CanWarpgroups(s, chosen)) continue;
    *plan = chosen;
    return true;
  }
  return false;
}

// What a block of wide_product.cu moves, in rows of the weight of a stage: with slices, also what they are written and
// read again for, which takes the longer for coming all at once.
int64_t WideCost(const DecomposeKShape& s, int multiprocessors, const DecomposeKPlan& plan) {
  constexpr int64_t kDepth = 64, kSums = 16;
  const int64_t rows = CeilDiv(s.m, plan.tile_m) * plan.tile_m;
  const int64_t work = CeilDiv(s.n, plan.tile_n) * plan.splits, rounds = CeilDiv(work, multiprocessors);
  const int64_t sums = plan.splits > 1 ? kSums * plan.tile_n * rows / plan.tile_m : 0;
  return rounds * ((plan.tile_n + rows) * CeilDiv(CeilDiv(s.k, kDepth), plan.splits) + sums);
}

// About one block a multiprocessor, or for every second one where a tile is all there is and A is no row, in slices of
// at least two stages.
DecomposeKPlan ChooseSlices(const DecomposeKShape& s, int multiprocessors, bool rows, int splits, DecomposeKCut cut) {
  const bool cluster = cut == DecomposeKCut::kCluster;
  DecomposeKPlan plan;
  plan.way = cluster ? DecomposeKWay::kCluster : DecomposeKWay::kSlices;
  plan.tile_m = s.m <= 16 ? 16 : 32;
  // Tiles of one row read nothing but B: wide ones, of more slices.
  const bool wide = s.n > 32 && (plan.tile_m == 32 || (s.m == 1 && !rows));
  plan.tile_n = wide ? 64 : plan.tile_m == 32 || s.n > 16 ? 32 : 16;
  const int64_t tiles = CeilDiv(s.m, plan.tile_m) * CeilDiv(s.n, plan.tile_n);
  const int64_t most = CeilDiv(s.k, 128), fill = tiles == 1 && s.m > 1 ? multiprocessors / 2 : multiprocessors / tiles;
  const int64_t wanted = splits > 0 ? splits : fill < most ? fill : most;
  plan.splits = SlicesOf(s.k, static_cast<int>(wanted));
  if (cluster) {
    // A power of two that cuts K into as many slices as it says: 1 at last.
    int size = plan.splits < kMaxCluster ? plan.splits : kMaxCluster;
    while ((size & (size - 1)) != 0 || SlicesOf(s.k, size) != size) --size;
    plan.splits = size;
  } else if (cut == DecomposeKCut::kOneLaunch) {
    plan.way = DecomposeKWay::kExchange;
    while (plan.splits > 1 && !CanExchange(s, plan, multiprocessors)) plan.splits = SlicesOf(s.k, plan.splits - 1);
    if (plan.splits == 1) plan.way = DecomposeKWay::kSlices;
  }
  return plan;
}

}  // namespace

bool ChooseWide(const DecomposeKShape& s, int multiprocessors, bool slices, DecomposeKPlan* plan) {
  constexpr int64_t kLeastWeight = int64_t{8} << 20;  // elements: smaller ones take as long as their latencies
  constexpr int64_t kShortest = 512;                  // of K, in a slice
  if (s.m <= 16 || s.n * s.k < kLeastWeight) return false;
  int64_t least = 0;
  for (int tile_n = kLeastWideTile; tile_n <= kMostWideTile; tile_n += kWideTileStep) {
    const int64_t most = slices ? multiprocessors / CeilDiv(s.n, tile_n) : 1;
    for (int splits = 1; splits == 1 || (splits <= most && s.k / splits >= kShortest); ++splits) {
      const DecomposeKPlan chosen{DecomposeKWay::kWide, 64, tile_n, splits};
      const int64_t cost = WideCost(s, multiprocessors, chosen);
      if ((least > 0 && cost >= least) || !CanWide(s, chosen)) continue;
      least = cost;
      *plan = chosen;
    }
  }
  return least > 0;
}

LaunchOfSlices SlicesLaunch(DecomposeKWay way) {
  switch (way) {
    case DecomposeKWay::kSlices:
      return LaunchSlices;
    case DecomposeKWay::kWarpgroups:
      return LaunchWarpgroups;
    case DecomposeKWay::kWide:
      return LaunchWide;
    default:
      return nullptr;
  }
}

bool TakesTensorCores(const DecomposeKShape& s) { return s.a.bf16 && s.b.bf16; }

int64_t DecomposeKScratch(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  if (plan.way == DecomposeKWay::kCluster || plan.way == DecomposeKWay::kExchange) return 0;
  return plan.splits * s.m * s.n;
}

bool FromMemory(const DecomposeKShape& s, const DecomposeKPlan& plan) {
  return !CanSlice(s) || plan.tile_m * plan.tile_n <= 512;
}

DecomposeKPlan ChooseDecomposeKPlan(const DecomposeKShape& s, int multiprocessors, bool rows, int splits,
                                    DecomposeKCut cut) {
  const bool tensor = TakesTensorCores(s);
  if (cut != DecomposeKCut::kAny && (!tensor || rows)) cut = DecomposeKCut::kTwoLaunches;
  const bool cluster = cut == DecomposeKCut::kCluster;
  const bool two = cut == DecomposeKCut::kAny || cut == DecomposeKCut::kTwoLaunches;
  DecomposeKPlan plan;
  if (two && ChooseWarpgroups(s, multiprocessors, rows, splits, &plan)) return plan;
  // Larger products are a library's.
  if (cut == DecomposeKCut::kAny && splits == 0 && CanUseLibrary(s) && s.m * s.n * s.k > kLibrary) {
    return {DecomposeKWay::kLibrary, 16, 16, 1};
  }
  if (CanSlice(s)) return ChooseSlices(s, multiprocessors, rows, splits, cut);
  plan.way = cluster ? DecomposeKWay::kCluster : DecomposeKWay::kFragments;
  if (tensor && s.m > 16) plan.tile_m = plan.tile_n = 32;
  const int64_t tiles = CeilDiv(s.m, plan.tile_m) * CeilDiv(s.n, plan.tile_n);
  int64_t wanted = splits > 0 ? splits : multiprocessors / tiles;
  if (!cluster && splits == 0) wanted = wanted < 32 ? wanted : 32;
  const int64_t most = cluster ? kMaxCluster : 4 * multiprocessors;
  wanted = wanted < most ? wanted : most;
  wanted = wanted < ChunksOf(s) ? wanted : ChunksOf(s);
  plan.splits = static_cast<int>(wanted > 1 ? wanted : 1);
  if (cluster) {
    while (plan.splits & (plan.splits - 1)) plan.splits &= plan.splits - 1;
  }
  return plan;
}

bool CanRun(const DecomposeKShape& s, const DecomposeKPlan& plan, bool rows, int multiprocessors) {
  if (plan.splits < 1) return false;
  switch (plan.way) {
    case DecomposeKWay::kSlices:
      return CanSlice(s) && HasSliceTile(plan.tile_m, plan.tile_n) && SlicesOf(s.k, plan.splits) == plan.splits;
    case DecomposeKWay::kFragments:
      return CanFragments(s, plan);
    case DecomposeKWay::kCluster:
      if (!TakesTensorCores(s) || rows || plan.splits > kMaxCluster || (plan.splits & (plan.splits - 1)) != 0) {
        return false;
      }
      return FromMemory(s, plan) ? CanFragments(s, plan)
                                 : HasSliceTile(plan.tile_m, plan.tile_n) && SlicesOf(s.k, plan.splits) == plan.splits;
    case DecomposeKWay::kExchange:
      return !rows && CanExchange(s, plan, multiprocessors);
    case DecomposeKWay::kWarpgroups:
      return CanWarpgroups(s, plan);
    case DecomposeKWay::kLibrary:
      // Slices begin where 16 bytes can be read at once.
      return CanUseLibrary(s) && IsLibraryTile(plan.tile_m, plan.tile_n) &&
             (plan.splits == 1 || s.k % (8 * plan.splits) == 0);
    case DecomposeKWay::kWide:
      return CanWide(s, plan);
    case DecomposeKWay::kSkinny:
      return false;
  }
  return false;
}

std::vector<DecomposeKPlan> DecomposeKCandidates(const DecomposeKShape& s, int multiprocessors, bool rows) {
  constexpr int kSides[] = {64, 128, 256};  // of warpgroups' tiles
  constexpr int kTiles[][2] = {{16, 16}, {16, 32}, {16, 64}, {32, 32}, {32, 64}, {64, 32}, {64, 64}, {128, 64}};
  std::vector<DecomposeKPlan> plans;
  const auto offer = [&](const DecomposeKPlan& plan) {
    for (const DecomposeKPlan& p : plans) {
      if (p == plan) return;
    }
    if (CanRun(s, plan, rows, multiprocessors)) plans.push_back(plan);
  };
  for (int splits = 1; splits <= 8 && (splits == 1 || s.k / splits >= 512); ++splits) {
    offer({DecomposeKWay::kLibrary, 16, 16, splits});
    if (s.m <= 32 || s.m > 64) continue;
    offer({DecomposeKWay::kLibrary, 32, 64, splits});
    for (const int tile_n : {64, 96, 112, 128, 144, 168}) offer({DecomposeKWay::kLibrary, 64, tile_n, splits});
  }
  for (const int tile_m : kSides) {
    for (const int tile_n : kSides) {
      if ((tile_m > 64 && tile_m >= 2 * s.m) || (tile_n > 64 && tile_n >= 2 * s.n)) continue;
      DecomposeKPlan plan{DecomposeKWay::kWarpgroups, tile_m, tile_n, 1};
      const int64_t each = CeilDiv(s.m, tile_m) * CeilDiv(s.n, tile_n) * WarpgroupBlocks(plan);
      for (int64_t blocks = multiprocessors / 2; blocks <= 4 * multiprocessors; blocks += multiprocessors / 4) {
        // One fewer, too: a cluster may not fit where so many blocks do.
        for (const int64_t splits : {blocks / each, blocks / each - 1}) {
          if (splits < 1 || splits > kMostSlices) continue;
          plan.splits = SlicesOf(s.k, static_cast<int>(splits));
          offer(plan);
        }
      }
    }
  }
  for (int tile_n = kLeastWideTile; s.constant_b && s.m > 16 && tile_n <= kMostWideTile; tile_n += kWideTileStep) {
    // A block for each multiprocessor, or for most.
    const int64_t tiles = CeilDiv(s.n, tile_n), most = std::max<int64_t>(1, multiprocessors / tiles);
    for (int64_t splits = most; splits > 0 && splits * tiles * 4 >= multiprocessors * 3; --splits) {
      offer({DecomposeKWay::kWide, 64, tile_n, static_cast<int>(splits)});
    }
  }
  for (const auto& [tile_m, tile_n] : kTiles) {
    // A tile twice as tall as the rows, or more, only moves zeros.
    if (tile_m > 16 && tile_m >= 2 * s.m) continue;
    const int64_t tiles = CeilDiv(s.m, tile_m) * CeilDiv(s.n, tile_n);
    // From half a block a multiprocessor to four.
    for (int64_t blocks = multiprocessors / 2; blocks <= 4 * multiprocessors; blocks += multiprocessors / 4) {
      const int64_t splits = blocks / tiles;
      if (splits < 1 || splits > kMostSlices) continue;
      offer({DecomposeKWay::kSlices, tile_m, tile_n, SlicesOf(s.k, static_cast<int>(splits))});
      if (!CanSlice(s)) offer({DecomposeKWay::kFragments, tile_m, tile_n, static_cast<int>(splits)});
    }
    if (tile_m * tile_n <= 512) {
      // A chunk, two or four for each of 16 warps.
      for (int64_t each = 16; each <= 64; each *= 2) {
        const int64_t splits = CeilDiv(ChunksOf(s), each);
        if (splits * tiles > 4 * multiprocessors) continue;
        offer({DecomposeKWay::kFragments, tile_m, tile_n, static_cast<int>(splits)});
      }
    }
    // One launch: as many slices as blocks fit at once, and powers of two below.
    offer({DecomposeKWay::kExchange, tile_m, tile_n, SlicesOf(s.k, static_cast<int>(multiprocessors / tiles))});
    for (int splits = 2; splits * tiles <= multiprocessors; splits *= 2) {
      if (splits * tiles * 4 >= multiprocessors) {
        offer({DecomposeKWay::kExchange, tile_m, tile_n, SlicesOf(s.k, splits)});
      }
    }
    for (int splits : {4, 8, 16}) {
      if (splits * tiles <= 2 * multiprocessors && splits * tiles >= 8)
        offer({DecomposeKWay::kCluster, tile_m, tile_n, splits});
    }
    // One slice adds up all of K one after the other: exact enough only where it is short.
    if (s.k <= 4096) offer({CanSlice(s) ? DecomposeKWay::kSlices : DecomposeKWay::kFragments, tile_m, tile_n, 1});
  }
  return plans;
}

bool CanUseLibrary(const DecomposeKShape& s) {
  const bool a = s.a.stride_k == 1 && s.a.stride_outer >= s.k;
  const bool b_columns = s.b.stride_k == 1 && s.b.stride_outer >= s.k;
  const bool b_rows = s.b.stride_outer == 1 && s.b.stride_k >= s.n;
  return TakesTensorCores(s) && s.k > 0 && a && (b_columns || b_rows);
}

}  // namespace stillhouse::cuda
