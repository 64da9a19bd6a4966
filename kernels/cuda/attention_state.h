// What attention keeps on a device between calls.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_STATE_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_STATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/cuda_device.h"

namespace stillhouse::cuda {

// Owned by the device. Any thread.
class AttentionState {
 public:
  // The plan of a call. Layers of a step differ in their tensors' places alone, so the last plan is kept.
  std::shared_ptr<const AttentionForwardPlan> Plan(const AttentionPlanOptions& options,
                                                   const std::vector<AttentionRun>& segments, const AttentionRun& own,
                                                   const std::vector<AttentionSequence>& sequences);

 private:
  std::mutex mutex_;
  std::vector<int64_t> key_;  // of the last plan
  std::shared_ptr<const AttentionForwardPlan> plan_;
};

// What a plan has to know of the kernels and the GPU; the call's sizes are the caller's to set. Tall items need
// `vector` runs, queries and results, and a positive scale: the caller clears tall_queries where it has not.
AttentionPlanOptions OptionsFor(const Device& device, DType storage, int width);

// A plan's tables on the device (or inline), kernel by kernel.
struct AttentionLaunches {
  AttentionItems tall, wide, narrow;
  bool tall_merges = false;  // some tall items have merges
  AttentionMerging merging;
};

// Enqueues a plan: tall, wide and narrow items, and the merges apart.
void LaunchAttention(const Device& device, bool bf16, const AttentionTensors& tensors,
                     const AttentionLaunches& launches, cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_STATE_H_
