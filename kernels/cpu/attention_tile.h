// What attention's forward and backward kernels share: runs of keys and values of one KV head, and tiles of queries.
#ifndef STILLHOUSE_KERNELS_CPU_ATTENTION_TILE_H_
#define STILLHOUSE_KERNELS_CPU_ATTENTION_TILE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/ops/attention.h"

namespace stillhouse::cpu {

// Keys and values of one KV head in consecutive slots.
struct KvRun {
  const float* k = nullptr;
  const float* v = nullptr;
  const float* beta = nullptr;  // or null
  int64_t k_row = 0, v_row = 0;
  int64_t slots = 0;
  bool memory = false;
};

inline KvRun SegmentRun(const KvSegment& s, int64_t kv) {
  KvRun run;
  run.k = s.k.f32() + kv * s.k.stride(0);
  run.v = s.v.f32() + kv * s.v.stride(0);
  run.beta = s.beta ? s.beta.f32() + kv * s.beta.stride(0) : nullptr;
  run.k_row = s.k.stride(1);
  run.v_row = s.v.stride(1);
  run.slots = s.k.dim(1);
  run.memory = s.memory;
  return run;
}

// A step's own rows [row_begin, row_begin + rows) of one KV head.
inline KvRun OwnRun(const Tensor& k, const Tensor& v, int64_t row_begin, int64_t rows, int64_t kv) {
  KvRun run;
  run.k = k.f32() + row_begin * k.stride(0) + kv * k.stride(1);
  run.v = v.f32() + row_begin * v.stride(0) + kv * v.stride(1);
  run.k_row = k.stride(0);
  run.v_row = v.stride(0);
  run.slots = rows;
  return run;
}

// Element (row, head) of a [R, H, d] or [R, H] tensor.
inline float* HeadOf(const Tensor& t, int64_t row, int64_t head) {
  return t.f32() + row * t.stride(0) + head * t.stride(1);
}

// Sizes that every kernel of a call needs.
struct AttentionShape {
  int64_t rows, heads, width, kv_heads, group;

  AttentionShape(const Tensor& q, const Tensor& k, const std::vector<KvSegment>& segments)
      : rows(q.dim(0)),
        heads(q.dim(1)),
        width(q.dim(2)),
        kv_heads(k ? k.dim(1) : segments[0].k.dim(0)),
        group(heads / kv_heads) {}
};

// Slots of one step through the keys: scores and values of a step stay in the first-level cache.
constexpr int64_t kSlotTile = 64;

// Queries of one tile, counting each head of the KV head's group: enough to use a tile of keys often.
constexpr int64_t kTileQueries = 96;

// Rows whose queries (all heads of a group) make up a tile.
inline int64_t TileRows(int64_t group) { return std::max<int64_t>(1, kTileQueries / group); }

inline int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_ATTENTION_TILE_H_
