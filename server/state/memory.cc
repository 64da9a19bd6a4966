#include "server/state/memory.h"

#include <unordered_set>

namespace stillhouse {
namespace {

int64_t BytesOf(const Tensor& t) { return t.defined() ? t.bytes() : 0; }

// [kv_heads, n, …] of one tensor's slots, in new storage.
Tensor CopySlots(const Context& ctx, const Tensor& from, int64_t begin, int64_t end) {
  const Tensor view = from.Slice(1, begin, end);
  Tensor to = ctx.Empty(from.dtype(), view.shape());
  ctx.backend->Copy(view, to);
  return to;
}

}  // namespace

int64_t Memory::canonical_bytes() const {
  int64_t total = 0;
  for (const LayerKv& layer : layers) total += BytesOf(layer.k) + BytesOf(layer.v) + BytesOf(layer.beta);
  return total;
}

int64_t Memory::allocated_bytes() const {
  std::unordered_set<const Buffer*> seen;
  int64_t total = 0;
  for (const LayerKv& layer : layers) {
    for (const Tensor* t : {&layer.k, &layer.v, &layer.beta}) {
      if (t->defined() && seen.insert(t->buffer().get()).second) total += static_cast<int64_t>(t->buffer()->bytes());
    }
  }
  return total;
}

std::shared_ptr<Memory> SliceMemory(const Context& ctx, const Memory& memory, int64_t begin, int64_t end,
                                    int64_t next_position) {
  STILLHOUSE_CHECK(0 <= begin && begin <= end && end <= memory.slots) << begin << ".." << end;
  auto out = std::make_shared<Memory>();
  out->slots = end - begin;
  out->next_position = next_position >= 0 ? next_position : memory.next_position;
  out->label = memory.label;
  for (const LayerKv& layer : memory.layers) {
    LayerKv copy{CopySlots(ctx, layer.k, begin, end), CopySlots(ctx, layer.v, begin, end), Tensor()};
    if (layer.beta) copy.beta = CopySlots(ctx, layer.beta, begin, end);
    out->layers.push_back(std::move(copy));
  }
  return out;
}

Memory ViewSlots(const Memory& memory, int64_t begin, int64_t end) {
  STILLHOUSE_CHECK(0 <= begin && begin <= end && end <= memory.slots) << begin << ".." << end;
  Memory out;
  out.slots = end - begin;
  out.next_position = memory.next_position;
  out.label = memory.label;
  for (const LayerKv& layer : memory.layers) {
    LayerKv view{layer.k.Slice(1, begin, end), layer.v.Slice(1, begin, end), Tensor()};
    if (layer.beta) view.beta = layer.beta.Slice(1, begin, end);
    out.layers.push_back(std::move(view));
  }
  return out;
}

}  // namespace stillhouse
