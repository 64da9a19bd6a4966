#include "kernels/cuda/attention_state.h"

#include <cstring>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {
namespace {

// All that a plan is made of, but for where tensors lie.
std::vector<int64_t> KeyOf(const AttentionPlanOptions& o, const std::vector<AttentionRun>& segments,
                           const AttentionRun& own, const std::vector<AttentionSequence>& sequences) {
  std::vector<int64_t> key = {o.rows,
                              o.heads,
                              o.kv_heads,
                              o.width,
                              o.own,
                              o.own_bytes,
                              o.narrow_queries,
                              o.wide_queries,
                              o.tall_queries,
                              o.multiprocessors,
                              o.narrow_blocks,
                              o.wide_blocks,
                              o.finishing,
                              o.partial_bytes,
                              static_cast<int64_t>(segments.size()),
                              static_cast<int64_t>(sequences.size())};
  auto add_run = [&](const AttentionRun& run) {
    key.insert(key.end(), {run.slots, run.beta != nullptr, run.memory, run.vector});
  };
  add_run(own);
  for (const AttentionRun& run : segments) add_run(run);
  for (const AttentionSequence& s : sequences) {
    key.insert(key.end(), {s.row_begin, s.row_count, static_cast<int64_t>(s.segments.size())});
    key.insert(key.end(), s.segments.begin(), s.segments.end());
  }
  return key;
}

}  // namespace

AttentionState::AttentionState(cudaStream_t stream) {
  STILLHOUSE_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&arrived_), kArrivals * sizeof(uint32_t)));
  STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(arrived_, 0, kArrivals * sizeof(uint32_t), stream));
}

AttentionState::~AttentionState() { STILLHOUSE_CUDA_CHECK(cudaFree(arrived_)); }

std::shared_ptr<const AttentionForwardPlan> AttentionState::Plan(const AttentionPlanOptions& options,
                                                                 const std::vector<AttentionRun>& segments,
                                                                 const AttentionRun& own,
                                                                 const std::vector<AttentionSequence>& sequences) {
  std::vector<int64_t> key = KeyOf(options, segments, own, sequences);
  std::lock_guard<std::mutex> lock(mutex_);
  if (plan_ && key == key_) {
    auto plan = std::make_shared<AttentionForwardPlan>(*plan_);
    PointRunsAt(segments, own, options.own_bytes, plan.get());
    return plan;
  }
  plan_ = std::make_shared<const AttentionForwardPlan>(PlanAttention(options, segments, own, sequences));
  key_ = std::move(key);
  return plan_;
}

AttentionPlanOptions OptionsFor(const Device& device, DType storage, int width) {
  const bool bf16 = storage == DType::kBF16;
  AttentionPlanOptions options;
  options.width = width;
  options.narrow_queries = bf16 ? kAttentionNarrowBf16 : kAttentionNarrowF32;
  options.wide_queries = kAttentionWide;
  if (bf16 && width == kAttentionTallWidth) options.tall_queries = kAttentionTall;
  const auto blocks = bf16 ? AttentionBlocksBf16 : AttentionBlocksF32;
  options.multiprocessors = device.multiprocessors();
  options.narrow_blocks = blocks(width, false);
  options.wide_blocks = blocks(width, true);
  options.narrow_latency = bf16 ? 1.5 : 4.0;
  options.finishing = AttentionState::kArrivals;
  return options;
}

void LaunchAttentionTiles(const Device& device, bool bf16, const AttentionTensors& tensors, const AttentionItems& tall,
                          const AttentionItems& wide, const AttentionItems& narrow, const AttentionMerging& merging,
                          cudaStream_t stream) {
  const auto launch = bf16 ? LaunchAttentionBf16 : LaunchAttentionF32;
  LaunchAttentionTall(tensors, tall, device.multiprocessors(), stream);
  launch(tensors, wide, merging, true, stream);
  launch(tensors, narrow, merging, false, stream);
  LaunchAttentionMerge(tensors, merging, stream);
}

}  // namespace stillhouse::cuda
