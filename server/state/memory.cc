#include "server/state/memory.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "kernels/ops/elementwise.h"

namespace stillhouse {
namespace {

int64_t BytesOf(const Tensor& t) { return t.defined() ? t.elements() * 4 : 0; }

// [kv_heads, n, …] of one tensor's slots, in new storage.
Tensor TakeSlots(const Context& ctx, const Tensor& from, int64_t begin, int64_t end) {
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
  int64_t total = 0;
  for (const BufferExtent& extent : Extents(*this)) total += static_cast<int64_t>(extent.buffer->bytes());
  return total;
}

std::vector<BufferExtent> Extents(const Memory& memory) {
  std::vector<BufferExtent> extents;
  std::unordered_map<const Buffer*, size_t> index;
  for (const LayerKv& layer : memory.layers) {
    for (const Tensor* t : {&layer.k, &layer.v, &layer.beta}) {
      if (!*t) continue;
      const auto [at, fresh] = index.emplace(t->buffer().get(), extents.size());
      if (fresh) extents.push_back({t->buffer(), 0});
      int64_t last = t->offset();
      for (int i = 0; i < t->rank(); ++i) last += (t->dim(i) - 1) * t->stride(i);
      const int64_t bytes = t->elements() > 0 ? (last + 1) * static_cast<int64_t>(BlockBytes(t->dtype())) : 0;
      size_t& reached = extents[at->second].bytes;
      reached = std::max(reached, static_cast<size_t>(bytes));
    }
  }
  return extents;
}

std::optional<KvLayers> LayersOf(const Memory& memory) {
  if (memory.layers.empty()) return std::nullopt;
  const LayerKv& first = memory.layers[0];
  KvLayers out{first.k, first.v, first.beta, 0, 0, 0, /*memory=*/true};
  const size_t count = memory.layers.size();
  // Checks that the tensors of all layers are one buffer's, alike, at equal distances.
  const auto distance = [&](const auto& of, int64_t* stride) {
    const Tensor& base = of(first);
    for (size_t i = 1; i < count; ++i) {
      const Tensor& t = of(memory.layers[i]);
      if (t.defined() != base.defined()) return false;
      if (!base.defined()) continue;
      if (i == 1) *stride = t.offset() - base.offset();
      if (t.buffer() != base.buffer() || t.dtype() != base.dtype() || t.shape() != base.shape() ||
          t.strides() != base.strides() || t.offset() != base.offset() + static_cast<int64_t>(i) * *stride) {
        return false;
      }
    }
    return true;
  };
  const bool regular = distance([](const LayerKv& l) -> const Tensor& { return l.k; }, &out.k_stride) &&
                       distance([](const LayerKv& l) -> const Tensor& { return l.v; }, &out.v_stride) &&
                       distance([](const LayerKv& l) -> const Tensor& { return l.beta; }, &out.beta_stride);
  if (!regular) return std::nullopt;
  return out;
}

void CopySlots(const Context& ctx, const Tensor& from, const Tensor& to) {
  if (from.dtype() == to.dtype()) {
    ctx.backend->Copy(from, to);
  } else {
    CopyRows(ctx, {from.Transpose(0, 1), to, 0, from.dim(1), 0});
  }
}

std::shared_ptr<Memory> PackMemory(const Context& ctx, const Memory& memory, DType dtype) {
  auto out = std::make_shared<Memory>();
  out->slots = memory.slots;
  out->next_position = memory.next_position;
  out->label = memory.label;
  if (memory.layers.empty()) return out;
  const int64_t layers = static_cast<int64_t>(memory.layers.size());
  const LayerKv& first = memory.layers[0];
  const Tensor all = Tensor::TryEmpty(ctx.pool(), dtype, {layers, 2, first.k.dim(0), memory.slots, first.k.dim(2)});
  Tensor beta;
  if (first.beta) beta = Tensor::TryEmpty(ctx.pool(), DType::kF32, {layers, first.k.dim(0), memory.slots});
  if (!all || beta.defined() != first.beta.defined()) return nullptr;
  for (int64_t i = 0; i < layers; ++i) {
    const LayerKv& from = memory.layers[static_cast<size_t>(i)];
    LayerKv to{all.Select(0, i).Select(0, 0), all.Select(0, i).Select(0, 1), Tensor()};
    CopySlots(ctx, from.k, to.k);
    CopySlots(ctx, from.v, to.v);
    STILLHOUSE_CHECK(from.beta.defined() == beta.defined());
    if (beta) {
      to.beta = beta.Select(0, i);
      ctx.backend->Copy(from.beta, to.beta);
    }
    out->layers.push_back(std::move(to));
  }
  return out;
}

bool IsPacked(const Memory& memory, DType dtype) {
  return memory.slots == 0 || (memory.layers[0].k.dtype() == dtype && LayersOf(memory).has_value());
}

std::shared_ptr<Memory> SliceMemory(const Context& ctx, const Memory& memory, int64_t begin, int64_t end,
                                    int64_t next_position) {
  STILLHOUSE_CHECK(0 <= begin && begin <= end && end <= memory.slots) << begin << ".." << end;
  auto out = std::make_shared<Memory>();
  out->slots = end - begin;
  out->next_position = next_position >= 0 ? next_position : memory.next_position;
  out->label = memory.label;
  for (const LayerKv& layer : memory.layers) {
    LayerKv copy{TakeSlots(ctx, layer.k, begin, end), TakeSlots(ctx, layer.v, begin, end), Tensor()};
    if (layer.beta) copy.beta = TakeSlots(ctx, layer.beta, begin, end);
    out->layers.push_back(std::move(copy));
  }
  return out;
}

std::optional<MemoryCopy> StartCopy(const Context& ctx, const Memory& memory, BufferPool& pool) {
  MemoryCopy out;
  std::unordered_map<const Buffer*, std::shared_ptr<Buffer>> moved;
  for (const BufferExtent& extent : Extents(memory)) {
    std::shared_ptr<Buffer> buffer = pool.TryAllocate(extent.bytes);
    if (!buffer) return std::nullopt;
    out.pending.push_back(ctx.backend->StartCopy(extent.buffer, buffer, extent.bytes));
    moved[extent.buffer.get()] = std::move(buffer);
  }
  const auto there = [&](const Tensor& from) {
    return from ? from.WithBuffer(moved[from.buffer().get()], from.dtype()) : Tensor();
  };
  out.memory = std::make_shared<Memory>();
  out.memory->slots = memory.slots;
  out.memory->next_position = memory.next_position;
  out.memory->label = memory.label;
  for (const LayerKv& layer : memory.layers) {
    out.memory->layers.push_back({there(layer.k), there(layer.v), there(layer.beta)});
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
