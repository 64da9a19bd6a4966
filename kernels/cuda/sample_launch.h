// Launch of the sampler (kernels/ops/sample.h).
#ifndef STILLHOUSE_KERNELS_CUDA_SAMPLE_LAUNCH_H_
#define STILLHOUSE_KERNELS_CUDA_SAMPLE_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace stillhouse::cuda {

// One row's settings: SampleRow with its lists replaced by places in the call's arrays.
struct SampleSettings {
  double u;  // the row's draw in [0, 1)
  float temperature, top_p, min_p;
  int32_t top_k;
  float repetition_penalty, frequency_penalty, presence_penalty;
  int32_t history, history_count;  // pairs (token, count)
  int32_t banned, banned_count;
  int32_t changed;  // its row of the scratch for modified logits; −1: logits are taken as they are
  int32_t logprobs;
  int32_t top;  // its first entry of the reported best
};

struct SampleResult {
  int32_t id;
  int32_t invalid;
  float logprob;
  int32_t top_count;
};

struct SampleTop {
  int32_t id;
  float logprob;
};

struct SampleRows {
  const float* logits = nullptr;
  int64_t stride = 0, rows = 0, n = 0;
  const SampleSettings* settings = nullptr;  // [rows]
  const int32_t* history = nullptr;          // pairs
  const int32_t* banned = nullptr;
  float* changed = nullptr;  // [changed rows, changed_stride]
  int64_t changed_stride = 0;
  uint64_t* list = nullptr;  // [rows, list_room], for rows that report more than kSelectRoom logprobs
  int64_t list_room = 0;
  SampleResult* results = nullptr;  // [rows]
  SampleTop* top = nullptr;
};
void LaunchSample(const SampleRows& rows, cudaStream_t stream);

// Weights of tokens are summed as integers of this many fractional bits, so that sums do not depend on their order; a
// vocabulary is at most 2^22 tokens.
inline constexpr int kWeightBits = 41;
inline constexpr int64_t kMaxVocabulary = int64_t{1} << 22;

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_SAMPLE_LAUNCH_H_
