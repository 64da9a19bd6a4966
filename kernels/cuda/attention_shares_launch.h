// Launch of AttentionShares (kernels/ops/attention_shares.h). Strides count floats.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_SHARES_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_SHARES_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

struct SharesParams {
  float* z = nullptr;
  int64_t stride = 0, rows = 0, n = 0;
  const float* column_bias = nullptr;  // or absent, as all below
  const float* reference = nullptr;
  float most = 0.0f;  // of a row's mass, with a reference
  float* own = nullptr;
  float* columns = nullptr;
  float* partial = nullptr;  // [ColumnRuns(rows), n], if there are columns
  int power = 1;
};

// Runs of rows that are summed by themselves.
int64_t ColumnRuns(int64_t rows);
void LaunchShares(const SharesParams& params, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_SHARES_LAUNCH_H_
