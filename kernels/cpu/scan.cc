#include "kernels/ops/scan.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

namespace {

// Rows are cut into pieces of this many elements, whatever the number of threads: sums do not depend on it.
constexpr int64_t kPiece = int64_t{1} << 16;

// Adds up in Sum (wide enough, or wrapping) and rounds to T once.
template <typename T, typename Sum>
void ScanAs(Backend& backend, const ScanArgs& args) {
  const bool matrix = args.in.rank() == 2;
  const int64_t rows = matrix ? args.in.dim(0) : 1, n = args.in.dim(-1), stride = matrix ? args.in.stride(0) : n;
  const T* in = args.in.data<T>();
  T* out = args.out.data<T>();
  const uint8_t* heads = args.heads ? args.heads.data<uint8_t>() : nullptr;
  const int64_t pieces = (n + kPiece - 1) / kPiece;

  // What a piece adds to whatever comes before it: its sum since its last head, and whether there is one.
  struct Total {
    Sum sum{};
    bool cut = false;
  };
  std::vector<Total> before(static_cast<size_t>(rows * pieces));
  if (pieces > 1) {
    std::vector<Total> totals(before.size());
    backend.threads().ParallelFor(rows * pieces, [&](int64_t p, int) {
      const int64_t r = p / pieces, begin = p % pieces * kPiece, end = std::min(n, begin + kPiece);
      Total total;
      for (int64_t i = begin; i < end; ++i) {
        if (heads && heads[r * n + i]) total = {Sum{}, true};
        total.sum += static_cast<Sum>(in[r * stride + i]);
      }
      totals[p] = total;
    });
    for (int64_t p = 0; p < rows * pieces; ++p) {
      if (p % pieces == 0) continue;
      before[p].sum = totals[p - 1].cut ? totals[p - 1].sum : before[p - 1].sum + totals[p - 1].sum;
    }
  }
  backend.threads().ParallelFor(rows * pieces, [&](int64_t p, int) {
    const int64_t r = p / pieces, begin = p % pieces * kPiece, end = std::min(n, begin + kPiece);
    Sum sum = before[p].sum;
    for (int64_t i = begin; i < end; ++i) {
      if (heads && heads[r * n + i]) sum = Sum{};
      const Sum next = sum + static_cast<Sum>(in[r * stride + i]);
      out[r * n + i] = static_cast<T>(args.options.exclusive ? sum : next);
      sum = next;
    }
  });
}

}  // namespace

void Scan(Backend& backend, const ScanArgs& args) {
  switch (args.in.dtype()) {
    case DType::kF32:
      return ScanAs<float, double>(backend, args);
    case DType::kI32:
      return ScanAs<uint32_t, uint32_t>(backend, args);
    default:
      return ScanAs<uint64_t, uint64_t>(backend, args);
  }
}

}  // namespace stillhouse::cpu
