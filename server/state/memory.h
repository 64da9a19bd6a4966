// A memory: keys and values that stand for a document, layer by layer.
#ifndef STILLHOUSE_SERVER_STATE_MEMORY_H_
#define STILLHOUSE_SERVER_STATE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/context.h"

namespace stillhouse {

// One layer's rows. Keys are stored rotated at their own positions, in the model's RoPE layout.
struct LayerKv {
  Tensor k, v;  // [kv_heads, slots, head_dim] f32
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

// A copy with its own storage of slots [begin, end) of every layer. next_position is kept unless it is ≥ 0 here.
std::shared_ptr<Memory> SliceMemory(const Context& ctx, const Memory& memory, int64_t begin, int64_t end,
                                    int64_t next_position = -1);

// Slots [begin, end) of every layer over the same buffers, which it keeps. next_position is kept.
Memory ViewSlots(const Memory& memory, int64_t begin, int64_t end);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_STATE_MEMORY_H_
