#include "kernels/ops/elementwise.h"

#include <cstring>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {
namespace {

// Elements below which waking the other threads costs more than it saves: an exponential each, or one addition each.
constexpr int64_t kExpGrain = 4096;
constexpr int64_t kAddGrain = 65536;

int64_t RowGrain(int64_t elements, int64_t width) { return 1 + elements / (width + 1); }

void CheckRows(const Tensor& t, int64_t rows, int64_t width) {
  STILLHOUSE_CHECK(t.rank() == 2 && t.dim(0) == rows && t.dim(1) == width && (width <= 1 || t.stride(1) == 1))
      << t.DebugString() << " for " << rows << " rows of " << width;
}

float* Row(const Tensor& t, int64_t r) { return t.defined() ? t.f32() + r * t.stride(0) : nullptr; }

}  // namespace

void SwiGlu(Backend& backend, const SwiGluArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t rows = args.out.dim(0), width = args.out.dim(1);
  for (const Tensor* t : {&args.gate, &args.up, &args.out}) CheckRows(*t, rows, width);
  backend.threads().ParallelRanges(rows, RowGrain(kExpGrain, width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) simd.swiglu(Row(args.gate, r), Row(args.up, r), Row(args.out, r), width);
  });
}

void SwiGluGrad(Backend& backend, const SwiGluGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t rows = args.dout.dim(0), width = args.dout.dim(1);
  for (const Tensor* t : {&args.gate, &args.up, &args.dout}) CheckRows(*t, rows, width);
  backend.threads().ParallelRanges(rows, RowGrain(kExpGrain, width), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      simd.swiglu_grad(Row(args.gate, r), Row(args.up, r), Row(args.dout, r), Row(args.dgate, r), Row(args.dup, r),
                       width);
    }
  });
}

void Add(Backend& backend, const AddArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  STILLHOUSE_CHECK(args.a.shape() == args.b.shape() && args.a.shape() == args.out.shape())
      << args.a.DebugString() << " + " << args.b.DebugString();
  STILLHOUSE_CHECK(args.a.contiguous() && args.b.contiguous() && args.out.contiguous());
  const float *a = args.a.f32(), *b = args.b.f32();
  float* out = args.out.f32();
  backend.threads().ParallelRanges(args.out.elements(), kAddGrain, [&](int64_t begin, int64_t end, int) {
    simd.add(a + begin, b + begin, out + begin, end - begin);
  });
}

void AddGrad(Backend& backend, const AddGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const float* dout = args.dout.f32();
  for (const Tensor* grad : {&args.da, &args.db}) {
    if (!*grad) continue;
    STILLHOUSE_CHECK(grad->contiguous() && args.dout.contiguous());
    float* to = grad->f32();
    backend.threads().ParallelRanges(args.dout.elements(), kAddGrain, [&](int64_t begin, int64_t end, int) {
      simd.axpy(1.0f, dout + begin, to + begin, end - begin);
    });
  }
}

void CopyRows(Backend&, const CopyRowsArgs& args) {
  const int64_t heads = args.from.dim(1), width = args.from.dim(2);
  STILLHOUSE_CHECK(args.to.dim(0) == heads && args.to.dim(2) == width);
  STILLHOUSE_CHECK(0 <= args.row_begin && args.row_begin + args.row_count <= args.from.dim(0));
  STILLHOUSE_CHECK(0 <= args.slot_begin && args.slot_begin + args.row_count <= args.to.dim(1));
  STILLHOUSE_CHECK(width <= 1 || (args.from.stride(2) == 1 && args.to.stride(2) == 1));
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < args.row_count; ++i) {
      std::memcpy(args.to.f32() + h * args.to.stride(0) + (args.slot_begin + i) * args.to.stride(1),
                  args.from.f32() + (args.row_begin + i) * args.from.stride(0) + h * args.from.stride(1),
                  static_cast<size_t>(width) * sizeof(float));
    }
  }
}

}  // namespace stillhouse::cpu
