#include "kernels/ops/gather.h"

#include <cstring>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

void Embedding(Backend& backend, const EmbeddingArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const Tensor& table = args.table;
  const int64_t rows = args.ids.elements(), width = table.dim(1);
  STILLHOUSE_CHECK(table.contiguous() && args.out.dim(0) == rows && args.out.dim(1) == width);
  STILLHOUSE_CHECK(args.ids.contiguous() && (width <= 1 || args.out.stride(1) == 1));
  const int32_t* ids = args.ids.i32();
  const int64_t row_bytes = RowBytes(table.dtype(), width);
  std::vector<uint8_t> bytes(IsPacked(table) ? static_cast<size_t>(row_bytes) : 0);
  for (int64_t r = 0; r < rows; ++r) {
    STILLHOUSE_CHECK(0 <= ids[r] && ids[r] < table.dim(0)) << "token " << ids[r] << " of " << table.dim(0);
    float* out = args.out.f32() + r * args.out.stride(0);
    if (IsPacked(table)) {
      UnpackRow(PackedView(table), ids[r], 0, width, bytes.data());
      simd.dequantize(table.dtype(), bytes.data(), width, out);
    } else {
      simd.dequantize(table.dtype(), static_cast<const char*>(table.raw()) + ids[r] * row_bytes, width, out);
    }
  }
}

void EmbeddingGrad(Backend& backend, const EmbeddingGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t width = args.dout.dim(1);
  const int32_t* ids = args.ids.i32();
  for (int64_t r = 0; r < args.ids.elements(); ++r) {
    simd.axpy(1.0f, args.dout.f32() + r * args.dout.stride(0), args.dtable.f32() + ids[r] * args.dtable.stride(0),
              width);
  }
}

void GatherRows(Backend& backend, const GatherRowsArgs& args) {
  const int64_t count = args.rows.elements(), width = args.x.dim(1);
  STILLHOUSE_CHECK(args.out.dim(0) == count && args.out.dim(1) == width && args.rows.contiguous());
  STILLHOUSE_CHECK(width <= 1 || (args.x.stride(1) == 1 && args.out.stride(1) == 1));
  const int32_t* rows = args.rows.i32();
  for (int64_t i = 0; i < count; ++i) {
    STILLHOUSE_CHECK(0 <= rows[i] && rows[i] < args.x.dim(0)) << "row " << rows[i] << " of " << args.x.dim(0);
    std::memcpy(args.out.f32() + i * args.out.stride(0), args.x.f32() + rows[i] * args.x.stride(0),
                static_cast<size_t>(width) * sizeof(float));
  }
}

void GatherRowsGrad(Backend& backend, const GatherRowsGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int32_t* rows = args.rows.i32();
  for (int64_t i = 0; i < args.rows.elements(); ++i) {
    simd.axpy(1.0f, args.dout.f32() + i * args.dout.stride(0), args.dx.f32() + rows[i] * args.dx.stride(0),
              args.dx.dim(1));
  }
}

}  // namespace stillhouse::cpu
