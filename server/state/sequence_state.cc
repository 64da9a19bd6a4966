#include "server/state/sequence_state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/ops/elementwise.h"

namespace stillhouse {

PagePool::PagePool(const Context& ctx, const ModelConfig& config, int64_t budget_bytes)
    : ctx_(ctx), shape_{config.layers, 2, config.kv_heads, kPageSlots, config.head_dim} {
  ctx_.tape = nullptr;
  page_bytes_ = config.kv_bytes_per_slot() * kPageSlots;
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
  for (int64_t i = 0; i < count; ++i) pages->push_back(ctx_.EmptyF32(shape_));
  return absl::OkStatus();
}

void PagePool::Return(std::vector<Tensor> pages) {
  const int64_t count = static_cast<int64_t>(pages.size());
  pages.clear();  // before they count as free
  std::lock_guard<std::mutex> lock(mutex_);
  lent_ -= count;
}

SequenceState::SequenceState(std::vector<std::shared_ptr<const Memory>> memories, PagePool* pool)
    : memories_(std::move(memories)), pool_(pool) {
  for (const auto& memory : memories_) start_position_ += memory->next_position;
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
    LayerKv kv;
    kv.k = ctx.EmptyF32({config.kv_heads, rows_, config.head_dim});
    kv.v = ctx.EmptyF32({config.kv_heads, rows_, config.head_dim});
    int64_t slot = 0;
    for (const Run& run : OwnRuns(layer)) {
      const int64_t n = run.k.dim(1);
      ctx.backend->Copy(run.k, kv.k.Slice(1, slot, slot + n));
      ctx.backend->Copy(run.v, kv.v.Slice(1, slot, slot + n));
      slot += n;
    }
    memory->layers.push_back(std::move(kv));
  }
  return memory;
}

}  // namespace stillhouse
