#include "kernels/ops/scan.h"

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/scan_launch.h"

namespace stillhouse::cuda {
namespace {

ScanShape ShapeOf(const ScanArgs& args) {
  ScanShape shape;
  shape.element = args.in.dtype() == DType::kF32   ? ScanElement::kFloat
                  : args.in.dtype() == DType::kI32 ? ScanElement::kInt32
                                                   : ScanElement::kInt64;
  const bool matrix = args.in.rank() == 2;
  shape.in = args.in.raw();
  shape.rows = matrix ? args.in.dim(0) : 1;
  shape.n = args.in.dim(-1);
  shape.in_stride = matrix ? args.in.stride(0) : shape.n;
  if (args.heads) shape.heads = args.heads.data<uint8_t>();
  STILLHOUSE_CHECK(args.out.contiguous()) << args.out.DebugString();
  shape.out = args.out.raw();
  shape.exclusive = args.options.exclusive;
  return shape;
}

Tensor Scratch(Backend& backend, int64_t bytes) { return Tensor::Empty(backend.pool(), DType::kU8, {bytes}); }

void SinglePass(Backend& backend, const ScanShape& shape, TilePrefix prefix) {
  const Tensor scratch = Scratch(backend, SinglePassScanScratch(shape));
  LaunchSinglePassScan(shape, prefix, scratch.raw(), StreamOf(backend));
}

void TotalsFirst(Backend& backend, const ScanShape& shape) {
  const Tensor scratch = Scratch(backend, SinglePassScanScratch(shape));
  LaunchTotalsFirstScan(shape, scratch.raw(), StreamOf(backend));
}

void Pipeline(Backend& backend, const ScanShape& shape) {
  const Tensor scratch = Scratch(backend, PipelineScanScratch(shape));
  LaunchPipelineScan(shape, scratch.raw(), StreamOf(backend));
}

void Resident(Backend& backend, const ScanShape& shape) {
  if (!FitsResident(shape)) return Pipeline(backend, shape);
  const Tensor scratch = Scratch(backend, ResidentScanScratch(shape));
  LaunchResidentScan(shape, scratch.raw(), StreamOf(backend));
}

void Hierarchical(Backend& backend, const ScanShape& shape, BlockNetwork network, bool coarsened) {
  const Tensor scratch = Scratch(backend, HierarchicalScanScratch(shape, coarsened));
  LaunchHierarchicalScan(shape, network, coarsened, scratch.raw(), StreamOf(backend));
}

}  // namespace

void Scan(Backend& backend, const ScanArgs& args) {
  const ScanShape shape = ShapeOf(args);
  switch (args.options.algorithm) {
    case ScanAlgorithm::kAuto:
      if (FitsWarpPerRow(shape)) return LaunchWarpPerRowScan(shape, StreamOf(backend));
      return Resident(backend, shape);
    case ScanAlgorithm::kResident:
      return Resident(backend, shape);
    case ScanAlgorithm::kTotalsFirst:
      return TotalsFirst(backend, shape);
    case ScanAlgorithm::kKoggeStone:
      return Hierarchical(backend, shape, BlockNetwork::kKoggeStone, false);
    case ScanAlgorithm::kKoggeStoneDoubleBuffered:
      return Hierarchical(backend, shape, BlockNetwork::kKoggeStoneDoubleBuffered, false);
    case ScanAlgorithm::kKoggeStoneCoarsened:
      return Hierarchical(backend, shape, BlockNetwork::kKoggeStone, true);
    case ScanAlgorithm::kBrentKung:
      return Hierarchical(backend, shape, BlockNetwork::kBrentKung, false);
    case ScanAlgorithm::kBrentKungCoarsened:
      return Hierarchical(backend, shape, BlockNetwork::kBrentKung, true);
    case ScanAlgorithm::kWarpTiled:
      return Hierarchical(backend, shape, BlockNetwork::kWarpTiled, false);
    case ScanAlgorithm::kWarpTiledCoarsened:
      return Hierarchical(backend, shape, BlockNetwork::kWarpTiled, true);
    case ScanAlgorithm::kDomino:
      return SinglePass(backend, shape, TilePrefix::kDomino);
    case ScanAlgorithm::kLookBack:
      return SinglePass(backend, shape, TilePrefix::kLookBack);
    case ScanAlgorithm::kLookBackWindow:
      return SinglePass(backend, shape, TilePrefix::kLookBackWindow);
    case ScanAlgorithm::kTree:
      return SinglePass(backend, shape, TilePrefix::kTree);
    case ScanAlgorithm::kPipeline:
      return Pipeline(backend, shape);
  }
}

}  // namespace stillhouse::cuda
