#include "server/state/sequence_state.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/ops/elementwise.h"

namespace stillhouse {

int64_t PagePool::BytesFor(const Context& ctx, const ModelConfig& config, DType dtype, int64_t slots) {
  const int64_t held = config.kv_bytes_per_slot(BlockBytes(dtype)) * kPageSlots;
  const int64_t pages = (slots + kPageSlots - 1) / kPageSlots;
  return pages * static_cast<int64_t>(ctx.pool().BlockBytes(static_cast<size_t>(held)));
}

PagePool::PagePool(const Context& ctx, const ModelConfig& config, int64_t budget_bytes, DType dtype)
    : ctx_(ctx), shape_{config.layers, 2, config.kv_heads, kPageSlots, config.head_dim}, dtype_(dtype) {
  ctx_.tape = nullptr;
  page_bytes_ = BytesFor(ctx, config, dtype, kPageSlots);
  total_pages_ = std::max<int64_t>(1, budget_bytes / page_bytes_);
}

int64_t PagePool::free_pages() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return total_pages_ - lent_;
}

absl::Status PagePool::Take(int64_t count, std::vector<Tensor>* pages) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (lent_ + count > total_pages_) {
      return absl::ResourceExhaustedError(absl::StrCat("no room for ", count * kPageSlots,
                                                       " more tokens of private context: ", total_pages_ - lent_,
                                                       " of ", total_pages_, " pages are free"));
    }
    lent_ += count;
  }
  for (int64_t i = 0; i < count; ++i) {
    Tensor page = Tensor::TryEmpty(ctx_.pool(), dtype_, shape_);
    if (!page) {
      pages->resize(pages->size() - static_cast<size_t>(i));
      std::lock_guard<std::mutex> lock(mutex_);
      lent_ -= count;
      return absl::ResourceExhaustedError(absl::StrCat("the device has no memory left for ", count * kPageSlots,
                                                       " more tokens of private context: try again later"));
    }
    pages->push_back(std::move(page));
  }
  return absl::OkStatus();
}

void PagePool::Return(std::vector<Tensor> pages) {
  const int64_t count = static_cast<int64_t>(pages.size());
  pages.clear();  // before they count as free
  std::lock_guard<std::mutex> lock(mutex_);
  lent_ -= count;
}

std::shared_ptr<const Memory> PagePool::Fitting(std::shared_ptr<const Memory> memory) {
  // Elsewhere memories are read as they lie.
  if (!ctx_.backend->fused().has_steps() || IsPacked(*memory, dtype_)) return memory;
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(copies_, [](const auto& entry) { return entry.second.of.expired() || entry.second.copy.expired(); });
  if (auto found = copies_.find(memory.get()); found != copies_.end()) {
    if (std::shared_ptr<const Memory> copy = found->second.copy.lock()) return copy;
  }
  std::shared_ptr<const Memory> copy = PackMemory(ctx_, *memory, dtype_);
  if (copy) copies_[memory.get()] = {memory, copy};
  return copy;
}

uint64_t SequenceState::NextId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

SequenceState::SequenceState(std::vector<std::shared_ptr<const Memory>> memories, PagePool* pool)
    : memories_(std::move(memories)), pool_(pool) {
  for (auto& memory : memories_) {
    if (pool) {
      std::shared_ptr<const Memory> fitting = pool->Fitting(memory);
      fits_ = fits_ && fitting != nullptr;
      if (fitting) memory = std::move(fitting);
    }
    start_position_ += memory->next_position;
    if (memory->slots == 0) continue;
    std::optional<KvLayers> layers = LayersOf(*memory);
    layered_ = layered_ && layers.has_value();
    if (layered_) memory_layers_.push_back(*std::move(layers));
  }
}

SequenceState::~SequenceState() {
  if (pool_) pool_->Return(std::move(pages_));
}

int64_t SequenceState::stored_slots() const {
  int64_t slots = 0;
  for (const auto& memory : memories_) slots += memory->slots;
  return slots;
}

absl::Status SequenceState::Reserve(int64_t count) {
  STILLHOUSE_CHECK(pool_ != nullptr);
  if (!fits_) {
    return absl::ResourceExhaustedError(
        "the device has no memory left for a copy of the cache in the layout that queries read: try again later");
  }
  const int64_t wanted = (rows_ + count + PagePool::kPageSlots - 1) / PagePool::kPageSlots;
  const int64_t missing = wanted - pages();
  return missing > 0 ? pool_->Take(missing, &pages_) : absl::OkStatus();
}

std::vector<SequenceState::Run> SequenceState::OwnRuns(int64_t layer) const {
  std::vector<Run> runs;
  for (int64_t begin = 0; begin < rows_; begin += PagePool::kPageSlots) {
    const Tensor page = pages_[static_cast<size_t>(begin / PagePool::kPageSlots)].Select(0, layer);
    const int64_t filled = std::min(rows_ - begin, PagePool::kPageSlots);
    runs.push_back({page.Select(0, 0).Slice(1, 0, filled), page.Select(0, 1).Slice(1, 0, filled)});
  }
  return runs;
}

void SequenceState::AddOwnLayers(std::vector<KvLayers>* runs) const {
  for (int64_t begin = 0; begin < rows_; begin += PagePool::kPageSlots) {
    const Tensor& page = pages_[static_cast<size_t>(begin / PagePool::kPageSlots)];
    const Tensor first = page.Select(0, 0).Slice(2, 0, std::min(rows_ - begin, PagePool::kPageSlots));
    runs->push_back({first.Select(0, 0), first.Select(0, 1), Tensor(), page.stride(0), page.stride(0), 0, false});
  }
}

void SequenceState::AddPlaces(int64_t count, std::vector<int64_t>* places) const {
  for (int64_t slot = rows_; slot < rows_ + count; ++slot) {
    const size_t index = static_cast<size_t>(slot / PagePool::kPageSlots);
    STILLHOUSE_CHECK(index < pages_.size()) << "rows without Reserve";
    const Tensor& page = pages_[index];
    const int64_t bytes = BlockBytes(page.dtype());
    const int64_t k = reinterpret_cast<int64_t>(page.raw()) + slot % PagePool::kPageSlots * page.stride(3) * bytes;
    places->push_back(k);
    places->push_back(k + page.stride(1) * bytes);
  }
}

void SequenceState::Append(const Context& ctx, int64_t layer, const Tensor& k, const Tensor& v, int64_t row_begin,
                           int64_t count) {
  int64_t slot = rows_;
  while (count > 0) {
    const int64_t in_page = slot % PagePool::kPageSlots;
    const int64_t n = std::min(count, PagePool::kPageSlots - in_page);
    const size_t index = static_cast<size_t>(slot / PagePool::kPageSlots);
    STILLHOUSE_CHECK(index < pages_.size()) << "Append without Reserve";
    const Tensor page = pages_[index].Select(0, layer);
    CopyRows(ctx, {k, page.Select(0, 0), row_begin, n, in_page});
    CopyRows(ctx, {v, page.Select(0, 1), row_begin, n, in_page});
    slot += n;
    row_begin += n;
    count -= n;
  }
}

void SequenceState::Truncate(int64_t rows) {
  STILLHOUSE_CHECK(0 <= rows && rows <= rows_);
  rows_ = rows;
  id_ = NextId();
  if (!pool_) return;
  const int64_t keep = (rows + PagePool::kPageSlots - 1) / PagePool::kPageSlots;
  std::vector<Tensor> back(pages_.begin() + keep, pages_.end());
  pages_.resize(static_cast<size_t>(keep));
  pool_->Return(std::move(back));
}

std::shared_ptr<Memory> SequenceState::Freeze(const Context& ctx, const ModelConfig& config) const {
  STILLHOUSE_CHECK(pool_ != nullptr);
  auto memory = std::make_shared<Memory>();
  memory->slots = rows_;
  memory->next_position = next_position();
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    LayerKv kv;  // tensors of their own: a tape watches whole buffers
    kv.k = ctx.EmptyF32({config.kv_heads, rows_, config.head_dim});
    kv.v = ctx.EmptyF32({config.kv_heads, rows_, config.head_dim});
    int64_t slot = 0;
    for (const Run& run : OwnRuns(layer)) {
      const int64_t n = run.k.dim(1);
      CopySlots(ctx, run.k, kv.k.Slice(1, slot, slot + n));
      CopySlots(ctx, run.v, kv.v.Slice(1, slot, slot + n));
      slot += n;
    }
    memory->layers.push_back(std::move(kv));
  }
  return memory;
}

}  // namespace stillhouse
