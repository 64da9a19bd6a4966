// Views of keys and values for the copy engine (device/tensor_copy.cuh): runs anywhere in memory whose rows lie equally
// far apart are places in one matrix, which begins at the first of them.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_MAPS_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_MAPS_H_

#include <cuda.h>

#include <vector>

#include "kernels/cuda/attention_launch.h"

namespace stillhouse::cuda {

inline constexpr int kAttentionMapCount = 4;

// Boxes are kAttentionMapRows rows of 64 columns.
inline constexpr int kAttentionMapRows = 64;

struct AttentionMaps {
  CUtensorMap map[kAttentionMapCount];
};

// The places of bf16 runs with heads kAttentionTallWidth wide; of runs that are shorter than a box, or that need more
// maps than there are, none. A box lies in memory where its rows are slots of the run.
std::vector<AttentionPlaces> PlacesOf(const std::vector<AttentionRun>& runs, int kv_heads, AttentionMaps* maps);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_MAPS_H_
