// Launches of the scans (kernels/ops/scan.h).
#ifndef STILLHOUSE_KERNELS_CUDA_SCAN_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_SCAN_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

enum class ScanElement : uint8_t { kFloat, kInt32, kInt64 };

// The networks within a block, and how a tile of a single pass learns its prefix.
enum class BlockNetwork : uint8_t { kKoggeStone, kKoggeStoneDoubleBuffered, kBrentKung, kWarpTiled };
enum class TilePrefix : uint8_t { kDomino, kLookBack, kLookBackWindow, kTree };

struct ScanShape {
  ScanElement element = ScanElement::kFloat;
  const void* in = nullptr;
  int64_t in_stride = 0;           // elements from row to row
  const uint8_t* heads = nullptr;  // [rows, n] or null
  void* out = nullptr;             // [rows, n]
  int64_t rows = 0, n = 0;
  bool exclusive = false;
};

// Each takes scratch of at least so many bytes (aligned to 16), of any contents.
int64_t HierarchicalScanScratch(const ScanShape& shape, bool coarsened);
void LaunchHierarchicalScan(const ScanShape& shape, BlockNetwork network, bool coarsened, void* scratch,
                            cudaStream_t stream);
int64_t SinglePassScanScratch(const ScanShape& shape);
void LaunchSinglePassScan(const ScanShape& shape, TilePrefix prefix, void* scratch, cudaStream_t stream);
// Totals of tiles, then the scan: two launches that overlap, for inputs that the L2 cache holds. The same scratch.
void LaunchTotalsFirstScan(const ScanShape& shape, void* scratch, cudaStream_t stream);
// A single pass whose steps overlap (scan_pipeline.cu); floats repeat their bits.
int64_t PipelineScanScratch(const ScanShape& shape);
void LaunchPipelineScan(const ScanShape& shape, void* scratch, cudaStream_t stream);
// A block a tile, where all run at once (FitsResident); floats repeat their bits.
bool FitsResident(const ScanShape& shape);
int64_t ResidentScanScratch(const ScanShape& shape);
void LaunchResidentScan(const ScanShape& shape, void* scratch, cudaStream_t stream);
// Zeros; `bytes` a multiple of 16. What is launched early after it starts when all before it has ended.
void LaunchEmptyScanWords(void* words, int64_t bytes, cudaStream_t stream);
// Short rows, one warp each, and no scratch.
bool FitsWarpPerRow(const ScanShape& shape);
void LaunchWarpPerRowScan(const ScanShape& shape, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SCAN_LAUNCH_H_
