// A memory: keys and values that stand for a document, layer by layer.
#ifndef STILLHOUSE_SERVER_STATE_MEMORY_H_
#define STILLHOUSE_SERVER_STATE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ops/context.h"
#include "kernels/ops/fused.h"

namespace stillhouse {

// One layer's rows. Keys are stored rotated at their own positions, in the model's RoPE layout.
struct LayerKv {
  Tensor k, v;  // [kv_heads, slots, head_dim] f32, or bf16 (PackMemory; for inference only)
  Tensor beta;  // [kv_heads, slots] f32, or empty
};

// Slot index and position are different things: `slots` rows are stored, a sequence that follows continues at
// `next_position` (the logical length, unless the artifact says otherwise). Immutable once shared; any number of
// sequences attend to one Memory at once, and it lives as long as one of them does.
struct Memory {
  std::vector<LayerKv> layers;
  int64_t slots = 0;
  int64_t next_position = 0;
  std::string label;  // for logs and metrics: the method

  // 2·L·H_kv·d·slots·4 (+ β): what the memory is, whatever holds it.
  int64_t canonical_bytes() const;
  // Of the buffers that hold it.
  int64_t allocated_bytes() const;
};

// The buffers that hold a memory, each once, and how many of its bytes the memory reaches.
struct BufferExtent {
  std::shared_ptr<Buffer> buffer;
  size_t bytes = 0;
};
std::vector<BufferExtent> Extents(const Memory& memory);

// Its layers as one run, if they lie at equal distances.
std::optional<KvLayers> LayersOf(const Memory& memory);

// A copy in one buffer [layers, 2, kv_heads, slots, head_dim] of `dtype`, f32 or bf16: as decode steps read it best.
// Null if the device has no memory left for it.
std::shared_ptr<Memory> PackMemory(const Context& ctx, const Memory& memory, DType dtype);
// Whether it is what PackMemory would give.
bool IsPacked(const Memory& memory, DType dtype);

// Copies [kv_heads, n, d] between f32 and bf16 (CUDA), or as they are.
void CopySlots(const Context& ctx, const Tensor& from, const Tensor& to);

// A copy with its own storage of slots [begin, end) of every layer. next_position is kept unless it is ≥ 0 here.
std::shared_ptr<Memory> SliceMemory(const Context& ctx, const Memory& memory, int64_t begin, int64_t end,
                                    int64_t next_position = -1);

// A memory on its way to another place: not to be read before Wait.
struct MemoryCopy {
  std::shared_ptr<Memory> memory;
  std::vector<std::unique_ptr<PendingCopy>> pending;

  void Wait() const {
    for (const auto& copy : pending) copy->Wait();
  }
};
// Starts copying a memory as it lies, extent by extent, into buffers of `pool`: from the device to host memory
// (Backend::copy_memory) or back. Nothing if the pool has no memory left.
std::optional<MemoryCopy> StartCopy(const Context& ctx, const Memory& memory, BufferPool& pool);

// Slots [begin, end) of every layer over the same buffers, which it keeps. next_position is kept.
Memory ViewSlots(const Memory& memory, int64_t begin, int64_t end);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_STATE_MEMORY_H_
