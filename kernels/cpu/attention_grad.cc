// Attention, backward: weights are recomputed tile by tile from q, k and the saved log-sums (Dao et al. 2022).
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm.h"
#include "kernels/ops/attention.h"

namespace stillhouse::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Tasks per KV head: each sums keys' gradients of its own tiles in a buffer of its own; the buffers are then added in
// order. Fixed, so that the sums do not depend on the number of threads.
constexpr int64_t kSplits = 4;

// Where a task adds the gradients of a run's keys, values and biases (null: not wanted); rows of `width` floats.
struct KvSums {
  float* dk = nullptr;
  float* dv = nullptr;
  float* dbeta = nullptr;
};

struct Tile {
  const AttentionSequence* sequence;
  int64_t begin, end;  // rows within the sequence
};

class Backward {
 public:
  Backward(Backend& backend, const AttentionGradArgs& args)
      : args_(args),
        segments_(*args.segments),
        sequences_(*args.sequences),
        shape_(args.q, args.k, segments_),
        simd_(SimdOf(backend)),
        threads_(backend.threads()) {
    Plan();
    if (block_floats_ > 0) {
      sums_ = Tensor::Empty(backend.pool(), DType::kF32, {shape_.kv_heads * splits_ * block_floats_});
    }
  }

  void Run() {
    threads_.ParallelFor(shape_.kv_heads * splits_,
                         [&](int64_t task, int) { RunSplit(task % splits_, task / splits_); });
    threads_.ParallelFor(shape_.kv_heads, [&](int64_t kv, int) { AddSums(kv); });
  }

 private:
  // Offsets into a task's block, or −1 where nothing is wanted.
  struct Places {
    int64_t dk = -1, dv = -1, dbeta = -1;
  };

  int64_t Reserve(int64_t floats) {
    const int64_t at = block_floats_;
    block_floats_ += floats;
    return at;
  }

  static const Tensor& At(const std::vector<Tensor>& list, size_t i) {
    static const Tensor* none = new Tensor();
    return i < list.size() ? list[i] : *none;
  }

  void Plan() {
    // Tiles in order, cut into splits of about equal cost.
    const int64_t tile_rows = TileRows(shape_.group);
    std::vector<int64_t> cost;
    int64_t total = 0;
    for (const AttentionSequence& sequence : sequences_) {
      int64_t slots = 0;
      for (int32_t s : sequence.segments) slots += segments_[s].k.dim(1);
      for (int64_t begin = 0; begin < sequence.row_count; begin += tile_rows) {
        const int64_t end = std::min(sequence.row_count, begin + tile_rows);
        tiles_.push_back({&sequence, begin, end});
        total += (end - begin) * (slots + (args_.k ? end : 0));
        cost.push_back(total);
      }
    }
    splits_ = std::clamp<int64_t>(static_cast<int64_t>(tiles_.size()), 1, kSplits);
    split_begin_.assign(static_cast<size_t>(splits_ + 1), static_cast<int64_t>(tiles_.size()));
    split_begin_[0] = 0;
    for (int64_t s = 1, t = 0; s < splits_; ++s) {
      while (t < static_cast<int64_t>(tiles_.size()) && cost[t] * splits_ <= total * s) ++t;
      split_begin_[s] = t;
    }

    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t slots = segments_[s].k.dim(1);
      Places places;
      if (At(args_.dsegment_k, s)) places.dk = Reserve(slots * shape_.width);
      if (At(args_.dsegment_v, s)) places.dv = Reserve(slots * shape_.width);
      if (At(args_.dsegment_beta, s)) places.dbeta = Reserve(slots);
      segment_places_.push_back(places);
    }
    if (args_.k && args_.dk) own_places_.dk = Reserve(shape_.rows * shape_.width);
    if (args_.k && args_.dv) own_places_.dv = Reserve(shape_.rows * shape_.width);
  }

  float* Block(int64_t split, int64_t kv) const {
    return block_floats_ > 0 ? sums_.f32() + (kv * splits_ + split) * block_floats_ : nullptr;
  }

  KvSums SumsAt(float* block, const Places& places, int64_t row) const {
    KvSums sums;
    if (places.dk >= 0) sums.dk = block + places.dk + row * shape_.width;
    if (places.dv >= 0) sums.dv = block + places.dv + row * shape_.width;
    if (places.dbeta >= 0) sums.dbeta = block + places.dbeta + row;
    return sums;
  }

  void RunSplit(int64_t split, int64_t kv) {
    float* block = Block(split, kv);
    if (block) std::memset(block, 0, static_cast<size_t>(block_floats_) * sizeof(float));
    for (int64_t t = split_begin_[split]; t < split_begin_[split + 1]; ++t) RunTile(tiles_[t], kv, block);
  }

  void RunTile(const Tile& tile, int64_t kv, float* block) {
    const int64_t width = shape_.width, group = shape_.group;
    const int64_t queries = (tile.end - tile.begin) * group, padded = RoundUp(queries, simd_.tile_cols);
    float* memory = ThreadScratch(ScratchSlot::kAttention, padded * (5 * width + 2 * kSlotTile + 3));
    Work w;
    w.queries = queries;
    w.padded = padded;
    w.q = memory;
    w.dout = w.q + padded * width;
    w.q_columns = w.dout + padded * width;
    w.dout_columns = w.q_columns + padded * width;
    w.dq = w.dout_columns + padded * width;
    w.p = w.dq + padded * width;
    w.ds = w.p + padded * kSlotTile;
    w.lse = w.ds + padded * kSlotTile;
    w.delta = w.lse + padded;
    w.limit = reinterpret_cast<int32_t*>(w.delta + padded);
    std::memset(w.q, 0, static_cast<size_t>(2 * padded * width) * sizeof(float));
    std::memset(w.dq, 0, static_cast<size_t>(padded * width) * sizeof(float));
    std::fill(w.lse, w.lse + padded, kInf);  // no weight: also for rows that saw nothing
    std::fill(w.delta, w.delta + padded, 0.0f);
    const int64_t row_begin = tile.sequence->row_begin + tile.begin;
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t row = row_begin + i / group, head = kv * group + i % group;
      const float* dout = HeadOf(args_.dout, row, head);
      std::memcpy(w.q + i * width, HeadOf(args_.q, row, head), static_cast<size_t>(width) * sizeof(float));
      std::memcpy(w.dout + i * width, dout, static_cast<size_t>(width) * sizeof(float));
      const float lse = *HeadOf(args_.lse, row, head);
      if (lse > -kInf) {
        w.lse[i] = lse;
        w.delta[i] = simd_.dot(dout, HeadOf(args_.out, row, head), width);
      }
    }
    for (int64_t c = 0; c < padded; c += simd_.tile_cols) {
      simd_.pack_transposed(w.q + c * width, width, simd_.tile_cols, width, w.q_columns + c * width);
      simd_.pack_transposed(w.dout + c * width, width, simd_.tile_cols, width, w.dout_columns + c * width);
    }

    for (int32_t s : tile.sequence->segments) {
      Visit(w, SegmentRun(segments_[s], kv), SumsAt(block, segment_places_[s], 0), -1);
    }
    if (args_.k) {
      const KvRun own = OwnRun(args_.k, args_.v, tile.sequence->row_begin, tile.end, kv);
      Visit(w, own, SumsAt(block, own_places_, tile.sequence->row_begin), tile.begin + 1);
    }
    if (!args_.dq) return;
    for (int64_t i = 0; i < queries; ++i) {
      simd_.axpy(1.0f, w.dq + i * width, HeadOf(args_.dq, row_begin + i / group, kv * group + i % group), width);
    }
  }

  // Queries of a tile and what is computed of them; matrices are [padded, width] or blocks of columns.
  struct Work {
    int64_t queries, padded;
    float *q, *dout, *q_columns, *dout_columns, *dq;
    float *p, *ds;  // [slots, padded]
    float *lse, *delta;
    int32_t* limit;
  };

  // All slots of a run; row `index` of the tile sees the slots below first_limit + index (all, if first_limit < 0).
  void Visit(const Work& w, const KvRun& run, const KvSums& sums, int64_t first_limit) {
    const bool wanted = args_.dq || sums.dk || sums.dv || sums.dbeta;
    if (!wanted) return;
    const int64_t width = shape_.width, cols = simd_.tile_cols;
    for (int64_t j = 0; j < run.slots; j += kSlotTile) {
      const int64_t slots = std::min(kSlotTile, run.slots - j);
      const float* k = run.k + j * run.k_row;
      const float* v = run.v + j * run.v_row;
      for (int64_t c = 0; c < w.padded; c += cols) {
        GemmNN(simd_, slots, cols, width, args_.scale, k, run.k_row, w.q_columns + c * width, cols, w.p + c, w.padded);
        GemmNN(simd_, slots, cols, width, 1.0f, v, run.v_row, w.dout_columns + c * width, cols, w.ds + c, w.padded);
      }
      const bool causal = first_limit >= 0 && first_limit < j + slots;
      if (causal) {
        for (int64_t i = 0; i < w.padded; ++i) {
          w.limit[i] = static_cast<int32_t>(first_limit + i / shape_.group - j);
        }
      }
      simd_.attention_panel_grad(w.p, w.ds, w.padded, slots, w.padded, run.beta ? run.beta + j : nullptr,
                                 causal ? w.limit : nullptr, w.lse, w.delta, sums.dbeta ? sums.dbeta + j : nullptr);
      if (sums.dv) {
        GemmNN(simd_, slots, width, w.queries, 1.0f, w.p, w.padded, w.dout, width, sums.dv + j * width, width, true);
      }
      if (sums.dk) {
        GemmNN(simd_, slots, width, w.queries, args_.scale, w.ds, w.padded, w.q, width, sums.dk + j * width, width,
               true);
      }
      if (args_.dq) {
        GemmTN(simd_, w.queries, width, slots, args_.scale, w.ds, w.padded, k, run.k_row, w.dq, width, true);
      }
    }
  }

  // Adds `rows` rows of every split, in order, to a gradient.
  void AddRows(int64_t kv, int64_t place, int64_t rows, int64_t width, float* out, int64_t out_row) const {
    if (place < 0) return;
    for (int64_t split = 0; split < splits_; ++split) {
      const float* from = Block(split, kv) + place;
      for (int64_t r = 0; r < rows; ++r) simd_.axpy(1.0f, from + r * width, out + r * out_row, width);
    }
  }

  void AddSums(int64_t kv) const {
    if (block_floats_ == 0) return;
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t slots = segments_[s].k.dim(1);
      const Tensor &dk = At(args_.dsegment_k, s), &dv = At(args_.dsegment_v, s), &dbeta = At(args_.dsegment_beta, s);
      if (dk) AddRows(kv, segment_places_[s].dk, slots, shape_.width, HeadOf(dk, kv, 0), dk.stride(1));
      if (dv) AddRows(kv, segment_places_[s].dv, slots, shape_.width, HeadOf(dv, kv, 0), dv.stride(1));
      if (dbeta) AddRows(kv, segment_places_[s].dbeta, 1, slots, HeadOf(dbeta, kv, 0), 0);
    }
    if (own_places_.dk >= 0) {
      AddRows(kv, own_places_.dk, shape_.rows, shape_.width, HeadOf(args_.dk, 0, kv), args_.dk.stride(0));
    }
    if (own_places_.dv >= 0) {
      AddRows(kv, own_places_.dv, shape_.rows, shape_.width, HeadOf(args_.dv, 0, kv), args_.dv.stride(0));
    }
  }

  const AttentionGradArgs& args_;
  const std::vector<KvSegment>& segments_;
  const std::vector<AttentionSequence>& sequences_;
  const AttentionShape shape_;
  const SimdTable& simd_;
  ThreadPool& threads_;
  std::vector<Tile> tiles_;
  int64_t splits_ = 1;
  std::vector<int64_t> split_begin_;
  std::vector<Places> segment_places_;
  Places own_places_;
  int64_t block_floats_ = 0;  // of one (KV head, split)
  Tensor sums_;
};

}  // namespace

void AttentionGrad(Backend& backend, const AttentionGradArgs& args) { Backward(backend, args).Run(); }

}  // namespace stillhouse::cpu
