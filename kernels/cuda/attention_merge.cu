// Merges the partial rows of rows that no item ends, and the shares of the heads on memories.
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/attention_kernels.cuh"
#include "kernels/cuda/device/attention_merge.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace stillhouse::cuda {
namespace {

constexpr int kWarps = 4;
// From so many partial rows on, the warps of a block merge one head together.
constexpr int kManyPartials = 8;

// kParts warps merge one (row, head): each its share of the partial rows, the first the own rows too.
template <int kWidth, int kParts, int kInline>
__global__ void __launch_bounds__(kWarps* kWarp)
    AttentionMergeRows(const AttentionTensors t, const AttentionMerging where,
                       const __grid_constant__ InlineTables<kInline> tables) {
  constexpr int kHeads = kWarps / kParts;  // of a block
  LetNextKernelStart();
  const AttentionMerging merging = Resolve(where, tables);
  const int head_blocks = (t.heads + kHeads - 1) / kHeads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int part = warp % kParts, head = static_cast<int>(blockIdx.x % head_blocks) * kHeads + warp / kParts;
  const AttentionMerge merge = merging.merges[merging.begin + static_cast<int>(blockIdx.x) / head_blocks];
  WaitForPreviousKernel();
  if (head >= t.heads || merge.row < 0) return;  // a whole block, where its warps work together
  MergedRow<kWidth> sum(t.width);
  sum.AddPartials(PartialRows(t, merging.partials, head), merge.partial_begin + part, merge.partial_end, kParts);
  if (part == 0) sum.AddOwn(t, merging, merge, head);
  if constexpr (kParts > 1) {
    __shared__ alignas(16) float shared[kWarps * (kWidth + kSumState)];
    if (!sum.template AddWarps<kWarps>(shared)) return;
  }
  sum.Store(t, merge.row, head);
}

__global__ void AttentionMassMean(const float* mass, float* stored_mass, int64_t rows, int heads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  LetNextKernelStart();
  WaitForPreviousKernel();
  if (row >= rows) return;
  float sum = 0.0f;
  for (int h = 0; h < heads; ++h) sum += mass[row * heads + h];
  stored_mass[row] = sum / static_cast<float>(heads);
}

template <int kWidth, int kParts, int kInline>
void Launch(const AttentionTensors& tensors, const AttentionMerging& merging, cudaStream_t stream) {
  const int64_t blocks = merging.count * CeilDiv(tensors.heads, kWarps / kParts);
  LaunchKernelEarly(AttentionMergeRows<kWidth, kParts, kInline>, static_cast<unsigned>(blocks), kWarps * kWarp, 0,
                    stream, tensors, merging, TablesOf<kInline>(merging.inline_tables));
}

}  // namespace

void LaunchAttentionMerge(const AttentionTensors& tensors, const AttentionMerging& merging, cudaStream_t stream) {
  if (merging.count == 0) return;
  ForWidth(tensors.width, [&](auto width) {
    auto launch = [&](auto parts) {
      if constexpr (width() <= kAttentionInlineWidth) {
        if (merging.inline_tables) return Launch<width(), parts(), kAttentionInlineBytes>(tensors, merging, stream);
      }
      Launch<width(), parts(), 0>(tensors, merging, stream);
    };
    merging.most_partials >= kManyPartials ? launch(std::integral_constant<int, kWarps>())
                                           : launch(std::integral_constant<int, 1>());
  });
}

void LaunchAttentionMass(const float* mass, float* stored_mass, int64_t rows, int heads, cudaStream_t stream) {
  if (rows == 0) return;
  LaunchKernelEarly(AttentionMassMean, static_cast<unsigned>(CeilDiv(rows, 128)), 128, 0, stream, mass, stored_mass,
                    rows, heads);
}

}  // namespace stillhouse::cuda
