// Attention, forward. Long sequences go tile of queries by tile of queries, each over everything that its rows see (Dao
// et al. 2022). Sequences of a few rows are taken together: what several of them list is read once for all, split over
// ranges of slots (Dao et al. 2023), and the partial softmaxes are merged.
#include "kernels/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm.h"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Sequences of fewer rows are batched by what they attend to.
constexpr int64_t kFewRows = 8;
// Slots of one task of a batch: fixed, so that sums do not depend on the number of threads.
constexpr int64_t kRangeSlots = 256;
// Below this many queries, scores come from dot products; from here on, from products of tiles.
constexpr int64_t kPanelQueries = 12;
// Products (of one multiply and add) below which a call is not worth handing to other threads.
constexpr int64_t kSerialWork = 1 << 17;

// The running softmax of a set of queries on one KV head. o is unnormalised; ℓ is kept apart for memory and the rest.
struct Running {
  float* m = nullptr;
  float* l_memory = nullptr;
  float* l_rest = nullptr;
  float* o = nullptr;  // [queries, width]
};

// Floats of a Running, and its parts of one block.
int64_t RunningFloats(int64_t queries, int64_t width) { return queries * (width + 3); }
Running RunningAt(float* block, int64_t queries, int64_t width) {
  return {block, block + queries, block + 2 * queries, block + 3 * queries};
}

void Clear(const Running& state, int64_t queries, int64_t width) {
  std::fill(state.m, state.m + queries, -kInf);
  std::fill(state.l_memory, state.o + queries * width, 0.0f);
}

// Queries of one KV head (a row's `group` heads next to each other), and their softmax over runs of slots. Lives on the
// stack of one task; its memory is the thread's scratch.
class QueryTile {
 public:
  QueryTile(const SimdTable& simd, const AttentionShape& shape, float scale, int64_t rows)
      : simd_(simd),
        group_(shape.group),
        width_(shape.width),
        scale_(scale),
        queries_(rows * shape.group),
        panel_(queries_ >= kPanelQueries),
        padded_(panel_ ? RoundUp(queries_, simd.tile_cols) : queries_) {
    const int64_t step = panel_ ? kSlotTile : kRangeSlots;
    float* memory =
        ThreadScratch(ScratchSlot::kAttention, RunningFloats(padded_, width_) + padded_ * (2 * width_ + step + 2));
    state_ = RunningAt(memory, padded_, width_);
    memory += RunningFloats(padded_, width_);
    q_ = memory;
    q_columns_ = q_ + padded_ * width_;
    scores_ = q_columns_ + padded_ * width_;
    factor_ = scores_ + padded_ * step;
    limit_ = reinterpret_cast<int32_t*>(factor_ + padded_);
    Clear(state_, padded_, width_);
  }

  // Copies a row's heads of KV head `kv` to place `index` of the tile.
  void SetRow(int64_t index, const Tensor& q, int64_t row, int64_t kv) {
    for (int64_t g = 0; g < group_; ++g) {
      std::memcpy(q_ + (index * group_ + g) * width_, HeadOf(q, row, kv * group_ + g),
                  static_cast<size_t>(width_) * sizeof(float));
    }
  }

  // After the last SetRow.
  void Ready() {
    if (!panel_) return;
    std::memset(q_ + queries_ * width_, 0, static_cast<size_t>((padded_ - queries_) * width_) * sizeof(float));
    for (int64_t c = 0; c < padded_; c += simd_.tile_cols) {
      simd_.pack_transposed(q_ + c * width_, width_, simd_.tile_cols, width_, q_columns_ + c * width_);
    }
  }

  // Slots [begin, end) of a run that all queries see. `next` are the keys that will be visited after it.
  void Visit(const KvRun& run, int64_t begin, int64_t end, NextRows next = {}) {
    VisitCausal(run, begin, end, end, next);
  }

  // The same where row `index` of the tile sees the slots below first_limit + index.
  void VisitCausal(const KvRun& run, int64_t begin, int64_t end, int64_t first_limit, NextRows next = {}) {
    const int64_t step = panel_ ? kSlotTile : kRangeSlots;
    for (int64_t j = begin; j < end; j += step) {
      const int64_t slots = std::min(step, end - j);
      if (panel_) {
        PanelStep(run, j, slots, first_limit);
      } else {
        // Whole steps only: a next one that is shorter would be read past its end.
        const bool more = j + 2 * step <= end;
        RowStep(run, j, slots, first_limit, more ? NextRows{run.k + (j + step) * run.k_row, run.k_row} : next);
      }
    }
  }

  // Adds a partial softmax of the same queries: `from` holds them from `offset` on.
  void Merge(const Running& from, int64_t offset) {
    for (int64_t i = 0; i < queries_; ++i) {
      const int64_t at = offset + i;
      SoftmaxState<float> a{state_.m[i], state_.l_memory[i]};
      SoftmaxState<float> rest{state_.m[i], state_.l_rest[i]};
      const MergeWeights<float> w = MergeSoftmax(a, {from.m[at], from.l_memory[at]});
      MergeSoftmax(rest, {from.m[at], from.l_rest[at]});
      state_.m[i] = a.m;
      state_.l_memory[i] = a.l;
      state_.l_rest[i] = rest.l;
      float* o = state_.o + i * width_;
      const float* other = from.o + at * width_;
      for (int64_t c = 0; c < width_; ++c) o[c] = w.first * o[c] + w.second * other[c];
    }
  }

  // Leaves the partial softmax at `to`, which holds `total` queries, from `offset` on.
  void Save(const Running& to, int64_t offset) const {
    std::copy(state_.m, state_.m + queries_, to.m + offset);
    std::copy(state_.l_memory, state_.l_memory + queries_, to.l_memory + offset);
    std::copy(state_.l_rest, state_.l_rest + queries_, to.l_rest + offset);
    std::copy(state_.o, state_.o + queries_ * width_, to.o + offset * width_);
  }

  // Writes the results of a row; returns the share of the softmax on memories, summed over the group.
  float Finish(int64_t index, int64_t row, int64_t kv, const AttentionArgs& args) const {
    float stored = 0.0f;
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t i = index * group_ + g, head = kv * group_ + g;
      const SoftmaxState<float> state{state_.m[i], state_.l_memory[i] + state_.l_rest[i]};
      const float inverse = InverseSum(state);
      const float* o = state_.o + i * width_;
      float* out = HeadOf(args.out, row, head);
      for (int64_t c = 0; c < width_; ++c) out[c] = o[c] * inverse;
      if (args.lse) *HeadOf(args.lse, row, head) = LogSumExp(state);
      stored += state_.l_memory[i] * inverse;
    }
    return stored;
  }

 private:
  void PanelStep(const KvRun& run, int64_t j, int64_t slots, int64_t first_limit) {
    const float* k = run.k + j * run.k_row;
    const float* v = run.v + j * run.v_row;
    // Sᵀ = K · Qᵀ, a block of columns at a time: the block of Qᵀ stays in the first-level cache.
    for (int64_t c = 0; c < padded_; c += simd_.tile_cols) {
      GemmNN(simd_, slots, simd_.tile_cols, width_, scale_, k, run.k_row, q_columns_ + c * width_, simd_.tile_cols,
             scores_ + c, padded_);
    }
    const bool causal = first_limit < j + slots;
    if (causal) {
      for (int64_t i = 0; i < padded_; ++i) limit_[i] = static_cast<int32_t>(first_limit + i / group_ - j);
    }
    float* l = run.memory ? state_.l_memory : state_.l_rest;
    float* l_other = run.memory ? state_.l_rest : state_.l_memory;
    simd_.attention_panel_softmax(scores_, padded_, slots, padded_, run.beta ? run.beta + j : nullptr,
                                  causal ? limit_ : nullptr, state_.m, l, factor_);
    for (int64_t i = 0; i < queries_; ++i) {
      if (factor_[i] == 1.0f) continue;
      l_other[i] *= factor_[i];
      simd_.scale(factor_[i], state_.o + i * width_, width_);
    }
    GemmTN(simd_, queries_, width_, slots, 1.0f, scores_, padded_, v, run.v_row, state_.o, width_, true);
  }

  void RowStep(const KvRun& run, int64_t j, int64_t slots, int64_t first_limit, NextRows next_keys) {
    const float* beta = run.beta ? run.beta + j : nullptr;
    simd_.attention_scores(q_, width_, queries_, run.k + j * run.k_row, run.k_row, slots, width_, scale_, beta, scores_,
                           kRangeSlots, {run.v + j * run.v_row, run.v_row});
    float* l = run.memory ? state_.l_memory : state_.l_rest;
    float* l_other = run.memory ? state_.l_rest : state_.l_memory;
    for (int64_t i = 0; i < queries_; ++i) {
      float* s = scores_ + i * kRangeSlots;
      const int64_t visible = std::clamp<int64_t>(first_limit + i / group_ - j, 0, slots);
      if (first_limit >= j + slots || visible == slots) {
        factor_[i] = simd_.attention_row_softmax(s, slots, state_.m + i, l + i);
      } else {
        factor_[i] = simd_.attention_row_softmax(s, visible, state_.m + i, l + i);
        std::fill(s + visible, s + slots, 0.0f);
      }
      if (factor_[i] == 1.0f) continue;
      l_other[i] *= factor_[i];
      simd_.scale(factor_[i], state_.o + i * width_, width_);
    }
    simd_.attention_values(scores_, kRangeSlots, queries_, run.v + j * run.v_row, run.v_row, slots, width_, state_.o,
                           width_, next_keys);
  }

  const SimdTable& simd_;
  const int64_t group_, width_;
  const float scale_;
  const int64_t queries_;
  const bool panel_;
  const int64_t padded_;
  Running state_;
  float* q_;          // [padded, width]
  float* q_columns_;  // blocks of tile_cols queries, each [width, tile_cols]
  float* scores_;
  float* factor_;
  int32_t* limit_;
};

// One tile of a sequence that is worked on alone.
struct LongTile {
  const AttentionSequence* sequence;
  int64_t begin, end;  // rows within the sequence
  int64_t seen;        // slots and rows that the last row sees: the cost of a row
};

// Consecutive slots that the same few-row sequences attend to, in one or several segments.
struct Chain {
  std::vector<int32_t> users;  // indexes of sequences; one that lists a segment twice is here twice
  std::vector<int32_t> segments;
  int64_t slots = 0;
  int64_t rows = 0;
  int64_t partials = 0;  // index of its first partial block
  bool alone = false;    // of one sequence, and short: read where that sequence's results are put together
  int64_t ranges() const { return (slots + kRangeSlots - 1) / kRangeSlots; }
};

class Forward {
 public:
  Forward(Backend& backend, const AttentionArgs& args)
      : args_(args),
        segments_(*args.segments),
        sequences_(*args.sequences),
        shape_(args.q, args.k, segments_),
        simd_(SimdOf(backend)),
        threads_(backend.threads()) {
    Plan();
    if (args.stored_mass) mass_.assign(static_cast<size_t>(shape_.kv_heads * shape_.rows), 0.0f);
    if (partial_floats_ > 0) partial_ = Tensor::Empty(backend.pool(), DType::kF32, {partial_floats_});
  }

  void Run() {
    // Longest first: the last tasks to be handed out are short.
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [](const LongTile& a, const LongTile& b) { return a.seen > b.seen; });
    const int64_t kv_heads = shape_.kv_heads;
    const int64_t long_tasks = static_cast<int64_t>(tiles_.size()) * kv_heads;
    const int64_t range_tasks = static_cast<int64_t>(ranges_.size()) * kv_heads;
    For(long_tasks + range_tasks, work_, [&](int64_t task) {
      if (task < long_tasks) {
        RunLong(tiles_[task / kv_heads], task % kv_heads);
      } else {
        RunRange(ranges_[(task - long_tasks) / kv_heads], (task - long_tasks) % kv_heads);
      }
    });
    For(static_cast<int64_t>(few_.size()) * kv_heads, merge_work_,
        [&](int64_t task) { FinishFew(few_[task / kv_heads], task % kv_heads); });
    for (int64_t r = 0; r < shape_.rows && args_.stored_mass; ++r) {
      float sum = 0.0f;
      for (int64_t kv = 0; kv < kv_heads; ++kv) sum += mass_[kv * shape_.rows + r];
      args_.stored_mass.f32()[r] = sum / static_cast<float>(shape_.heads);
    }
  }

 private:
  // Users [user_begin, user_end) of a chain on one range of its slots.
  struct Range {
    int32_t chain;
    int64_t index;
    int64_t user_begin, user_end;
    int64_t row_begin;  // rows of the chain's users before user_begin
  };

  int64_t SlotsOf(const AttentionSequence& sequence) const {
    int64_t slots = 0;
    for (int32_t s : sequence.segments) slots += segments_[s].k.dim(1);
    return slots;
  }

  void Plan() {
    const int64_t tile_rows = TileRows(shape_.group);
    std::vector<std::vector<int32_t>> users(segments_.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const AttentionSequence& sequence = sequences_[i];
      if (sequence.row_count == 0) continue;
      const int64_t slots = SlotsOf(sequence);
      work_ += sequence.row_count * (slots + sequence.row_count / 2 + 1) * 2 * shape_.heads * shape_.width;
      if (sequence.row_count < kFewRows && slots > 0) {
        few_.push_back(static_cast<int32_t>(i));
        for (int32_t s : sequence.segments) users[s].push_back(static_cast<int32_t>(i));
        continue;
      }
      for (int64_t begin = 0; begin < sequence.row_count; begin += tile_rows) {
        const int64_t end = std::min(sequence.row_count, begin + tile_rows);
        tiles_.push_back({&sequence, begin, end, slots + (args_.k ? end : 0)});
      }
    }
    // Segments in the order in which sequences list them; those of the same users join one chain.
    for (int32_t i : few_) {
      for (int32_t s : sequences_[i].segments) {
        if (users[s].empty()) continue;
        auto chain = std::find_if(chains_.begin(), chains_.end(), [&](const Chain& c) { return c.users == users[s]; });
        if (chain == chains_.end()) {
          chain = chains_.insert(chains_.end(), Chain());
          chain->users = std::move(users[s]);
          for (int32_t user : chain->users) chain->rows += sequences_[user].row_count;
        }
        chain->segments.push_back(s);
        chain->slots += segments_[s].k.dim(1);
        users[s].clear();
      }
    }
    const int64_t tile = TileRows(shape_.group);
    for (size_t c = 0; c < chains_.size(); ++c) {
      Chain& chain = chains_[c];
      chain.alone = chain.users.size() == 1 && chain.slots <= kRangeSlots;
      if (chain.alone) {
        merge_work_ += chain.slots * chain.rows * 2 * shape_.heads * shape_.width;
        continue;
      }
      chain.partials = partial_floats_;
      partial_floats_ += chain.ranges() * shape_.kv_heads * RunningFloats(chain.rows * shape_.group, shape_.width);
      merge_work_ += chain.ranges() * chain.rows * shape_.heads * shape_.width;
      int64_t row = 0;
      for (size_t begin = 0; begin < chain.users.size();) {
        size_t end = begin;
        int64_t rows = 0;
        while (end < chain.users.size() && (end == begin || rows + sequences_[chain.users[end]].row_count <= tile)) {
          rows += sequences_[chain.users[end++]].row_count;
        }
        for (int64_t r = 0; r < chain.ranges(); ++r) {
          ranges_.push_back({static_cast<int32_t>(c), r, static_cast<int64_t>(begin), static_cast<int64_t>(end), row});
        }
        row += rows;
        begin = end;
      }
    }
  }

  template <typename Body>
  void For(int64_t tasks, int64_t work, const Body& body) {
    if (work < kSerialWork) {
      for (int64_t task = 0; task < tasks; ++task) body(task);
    } else {
      threads_.ParallelFor(tasks, [&](int64_t task, int) { body(task); });
    }
  }

  Running Partial(const Chain& chain, int64_t range, int64_t kv) const {
    const int64_t queries = chain.rows * shape_.group;
    const int64_t block = RunningFloats(queries, shape_.width);
    return RunningAt(partial_.f32() + chain.partials + (range * shape_.kv_heads + kv) * block, queries, shape_.width);
  }

  void VisitOwn(QueryTile& tile, const AttentionSequence& sequence, int64_t begin, int64_t end, int64_t kv) const {
    if (!args_.k) return;
    const KvRun own = OwnRun(args_.k, args_.v, sequence.row_begin, end, kv);
    tile.VisitCausal(own, 0, end, begin + 1);
  }

  void FinishRows(const QueryTile& tile, int64_t row_begin, int64_t rows, int64_t kv) {
    for (int64_t i = 0; i < rows; ++i) {
      const float stored = tile.Finish(i, row_begin + i, kv, args_);
      if (args_.stored_mass) mass_[kv * shape_.rows + row_begin + i] = stored;
    }
  }

  void RunLong(const LongTile& t, int64_t kv) {
    QueryTile tile(simd_, shape_, args_.scale, t.end - t.begin);
    const int64_t row_begin = t.sequence->row_begin + t.begin;
    for (int64_t i = 0; i < t.end - t.begin; ++i) tile.SetRow(i, args_.q, row_begin + i, kv);
    tile.Ready();
    for (int32_t s : t.sequence->segments) {
      const KvRun run = SegmentRun(segments_[s], kv);
      tile.Visit(run, 0, run.slots);
    }
    VisitOwn(tile, *t.sequence, t.begin, t.end, kv);
    FinishRows(tile, row_begin, t.end - t.begin, kv);
  }

  void RunRange(const Range& range, int64_t kv) {
    const Chain& chain = chains_[range.chain];
    int64_t rows = 0;
    for (int64_t u = range.user_begin; u < range.user_end; ++u) rows += sequences_[chain.users[u]].row_count;
    QueryTile tile(simd_, shape_, args_.scale, rows);
    int64_t index = 0;
    for (int64_t u = range.user_begin; u < range.user_end; ++u) {
      const AttentionSequence& sequence = sequences_[chain.users[u]];
      for (int64_t i = 0; i < sequence.row_count; ++i) tile.SetRow(index++, args_.q, sequence.row_begin + i, kv);
    }
    tile.Ready();
    const int64_t begin = range.index * kRangeSlots, end = begin + kRangeSlots;
    struct Piece {
      KvRun run;
      int64_t from, to;
    };
    Piece piece = {};
    int64_t offset = 0;
    for (int32_t s : chain.segments) {
      const int64_t slots = segments_[s].k.dim(1);
      const int64_t from = std::max<int64_t>(0, begin - offset), to = std::min(slots, end - offset);
      if (from < to) {
        const KvRun run = SegmentRun(segments_[s], kv);
        const bool ask = to - from >= piece.to - piece.from;
        tile.Visit(piece.run, piece.from, piece.to, ask ? NextRows{run.k + from * run.k_row, run.k_row} : NextRows());
        piece = {run, from, to};
      }
      offset += slots;
    }
    tile.Visit(piece.run, piece.from, piece.to);
    tile.Save(Partial(chain, range.index, kv), range.row_begin * shape_.group);
  }

  void FinishFew(int32_t index, int64_t kv) {
    const AttentionSequence& sequence = sequences_[index];
    QueryTile tile(simd_, shape_, args_.scale, sequence.row_count);
    for (int64_t i = 0; i < sequence.row_count; ++i) tile.SetRow(i, args_.q, sequence.row_begin + i, kv);
    tile.Ready();
    for (const Chain& chain : chains_) {
      if (chain.alone) {
        for (int32_t s : chain.segments) {
          if (chain.users[0] != index) break;
          const KvRun run = SegmentRun(segments_[s], kv);
          tile.Visit(run, 0, run.slots);
        }
        continue;
      }
      int64_t row = 0;
      for (int32_t user : chain.users) {
        for (int64_t r = 0; user == index && r < chain.ranges(); ++r) {
          tile.Merge(Partial(chain, r, kv), row * shape_.group);
        }
        row += sequences_[user].row_count;
      }
    }
    VisitOwn(tile, sequence, 0, sequence.row_count, kv);
    FinishRows(tile, sequence.row_begin, sequence.row_count, kv);
  }

  const AttentionArgs& args_;
  const std::vector<KvSegment>& segments_;
  const std::vector<AttentionSequence>& sequences_;
  const AttentionShape shape_;
  const SimdTable& simd_;
  ThreadPool& threads_;
  std::vector<LongTile> tiles_;
  std::vector<int32_t> few_;
  std::vector<Chain> chains_;
  std::vector<Range> ranges_;
  int64_t partial_floats_ = 0;
  int64_t work_ = 0, merge_work_ = 0;
  Tensor partial_;
  std::vector<float> mass_;  // [kv_heads, rows]
};

}  // namespace

void Attention(Backend& backend, const AttentionArgs& args) { Forward(backend, args).Run(); }

}  // namespace stillhouse::cpu
