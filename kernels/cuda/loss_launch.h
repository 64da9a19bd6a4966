// Launches of the loss family (kernels/ops/loss.h). Rows are contiguous in the last dimension; strides count floats.
#ifndef STILLHOUSE_KERNELS_CUDA_LOSS_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_LOSS_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
};

void LaunchSoftmax(Rows z, Rows out, int64_t rows, int64_t n, bool log, cudaStream_t stream);
void LaunchSoftmaxGrad(Rows out, Rows dout, Rows dz, int64_t rows, int64_t n, bool log, cudaStream_t stream);

// Weights of rows and what their sum makes of a mean: scale[0] = mean ? 1/Σw (0 for Σw = 0) : 1. A target or candidate
// past the vocabulary ends the process with a message.
void LaunchWeighTargets(const int32_t* targets, const float* class_weights, int64_t rows, int64_t n,
                        int32_t ignore_index, bool mean, float* weights, float* scale, cudaStream_t stream);
void LaunchWeighCandidates(const int32_t* ids, int64_t columns, const float* row_weights, int64_t rows, int64_t n,
                           float* weights, float* scale, cudaStream_t stream);
// loss[0] = scale[0] · Σ losses; or, per row, loss[r · stride] = losses[r].
void LaunchReduceLosses(const float* losses, const float* scale, int64_t rows, bool per_row, float* loss,
                        int64_t stride, cudaStream_t stream);

struct CrossEntropyRows {
  Rows z;
  const int32_t* targets = nullptr;  // or soft
  const float* soft = nullptr;
  int64_t soft_stride = 0;
  int64_t rows = 0, n = 0;
  float label_smoothing = 0.0f, z_loss = 0.0f;
  const float* weights = nullptr;  // [rows]
  const float* scale = nullptr;    // [1]
};
// losses[r] = weight · loss of row r; with `gradient`, z becomes scale · weight · dz (0 for rows of weight 0).
void LaunchCrossEntropy(const CrossEntropyRows& rows, bool gradient, float* losses, cudaStream_t stream);
// dz += scale · weight · dloss · (…); dloss_stride is 0 for one dloss for all rows.
void LaunchCrossEntropyGrad(const CrossEntropyRows& rows, const float* dloss, int64_t dloss_stride, Rows dz,
                            cudaStream_t stream);

enum class DistillKind : uint8_t { kRenormalised, kRaw, kTail };

struct DistillRows {
  float* z = nullptr;  // [rows, n], overwritten
  int64_t rows = 0, n = 0;
  const int32_t* ids = nullptr;     // [rows, columns]
  const float* logprobs = nullptr;  // [rows, columns]
  int64_t columns = 0;
  DistillKind kind = DistillKind::kRenormalised;
  const float* weights = nullptr;  // [rows]
  const float* scale = nullptr;    // [1]
  float* q = nullptr;              // [rows, columns], scratch
  float* logits = nullptr;         // [rows, columns], scratch
  float* losses = nullptr;         // [rows]
};
void LaunchDistill(const DistillRows& rows, bool gradient, cudaStream_t stream);

struct TopLogprobsRows {
  const float* z = nullptr;  // [rows, n]
  int64_t rows = 0, n = 0;
  const int32_t* tokens = nullptr;  // [rows] or null
  int64_t k = 0;
  int32_t* top_ids = nullptr;       // [rows, k]
  float* top_logprobs = nullptr;    // [rows, k]
  float* token_logprobs = nullptr;  // [rows]
  uint64_t* list = nullptr;         // [rows, SelectListRoom(k)], scratch (select_room.h)
};
void LaunchTopLogprobs(const TopLogprobsRows& rows, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_LOSS_LAUNCH_H_
