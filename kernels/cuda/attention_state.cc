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
                              o.tall_queries,
                              o.multiprocessors,
                              o.partial_bytes,
                              static_cast<int64_t>(segments.size()),
                              static_cast<int64_t>(sequences.size())};
  for (const AttentionCapacity* capacity : {&o.narrow, &o.wide, &o.tall}) {
    key.insert(key.end(), std::begin(capacity->blocks), std::end(capacity->blocks));
  }
  key.push_back(static_cast<int64_t>(1e3 * o.narrow_latency));
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
  options.narrow_queries = kAttentionNarrow;
  options.wide_queries = kAttentionWide;
  if (bf16 && width == kAttentionTallWidth) options.tall_queries = kAttentionTall;
  options.multiprocessors = device.multiprocessors();
  options.narrow = bf16 ? AttentionCapacityBf16Narrow(width) : AttentionCapacityF32(width, false);
  options.wide = bf16 ? AttentionCapacityBf16Wide(width) : AttentionCapacityF32(width, true);
  if (options.tall_queries > 0) options.tall = AttentionCapacityTall();
  options.narrow_latency = bf16 ? 1.5 : 4.0;
  return options;
}

void LaunchAttention(const Device& device, bool bf16, const AttentionTensors& tensors,
                     const AttentionLaunches& launches, cudaStream_t stream) {
  LaunchAttentionTall(tensors, launches.tall, launches.merging, launches.tall_merges, device.multiprocessors(), stream);
  if (bf16) {
    LaunchAttentionBf16Wide(tensors, launches.wide, launches.merging, stream);
    LaunchAttentionBf16Narrow(tensors, launches.narrow, launches.merging, stream);
  } else {
    LaunchAttentionF32(tensors, launches.wide, launches.merging, true, stream);
    LaunchAttentionF32(tensors, launches.narrow, launches.merging, false, stream);
  }
  LaunchAttentionMerge(tensors, launches.merging, stream);
}

}  // namespace stillhouse::cuda
