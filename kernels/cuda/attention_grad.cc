// Attention's gradients on the GPU: which tiles of queries and of slots are worked on, and the launches.
#include <algorithm>
#include <map>
#include <numeric>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/attention_tables.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/ops/attention.h"

namespace stillhouse::cuda {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

const Tensor& At(const std::vector<Tensor>& list, size_t i) {
  static const Tensor* none = new Tensor();
  return i < list.size() ? list[i] : *none;
}

class Backward {
 public:
  Backward(Backend& backend, const AttentionGradArgs& args)
      : backend_(backend),
        device_(DeviceOf(backend)),
        stream_(device_.Use()),
        args_(args),
        segments_(*args.segments),
        sequences_(*args.sequences) {
    t_.rows = args.q.dim(0);
    t_.heads = static_cast<int32_t>(args.q.dim(1));
    t_.width = static_cast<int32_t>(args.q.dim(2));
    t_.kv_heads = static_cast<int32_t>(args.k ? args.k.dim(1) : segments_.at(0).k.dim(0));
    t_.scale = args.scale;
    STILLHOUSE_CHECK(t_.width <= kAttentionMaxWidth) << "heads wider than 256: " << t_.width;
    group_ = t_.heads / t_.kv_heads;
    tile_ = AttentionGradTile();
    step_ = AttentionGradStep(t_.width);
    Place(args.q, &t_.q, &t_.q_row, &t_.q_head);
    Place(args.out, &t_.out, &t_.out_row, &t_.out_head);
    Place(args.dout, &t_.dout, &t_.dout_row, &t_.dout_head);
    Place(args.lse, &t_.lse, &t_.lse_row, &t_.lse_head);
    t_.vector = IsVector(args.q, {0, 1}) && IsVector(args.dout, {0, 1});
    if (args.dq) {
      t_.dq = args.dq.f32();
      t_.dq_row = args.dq.stride(0);
      t_.dq_head = args.dq.stride(1);
    }
  }

  void Run() {
    if (t_.rows == 0) return;
    AddRuns();
    if (args_.dq) AddQueryItems();
    AddSlotItems();
    if (items_.empty() && slot_items_.empty()) return;
    TableUpload tables;
    const size_t runs = tables.Add(runs_), grads = tables.Add(grads_), rows = tables.Add(rows_),
                 items = tables.Add(items_), slot_items = tables.Add(slot_items_), sums = tables.Add(sums_);
    tables.Upload(backend_);
    const Tensor delta = Tensor::Empty(backend_.pool(), DType::kF32, {t_.rows, t_.heads});
    t_.delta = delta.f32();
    LaunchAttentionDelta(t_, stream_);
    AttentionItems query_items;
    query_items.runs = tables.At<AttentionRun>(runs);
    query_items.rows = tables.At<int32_t>(rows);
    query_items.items = tables.At<AttentionItem>(items);
    query_items.count = static_cast<int32_t>(items_.size());
    LaunchAttentionGradQ(t_, query_items, stream_);
    Tensor partials;
    if (partials_ > 0) {
      partials = Tensor::Empty(backend_.pool(), DType::kF32, {partials_ * t_.kv_heads * AttentionGradBlock(t_.width)});
    }
    float* const partial = partials ? partials.f32() : nullptr;
    LaunchAttentionGradKv(t_, query_items.runs, tables.At<AttentionRunGrad>(grads), query_items.rows,
                          tables.At<AttentionSlotItem>(slot_items), static_cast<int32_t>(slot_items_.size()), partial,
                          stream_);
    LaunchAttentionGradSum(t_, query_items.runs, tables.At<AttentionRunGrad>(grads), tables.At<AttentionSlotSum>(sums),
                           static_cast<int32_t>(sums_.size()), partial, stream_);
  }

 private:
  static void Place(const Tensor& t, const float** data, int64_t* row, int64_t* head) {
    *data = t.f32();
    *row = t.stride(0);
    *head = t.stride(1);
  }

  // A run and who sees it: rows [rows, …) as in AttentionItem.
  struct Seen {
    int32_t run;
    int32_t rows;
    int64_t row_count;
  };

  // Runs that want gradients: every segment once, every sequence's own rows.
  void AddRuns() {
    std::vector<std::vector<int32_t>> users(segments_.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].row_count == 0) continue;
      for (int32_t s : sequences_[i].segments) users[s].push_back(static_cast<int32_t>(i));
    }
    std::map<std::vector<int32_t>, std::pair<int32_t, int64_t>> lists;  // of rows, by users
    for (size_t s = 0; s < segments_.size(); ++s) {
      const KvSegment& segment = segments_[s];
      AttentionRunGrad grad;
      const Tensor &dk = At(args_.dsegment_k, s), &dv = At(args_.dsegment_v, s), &dbeta = At(args_.dsegment_beta, s);
      const bool wanted = (dk || dv || dbeta) && segment.k.dim(1) > 0 && !users[s].empty();
      if (dk) SetK(&grad, dk.f32(), dk.stride(0), dk.stride(1));
      if (dv) SetV(&grad, dv.f32(), dv.stride(0), dv.stride(1));
      if (dbeta) {
        grad.dbeta = dbeta.f32();
        grad.dbeta_head = dbeta.stride(0);
      }
      if (wanted) {
        const auto [list, added] = lists.try_emplace(users[s], 0, 0);
        if (added) list->second = AddRows(users[s]);
        seen_.push_back({static_cast<int32_t>(s), list->second.first, list->second.second});
      }
      STILLHOUSE_CHECK(segment.k.dim(1) == 0 || segment.k.dtype() == DType::kF32) << "gradients are of f32 memories";
      runs_.push_back(SegmentRun(segment));
      grads_.push_back(grad);
    }
    if (!args_.k) return;
    const AttentionRun own = OwnRun(args_.k, args_.v);
    for (const AttentionSequence& sequence : sequences_) {
      if (sequence.row_count == 0) continue;
      AttentionRunGrad grad;
      if (args_.dk) {
        SetK(&grad, args_.dk.f32() + sequence.row_begin * args_.dk.stride(0), args_.dk.stride(1), args_.dk.stride(0));
      }
      if (args_.dv) {
        SetV(&grad, args_.dv.f32() + sequence.row_begin * args_.dv.stride(0), args_.dv.stride(1), args_.dv.stride(0));
      }
      const int32_t run = static_cast<int32_t>(runs_.size());
      if (args_.dk || args_.dv) seen_.push_back({run, ~static_cast<int32_t>(sequence.row_begin), sequence.row_count});
      runs_.push_back(OwnRows(own, sequence.row_begin, sequence.row_count, sizeof(float)));
      grads_.push_back(grad);
    }
  }

  static void SetK(AttentionRunGrad* grad, float* data, int64_t head, int64_t row) {
    grad->dk = data;
    grad->dk_head = head;
    grad->dk_row = row;
  }
  static void SetV(AttentionRunGrad* grad, float* data, int64_t head, int64_t row) {
    grad->dv = data;
    grad->dv_head = head;
    grad->dv_row = row;
  }

  // The rows of all users, one after another: as consecutive rows where they are.
  std::pair<int32_t, int64_t> AddRows(const std::vector<int32_t>& users) {
    int64_t count = 0;
    bool consecutive = true;
    for (int32_t user : users) {
      consecutive = consecutive && sequences_[user].row_begin == sequences_[users[0]].row_begin + count;
      count += sequences_[user].row_count;
    }
    if (consecutive) return {~static_cast<int32_t>(sequences_[users[0]].row_begin), count};
    const int32_t place = static_cast<int32_t>(rows_.size());
    for (int32_t user : users) {
      for (int64_t r = 0; r < sequences_[user].row_count; ++r) {
        rows_.push_back(static_cast<int32_t>(sequences_[user].row_begin + r));
      }
    }
    return {place, count};
  }

  // Tiles of queries over all that they see. A sequence's runs follow one another in the table: copies, where need be.
  void AddQueryItems() {
    int32_t own = static_cast<int32_t>(segments_.size());
    const int64_t heads = std::min<int64_t>(group_, tile_), tile_rows = std::max<int64_t>(1, tile_ / group_);
    for (const AttentionSequence& sequence : sequences_) {
      if (sequence.row_count == 0) continue;
      const int32_t first = static_cast<int32_t>(runs_.size());
      int64_t slots = 0;
      for (int32_t s : sequence.segments) {
        if (segments_[s].k.dim(1) == 0) continue;
        runs_.push_back(runs_[s]);
        slots += segments_[s].k.dim(1);
      }
      if (args_.k) {
        const AttentionRun run = runs_[own++];
        runs_.push_back(run);
      }
      for (int64_t row = 0; row < sequence.row_count; row += tile_rows) {
        for (int64_t head = 0; head < group_; head += heads) {
          AttentionItem item;
          item.run = first;
          item.row_count = static_cast<int32_t>(std::min(tile_rows, sequence.row_count - row));
          item.slots = static_cast<int32_t>(slots + (args_.k ? row + item.row_count : 0));
          item.rows = ~static_cast<int32_t>(sequence.row_begin + row);
          item.causal_limit = static_cast<int32_t>(row + 1);
          item.head_begin = static_cast<int32_t>(head);
          item.head_count = static_cast<int32_t>(std::min(heads, group_ - head));
          if (item.slots > 0) items_.push_back(item);
        }
      }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return a.slots > b.slots; });
  }

  // Tiles of slots over all rows that see them, in parts where there would be too few blocks.
  void AddSlotItems() {
    int64_t steps = 0;
    for (const Seen& seen : seen_) {
      for (int64_t slot = 0; slot < runs_[seen.run].slots; slot += tile_)
        steps += CeilDiv(Rows(seen, slot), StepRows());
    }
    // Two waves of blocks, each of at least two steps.
    const int64_t part = std::max<int64_t>(2, CeilDiv(steps * t_.kv_heads, 2 * device_.multiprocessors())) * StepRows();
    for (const Seen& seen : seen_) {
      const bool causal = runs_[seen.run].causal;
      for (int64_t slot = 0; slot < runs_[seen.run].slots; slot += tile_) {
        const int64_t count = Rows(seen, slot), first = causal ? slot : 0;
        const int64_t parts = CeilDiv(count, part), rows = CeilDiv(count, parts);
        if (parts > 1) {
          sums_.push_back({seen.run, static_cast<int32_t>(slot), static_cast<int32_t>(partials_),
                           static_cast<int32_t>(CeilDiv(count, rows))});
        }
        for (int64_t row = 0; row < count; row += rows) {
          AttentionSlotItem item;
          item.run = seen.run;
          item.slot = static_cast<int32_t>(slot);
          const int32_t at = static_cast<int32_t>(first + row);
          item.rows = seen.rows < 0 ? seen.rows - at : seen.rows + at;
          item.row_count = static_cast<int32_t>(std::min(rows, count - row));
          item.causal_limit = at + 1;
          item.partial = parts > 1 ? static_cast<int32_t>(partials_++) : -1;
          slot_items_.push_back(item);
        }
      }
    }
    std::stable_sort(slot_items_.begin(), slot_items_.end(),
                     [](const AttentionSlotItem& a, const AttentionSlotItem& b) { return a.row_count > b.row_count; });
  }

  // Rows that see the tile of slots from `slot` on: of a sequence's own, those from there on.
  int64_t Rows(const Seen& seen, int64_t slot) const {
    return runs_[seen.run].causal ? seen.row_count - slot : seen.row_count;
  }
  // Rows of about one step of queries.
  int64_t StepRows() const { return std::max<int64_t>(1, step_ / group_); }

  Backend& backend_;
  Device& device_;
  cudaStream_t stream_;
  const AttentionGradArgs& args_;
  const std::vector<KvSegment>& segments_;
  const std::vector<AttentionSequence>& sequences_;
  AttentionGradTensors t_;
  int64_t group_ = 1, tile_ = 32, step_ = 64;
  std::vector<AttentionRun> runs_;  // segments, own rows, then copies in the order of sequences
  std::vector<AttentionRunGrad> grads_;
  std::vector<Seen> seen_;
  std::vector<int32_t> rows_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionSlotItem> slot_items_;
  std::vector<AttentionSlotSum> sums_;
  int64_t partials_ = 0;  // blocks
};

}  // namespace

void AttentionGrad(Backend& backend, const AttentionGradArgs& args) { Backward(backend, args).Run(); }

}  // namespace stillhouse::cuda
