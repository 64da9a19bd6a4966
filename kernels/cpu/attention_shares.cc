#include "kernels/ops/attention_shares.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/simd.h"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kColumnGrain = 512;
constexpr int64_t kRun = 256;  // rows whose sum is taken before it joins the total

void RowShares(const SimdTable& simd, const AttentionSharesArgs& args, int64_t r) {
  const int64_t n = args.z.dim(1);
  float* row = args.z.f32() + r * args.z.stride(0);
  if (args.column_bias) simd.axpy(1.0f, args.column_bias.f32(), row, n);
  SoftmaxState<float> state;
  state.m = simd.row_max(row, n, nullptr);
  if (state.m > -kInf) {
    state.l = static_cast<float>(simd.exp_into(row, n, state.m, row));
  } else {
    std::fill(row, row + n, 0.0f);
  }
  const float own = LogSumExp(state);
  float factor = InverseSum(state);
  if (args.reference) factor *= std::min(SoftmaxWeight(own, args.reference.f32()[r]), kMostAttentionShare);
  simd.scale(factor, row, n);
  if (args.own) args.own.f32()[r] = own;
}

}  // namespace

void AttentionShares(Backend& backend, const AttentionSharesArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t rows = args.z.dim(0), n = args.z.dim(1);
  if (rows == 0 || n == 0) return;
  backend.threads().ParallelRanges(rows, 1 + 4096 / n, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) RowShares(simd, args, r);
  });
  if (!args.columns) return;
  backend.threads().ParallelRanges(n, kColumnGrain, [&](int64_t begin, int64_t end, int) {
    std::vector<float> run(static_cast<size_t>(end - begin));
    for (int64_t first = 0; first < rows; first += kRun) {
      std::fill(run.begin(), run.end(), 0.0f);
      const int64_t last = std::min(rows, first + kRun);
      for (int64_t r = first; r < last; ++r) {
        const float* row = args.z.f32() + r * args.z.stride(0) + begin;
        if (args.power == 2) {
          simd.add_squares(row, run.data(), end - begin);
        } else {
          simd.axpy(1.0f, row, run.data(), end - begin);
        }
      }
      simd.axpy(1.0f, run.data(), args.columns.f32() + begin, end - begin);
    }
  });
}

}  // namespace stillhouse::cpu
