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

// Owned by the device. Any thread; what is on the device is ordered by its stream.
class AttentionState {
 public:
  static constexpr int64_t kArrivals = int64_t{1} << 16;

  // The device must be current.
  explicit AttentionState(cudaStream_t stream);
  ~AttentionState();
  AttentionState(const AttentionState&) = delete;
  AttentionState& operator=(const AttentionState&) = delete;

  // kArrivals counts, 0 between calls (AttentionMerging::arrived).
  uint32_t* arrived() const { return arrived_; }

  // The plan of a call. Layers of a step differ in their tensors' places alone, so the last plan is kept.
  std::shared_ptr<const AttentionForwardPlan> Plan(const AttentionPlanOptions& options,
                                                   const std::vector<AttentionRun>& segments, const AttentionRun& own,
                                                   const std::vector<AttentionSequence>& sequences);

 private:
  uint32_t* arrived_ = nullptr;
  std::mutex mutex_;
  std::vector<int64_t> key_;  // of the last plan
  std::shared_ptr<const AttentionForwardPlan> plan_;
};

// What a plan has to know of the kernels and the GPU; the call's sizes are the caller's to set. Tall items need
// `vector` runs, queries and results, and a positive scale: the caller clears tall_queries where it has not.
AttentionPlanOptions OptionsFor(const Device& device, DType storage, int width);

// Enqueues a plan: tall, wide and narrow items, which lie in tables on the device (or inline), and the merges apart.
void LaunchAttentionTiles(const Device& device, bool bf16, const AttentionTensors& tensors, const AttentionItems& tall,
                          const AttentionItems& wide, const AttentionItems& narrow, const AttentionMerging& merging,
                          cudaStream_t stream);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_STATE_H_
