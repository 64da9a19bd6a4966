#include "kernels/cuda/attention_shares_launch.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/row.cuh"

namespace stillhouse::cuda {
namespace {

constexpr int kWide = 512;         // threads of a block on one long row
constexpr int kNarrowRows = 8;     // short rows: one warp each
constexpr int64_t kNarrow = 1024;  // … up to this length

constexpr int kColumns = 128;      // threads of a block of the column sums, a column each
constexpr int64_t kRunRows = 256;  // rows that one of them adds
constexpr int kFoldThreads = 256;

template <int kThreads>
__global__ void SharesKernel(SharesParams p) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kThreads == kWarp ? kNarrowRows : 1) + threadIdx.y;
  if (r >= p.rows) return;
  float* row = p.z + r * p.stride;
  const float* bias = p.column_bias;
  SoftmaxState<float> state;
  ForEachInRow<kThreads>(row, p.n, [&](int64_t j, float x) { PushLogit(state, bias ? x + bias[j] : x); });
  state = FoldStates<kThreads>(state);
  const float own = LogSumExp(state);
  float factor = InverseSum(state);
  if (p.reference) factor *= fminf(SoftmaxWeight(own, p.reference[r]), p.most);
  if (p.own && threadIdx.x == 0) p.own[r] = own;
  MapRow<kThreads>(row, row, p.n,
                   [&](int64_t j, float x) { return SoftmaxWeight(bias ? x + bias[j] : x, state.m) * factor; });
}

// partial[run, j] = Σ of the run's rows.
template <int kPower>
__global__ void __launch_bounds__(kColumns) ColumnRunsKernel(SharesParams p) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (j >= p.n) return;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kRunRows;
  const int64_t end = begin + kRunRows < p.rows ? begin + kRunRows : p.rows;
  const float* at = p.z + begin * p.stride + j;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t r = begin; r < end; ++r, at += p.stride) {
    const float x = *at;
    sum += kPower == 2 ? x * x : x;
  }
  p.partial[static_cast<int64_t>(blockIdx.y) * p.n + j] = sum;
}

__global__ void __launch_bounds__(kFoldThreads) FoldRunsKernel(SharesParams p, int64_t runs) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kFoldThreads + threadIdx.x;
  if (j >= p.n) return;
  float sum = p.columns[j];
  for (int64_t run = 0; run < runs; ++run) sum += p.partial[run * p.n + j];
  p.columns[j] = sum;
}

}  // namespace

int64_t ColumnRuns(int64_t rows) { return CeilDiv(rows, kRunRows); }

void LaunchShares(const SharesParams& p, cudaStream_t stream) {
  if (p.n <= kNarrow) {
    SharesKernel<kWarp>
        <<<static_cast<unsigned>(CeilDiv(p.rows, kNarrowRows)), dim3(kWarp, kNarrowRows), 0, stream>>>(p);
  } else {
    SharesKernel<kWide><<<static_cast<unsigned>(p.rows), kWide, 0, stream>>>(p);
  }
  STILLHOUSE_CUDA_LAUNCHED();
  if (!p.columns) return;
  const int64_t runs = ColumnRuns(p.rows);
  const dim3 grid(static_cast<unsigned>(CeilDiv(p.n, kColumns)), static_cast<unsigned>(runs));
  if (p.power == 2) {
    ColumnRunsKernel<2><<<grid, kColumns, 0, stream>>>(p);
  } else {
    ColumnRunsKernel<1><<<grid, kColumns, 0, stream>>>(p);
  }
  STILLHOUSE_CUDA_LAUNCHED();
  FoldRunsKernel<<<static_cast<unsigned>(CeilDiv(p.n, kFoldThreads)), kFoldThreads, 0, stream>>>(p, runs);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
