// How the tile kernels of attention are chosen by width and launched.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/device/attention_cursor.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace stillhouse::cuda {

// call(width, wide), both as constants of their types: the width of the kernel for heads `width` wide.
template <typename Call>
auto ForTiles(int width, bool wide, const Call& call) {
  auto with = [&](auto of_width) {
    return wide ? call(of_width, std::true_type()) : call(of_width, std::false_type());
  };
  if (width <= 64) return with(std::integral_constant<int, 64>());
  if (width <= 128) return with(std::integral_constant<int, 128>());
  return with(std::integral_constant<int, 256>());
}

// `Kernel` has Entry<width, wide, bytes of inline tables>() and LayoutOf<width, wide> with kThreads and kBytes of
// shared memory.
template <typename Kernel>
void LaunchTiles(const AttentionTensors& tensors, const AttentionItems& items, const AttentionMerging& merging,
                 bool wide, cudaStream_t stream) {
  if (items.count == 0) return;
  ForTiles(tensors.width, wide, [&](auto width, auto is_wide) {
    using Layout = typename Kernel::template LayoutOf<width(), is_wide()>;
    auto launch = [&](auto inline_bytes) {
      const auto kernel = Kernel::template Entry<width(), is_wide(), inline_bytes()>();
      const auto blocks = static_cast<unsigned>(items.count * tensors.kv_heads);
      const auto tables = TablesOf<inline_bytes()>(items.inline_tables);
      // Items that merge end soon, so that it tells when they are set up early.
      if (!is_wide() && merging.arrived) {
        LaunchKernelEarly(kernel, blocks, Layout::kThreads, Layout::kBytes, stream, tensors, items, merging, tables);
      } else {
        LaunchKernel(kernel, blocks, Layout::kThreads, Layout::kBytes, stream, tensors, items, merging, tables);
      }
    };
    if constexpr (width() <= kAttentionInlineWidth) {
      if (items.inline_tables) return launch(std::integral_constant<int, kAttentionInlineBytes>());
    }
    launch(std::integral_constant<int, 0>());
  });
}

// Blocks that one multiprocessor holds.
template <typename Kernel>
int TileBlocks(int width, bool wide) {
  return ForTiles(width, wide, [](auto of_width, auto is_wide) {
    using Layout = typename Kernel::template LayoutOf<of_width(), is_wide()>;
    static const int blocks =
        BlocksPerMultiprocessor(Kernel::template Entry<of_width(), is_wide(), 0>(), Layout::kThreads, Layout::kBytes);
    return blocks;
  });
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ATTENTION_KERNELS_CUH_
