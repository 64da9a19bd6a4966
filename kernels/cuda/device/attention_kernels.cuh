// How the tile kernels of attention are chosen by width and launched.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace stillhouse::cuda {

// call(width), a constant of its type: the width of the kernel for heads `width` wide.
template <typename Call>
auto ForWidth(int width, const Call& call) {
  if (width <= 64) return call(std::integral_constant<int, 64>());
  if (width <= 128) return call(std::integral_constant<int, 128>());
  return call(std::integral_constant<int, 256>());
}

// `Kernel` has Entry<width, bytes of inline tables>() and LayoutOf<width> with kThreads and kBytes of shared memory.
template <typename Kernel>
void LaunchTiles(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                 cudaStream_t stream) {
  if (items.count == 0) return;
  ForWidth(tensors.width, [&](auto width) {
    using Layout = typename Kernel::template LayoutOf<width()>;
    auto launch = [&](auto inline_bytes) {
      const unsigned cluster = static_cast<unsigned>(items.cluster);
      const auto kernel = Kernel::template Entry<width(), inline_bytes()>();
      PreferShared(kernel);
      LaunchClustersEarly(kernel, static_cast<unsigned>(items.count * tensors.kv_heads) * cluster, dim3(cluster),
                          Layout::kThreads, Layout::kBytes, stream, tensors, items, merging,
                          TablesOf<inline_bytes()>(items.inline_tables));
    };
    if constexpr (width() <= kAttentionInlineWidth) {
      if (items.inline_tables) return launch(std::integral_constant<int, kAttentionInlineBytes>());
    }
    launch(std::integral_constant<int, 0>());
  });
}

template <typename... Params>
AttentionCapacity CapacityOf(void (*kernel)(Params...), int threads, int shared_bytes) {
  AttentionCapacity capacity;
  for (size_t i = 0; i < std::size(kAttentionClusters); ++i) {
    capacity.blocks[i] = BlocksAtOnce(kernel, threads, shared_bytes, kAttentionClusters[i]);
  }
  return capacity;
}

template <typename Kernel>
AttentionCapacity TilesCapacity(int width) {
  return ForWidth(width, [](auto of_width) {
    using Layout = typename Kernel::template LayoutOf<of_width()>;
    static const AttentionCapacity capacity =
        CapacityOf(Kernel::template Entry<of_width(), 0>(), Layout::kThreads, Layout::kBytes);
    return capacity;
  });
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_
