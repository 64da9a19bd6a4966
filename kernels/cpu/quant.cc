#include "kernels/ops/quant.h"

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

void Dequantize(Backend& backend, const DequantizeArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  STILLHOUSE_CHECK(args.in.contiguous() && args.out.contiguous() && args.in.shape() == args.out.shape())
      << args.in.DebugString() << " -> " << args.out.DebugString();
  const int64_t width = args.in.rank() ? args.in.dim(-1) : 1;
  const int64_t rows = width == 0 ? 0 : args.in.elements() / width;
  const DType dtype = args.in.dtype();
  const char* in = static_cast<const char*>(args.in.raw());
  float* out = args.out.f32();
  backend.threads().ParallelRanges(rows, 1 + 16384 / (width + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      simd.dequantize(dtype, in + r * RowBytes(dtype, width), width, out + r * width);
  });
}

}  // namespace stillhouse::cpu
