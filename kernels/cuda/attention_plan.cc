#include "kernels/cuda/attention_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <tuple>

namespace stillhouse::cuda {
namespace {

// How a kernel's items are cut. `granule` slots are a step. Costs in steps: of an item beside its slots (its start, the
// partial rows that it leaves, what a cluster's blocks bring together), of a merge of its own, and of a partial row in
// it.
struct Cut {
  int granule;
  double start, partial, cluster, launch, merge;
};
constexpr Cut kNarrowCut = {kAttentionStep, 1.0, 1.0, 1.0, 3.0, 0.1};
constexpr Cut kWideCut = {kAttentionStep, 1.0, 2.0, 1.0, 0.0, 0.1};
constexpr Cut kTallCut = {2 * kAttentionStep, 1.0, 1.0, 1.0, 2.0, 0.25};
constexpr double kWideLatency = 1.4;
constexpr int32_t kBriefSlots = 4 * kAttentionStep;  // of the longest item

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that see the same slots, but for their own sequence's.
struct Chain {
  int32_t run_begin = 0, run_count = 0;
  int64_t slots = 0;    // of the segments
  bool causal = false;  // the last run is the rows' own sequence
  bool alone = false;   // the rows see nothing else
  int32_t rows = 0;     // as AttentionItem::rows
  int64_t row_count = 0;

  int32_t RowsFrom(int64_t i) const {
    return rows < 0 ? rows - static_cast<int32_t>(i) : rows + static_cast<int32_t>(i);
  }
};

// A tile of a chain's queries, not yet split.
struct Tile {
  const Chain* chain;
  int64_t row_begin, row_count;
  int32_t head_begin, head_count;
  int64_t seen;       // slots, up to the last row's
  bool ends = false;  // no other tile of this kernel or a later one sees the rows
};

// The kernels in the order of their launches.
enum Kernel { kTall, kWide, kNarrow, kKernels };

class Planner {
 public:
  Planner(const AttentionPlanOptions& options, const std::vector<AttentionRun>& segments, const AttentionRun& own,
          const std::vector<AttentionSequence>& sequences)
      : o_(options), segments_(segments), own_(own), sequences_(sequences), group_(options.heads / options.kv_heads) {}

  AttentionForwardPlan Run() {
    row_partials_.resize(static_cast<size_t>(o_.rows));
    row_tiles_.resize(static_cast<size_t>(o_.rows));
    ended_.resize(static_cast<size_t>(o_.rows));
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const AttentionSequence& sequence = sequences_[i];
      if (sequence.row_count == 0) continue;
      if (IsFewRows(sequence.row_count)) {
        few_.push_back(static_cast<int32_t>(i));
      } else {
        AddLong(sequence);
      }
    }
    AddFew();
    for (const Chain& chain : chains_) {
      for (int64_t r = 0; r < chain.row_count; ++r) ++row_tiles_[Row(chain, r)][KernelOf(chain)];
    }
    std::vector<Tile> tiles[kKernels];
    const int queries[kKernels] = {o_.tall_queries, o_.wide_queries, o_.narrow_queries};
    for (const Chain& chain : chains_) AddTiles(chain, KernelOf(chain), queries[KernelOf(chain)], tiles);
    Split(tiles[kTall], o_.tall, 1.0, kTallCut, &plan_.tall);
    Split(tiles[kWide], o_.wide, kWideLatency, kWideCut, &plan_.wide);
    Split(tiles[kNarrow], o_.narrow, o_.narrow_latency, kNarrowCut, &plan_.narrow);
    plan_.narrow.brief =
        static_cast<int64_t>(plan_.narrow.items.size()) * o_.kv_heads * plan_.narrow.cluster > o_.narrow.blocks[0] &&
        plan_.narrow.items.front().slots <= kBriefSlots;
    AddMerges();
    return std::move(plan_);
  }

 private:
  Kernel KernelOf(const Chain& chain) const {
    // Narrow tiles read the slots once each: from the third on a wide tile is cheaper.
    const int64_t queries = chain.row_count * group_;
    return queries <= 2 * o_.narrow_queries                    ? kNarrow
           : o_.tall_queries > 0 && queries >= o_.tall_queries ? kTall
                                                               : kWide;
  }

  int64_t Row(const Chain& chain, int64_t i) const {
    const int32_t at = chain.RowsFrom(i);
    return at < 0 ? ~at : plan_.rows[at];
  }

  // Whether what chains of this kernel see is the last that is added to the row, and comes at once.
  bool Ends(int64_t row, Kernel kernel) const {
    int later = 0;
    for (int k = kernel + 1; k < kKernels; ++k) later += row_tiles_[row][k];
    return later == 0 && row_tiles_[row][kernel] == 1;
  }

  void AddRun(Chain* chain, const AttentionRun& run, int32_t source) {
    plan_.runs.push_back(run);
    plan_.run_sources.push_back(source);
    ++chain->run_count;
  }

  void AddLong(const AttentionSequence& sequence) {
    Chain chain;
    chain.run_begin = static_cast<int32_t>(plan_.runs.size());
    for (int32_t s : sequence.segments) {
      if (segments_[s].slots == 0) continue;
      AddRun(&chain, segments_[s], s);
      chain.slots += segments_[s].slots;
    }
    if (o_.own) {
      AddRun(&chain, OwnRows(own_, sequence.row_begin, sequence.row_count, o_.own_bytes),
             ~static_cast<int32_t>(sequence.row_begin));
      chain.causal = true;
    }
    chain.alone = true;
    chain.rows = ~static_cast<int32_t>(sequence.row_begin);
    chain.row_count = sequence.row_count;
    if (chain.run_count > 0) chains_.push_back(chain);
  }

  // Segments in the order in which sequences list them; those of the same users join one chain.
  void AddFew() {
    const size_t count = segments_.size();
    std::vector<int32_t> begin(count + 1, 0), users;
    for (int32_t i : few_) {
      for (int32_t s : sequences_[i].segments) ++begin[s + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    users.resize(static_cast<size_t>(begin[count]));
    std::vector<int32_t> next(begin.begin(), begin.end() - 1);
    for (int32_t i : few_) {
      for (int32_t s : sequences_[i].segments) users[next[s]++] = i;
    }
    // Chains by their users: of one sequence alone, and of several.
    struct Members {
      std::vector<int32_t> users, segments;
    };
    std::vector<Members> members;
    std::vector<int32_t> alone(sequences_.size(), -1);
    std::map<std::vector<int32_t>, int32_t> together;
    std::vector<bool> placed(count, false);
    for (int32_t i : few_) {
      for (int32_t s : sequences_[i].segments) {
        if (placed[s] || segments_[s].slots == 0) continue;
        placed[s] = true;
        const auto first = users.begin() + begin[s], last = users.begin() + begin[s + 1];
        int32_t& chain = last - first == 1 ? alone[i] : together.try_emplace({first, last}, -1).first->second;
        if (chain < 0) {
          chain = static_cast<int32_t>(members.size());
          members.push_back({{first, last}, {}});
        }
        members[chain].segments.push_back(s);
      }
    }
    for (const Members& m : members) {
      Chain chain;
      chain.run_begin = static_cast<int32_t>(plan_.runs.size());
      for (int32_t s : m.segments) {
        AddRun(&chain, segments_[s], s);
        chain.slots += segments_[s].slots;
      }
      const int64_t first = sequences_[m.users[0]].row_begin;
      bool consecutive = true;
      for (int32_t user : m.users) {
        consecutive = consecutive && sequences_[user].row_begin == first + chain.row_count;
        chain.row_count += sequences_[user].row_count;
      }
      if (consecutive) {
        chain.rows = ~static_cast<int32_t>(first);
      } else {
        chain.rows = static_cast<int32_t>(plan_.rows.size());
        for (int32_t user : m.users) {
          const AttentionSequence& sequence = sequences_[user];
          for (int64_t r = 0; r < sequence.row_count; ++r) {
            plan_.rows.push_back(static_cast<int32_t>(sequence.row_begin + r));
          }
        }
      }
      chains_.push_back(chain);
    }
  }

  void AddTiles(const Chain& chain, Kernel kernel, int queries, std::vector<Tile>* tiles) const {
    const int64_t heads = std::min<int64_t>(group_, queries), rows = std::max<int64_t>(1, queries / group_);
    for (int64_t row = 0; row < chain.row_count; row += rows) {
      const int64_t count = std::min(rows, chain.row_count - row);
      bool ends = true;
      for (int64_t r = row; r < row + count; ++r) ends = ends && Ends(Row(chain, r), kernel);
      for (int64_t head = 0; head < group_; head += heads) {
        tiles[kernel].push_back({&chain, row, count, static_cast<int32_t>(head),
                                 static_cast<int32_t>(std::min(heads, group_ - head)),
                                 chain.slots + (chain.causal ? row + count : 0), ends});
      }
    }
  }

  // Slots of a part when every tile is cut into parts of at most `steps` steps, evenly.
  static int64_t PartSlots(const Tile& tile, int64_t steps, const Cut& cut) {
    const int64_t all = CeilDiv(tile.seen, cut.granule);
    return CeilDiv(all, CeilDiv(all, steps)) * cut.granule;
  }

  // How tiles are cut: into parts of so many steps, or among the blocks of clusters.
  struct Choice {
    int64_t steps = 0;
    int32_t cluster = 1;
    double cost = INFINITY;
  };

  // Few steps, so that the multiprocessors are busy, but enough that starting and merging do not cost more than that. A
  // multiprocessor does a step at a time, or each of the blocks that it holds one, `latency` as slowly. `held`: blocks
  // at once.
  void Consider(const std::vector<Tile>& tiles, int64_t parts_most, int32_t cluster, int64_t held, double latency,
                const Cut& cut, Choice* best) const {
    int64_t longest = 1;
    for (const Tile& tile : tiles) longest = std::max(longest, CeilDiv(tile.seen, cut.granule));
    const auto all_blocks = static_cast<double>(held);
    for (int64_t parts = 1; parts <= std::min(longest, parts_most); ++parts) {
      const int64_t steps = CeilDiv(longest, parts);
      if (parts > 1 && steps == CeilDiv(longest, parts - 1)) continue;
      int64_t blocks_all = 0, total = 0, partial_items = 0, partial_rows = 0;
      bool alike = true, apart = false;
      for (const Tile& tile : tiles) {
        const int64_t part = PartSlots(tile, steps, cut), count = CeilDiv(tile.seen, part);
        blocks_all += count * cluster * o_.kv_heads;
        total += count * cluster * CeilDiv(part / cut.granule, cluster) * o_.kv_heads;
        alike = alike && part == PartSlots(tiles[0], steps, cut);
        if (count == 1 && tile.ends) continue;
        apart = apart || tile.ends;
        partial_items += count * o_.kv_heads;
        partial_rows += count * tile.row_count;
      }
      if (parts > 1 && partial_rows * o_.heads * (o_.width + 3) * 4 > o_.partial_bytes) break;
      const auto blocks = static_cast<double>(blocks_all);
      const auto block_steps = static_cast<double>(CeilDiv(steps, cluster));
      const double beside =
          cut.start + (cluster > 1 ? cut.cluster : 0.0) + cut.partial * static_cast<double>(partial_items) / blocks;
      const double merge =
          (apart ? cut.launch : 0.0) + (partial_items > 0 ? cut.merge * static_cast<double>(parts) : 0.0);
      // Blocks of one size run in waves; of several, the longest first, they fill up well.
      const double cost =
          alike ? std::max(std::ceil(blocks / o_.multiprocessors), latency * std::ceil(blocks / all_blocks)) *
                          block_steps +
                      std::ceil(blocks / all_blocks) * beside + merge
                : std::max(1.0 / o_.multiprocessors, latency / all_blocks) * static_cast<double>(total) +
                      blocks / all_blocks * beside + 0.25 * block_steps + merge;
      if (cost < best->cost) *best = {steps, cluster, cost};
      if (steps == 1) break;
    }
  }

  void Split(const std::vector<Tile>& tiles, const AttentionCapacity& capacity, double latency, const Cut& cut,
             AttentionForwardPlan::Items* out) {
    if (tiles.empty()) return;
    Choice choice;
    for (size_t i = 0; i < std::size(kAttentionClusters); ++i) {
      const int32_t cluster = kAttentionClusters[i];
      const int64_t held = std::max(capacity.blocks[i], cluster == 1 ? 1 : 0);
      // Clusters are for the few tiles that do not fill the GPU.
      if (cluster > 1 && static_cast<int64_t>(tiles.size()) * o_.kv_heads * cluster > held) continue;
      Consider(tiles, cluster > 1 ? 1 : 4 * held, cluster, held, latency, cut, &choice);
    }
    out->cluster = choice.cluster;
    // Heads of one row in several tiles share its partial rows, or its merge.
    int64_t shared_base = -1;
    int32_t shared_merge = -1;
    for (const Tile& tile : tiles) {
      const Chain& chain = *tile.chain;
      const int64_t part = PartSlots(tile, choice.steps, cut), parts = CeilDiv(tile.seen, part);
      const bool whole = parts == 1 && tile.ends;
      if (tile.head_begin == 0) {
        shared_base = plan_.partial_rows;
        if (!whole) plan_.partial_rows += parts * tile.row_count;
        shared_merge = whole && !chain.alone ? static_cast<int32_t>(plan_.merges.size()) : -1;
        for (int64_t r = 0; r < tile.row_count && whole; ++r) {
          const int64_t row = Row(chain, tile.row_begin + r);
          ended_[row] = true;
          if (!chain.alone) AddMerge(row);
        }
      }
      out->merges = out->merges || shared_merge >= 0;
      int32_t run = chain.run_begin;
      int64_t slot = 0;
      for (int64_t p = 0; p < parts; ++p) {
        AttentionItem item;
        item.run = run;
        item.slot = static_cast<int32_t>(slot);
        item.slots = static_cast<int32_t>(std::min(part, tile.seen - p * part));
        item.rows = chain.RowsFrom(tile.row_begin);
        item.row_count = static_cast<int32_t>(tile.row_count);
        item.causal_limit = static_cast<int32_t>(tile.row_begin + 1);
        item.head_begin = tile.head_begin;
        item.head_count = tile.head_count;
        item.merge = shared_merge;
        if (!whole) {
          item.partial = static_cast<int32_t>(shared_base + p * tile.row_count);
          for (int64_t r = 0; r < tile.row_count && tile.head_begin == 0; ++r) {
            row_partials_[Row(chain, tile.row_begin + r)].push_back(static_cast<int32_t>(item.partial + r));
          }
        }
        out->items.push_back(item);
        for (slot += item.slots; run < chain.run_begin + chain.run_count && slot >= plan_.runs[run].slots; ++run) {
          slot -= plan_.runs[run].slots;
        }
      }
    }
    // Longest first: the last items to start are short. Of those, the ones on the same slots together, which come from
    // the cache then.
    std::stable_sort(out->items.begin(), out->items.end(), [](const AttentionItem& a, const AttentionItem& b) {
      return std::tuple(-a.slots, a.run, a.slot) < std::tuple(-b.slots, b.run, b.slot);
    });
  }

  void AddMerge(int64_t row) {
    const AttentionSequence& sequence = sequences_[SequenceOf(row)];
    const std::vector<int32_t>& partials = row_partials_[row];
    AttentionMerge merge;
    merge.row = static_cast<int32_t>(row);
    merge.own_begin = static_cast<int32_t>(IsFewRows(sequence.row_count) && o_.own ? sequence.row_begin : row + 1);
    merge.partial_begin = static_cast<int32_t>(plan_.partials.size());
    plan_.partials.insert(plan_.partials.end(), partials.begin(), partials.end());
    merge.partial_end = static_cast<int32_t>(plan_.partials.size());
    plan_.merges.push_back(merge);
  }

  // Sequences cover the rows in order; those without rows lie between.
  size_t SequenceOf(int64_t row) const {
    const auto after = std::partition_point(sequences_.begin(), sequences_.end(), [row](const AttentionSequence& s) {
      return s.row_begin + s.row_count <= row;
    });
    return static_cast<size_t>(after - sequences_.begin());
  }

  // Of the rows that no item ends.
  void AddMerges() {
    const size_t before = plan_.merges.size();
    for (int64_t row = 0; row < o_.rows; ++row) {
      if (!ended_[row]) AddMerge(row);
    }
    plan_.merges_apart = static_cast<int32_t>(plan_.merges.size() - before);
  }

  const AttentionPlanOptions& o_;
  const std::vector<AttentionRun>& segments_;
  const AttentionRun& own_;
  const std::vector<AttentionSequence>& sequences_;
  const int64_t group_;
  std::vector<int32_t> few_;
  std::vector<Chain> chains_;
  // By row of the step: partial rows; chains of each kernel; whether an item ends it.
  std::vector<std::vector<int32_t>> row_partials_;
  std::vector<std::array<int, kKernels>> row_tiles_;
  std::vector<bool> ended_;
  AttentionForwardPlan plan_;
};

}  // namespace

AttentionRun OwnRows(const AttentionRun& own, int64_t begin, int64_t count, int64_t element_bytes) {
  AttentionRun run = own;
  run.k = static_cast<const char*>(own.k) + begin * own.k_row * element_bytes;
  run.v = static_cast<const char*>(own.v) + begin * own.v_row * element_bytes;
  run.slots = static_cast<int32_t>(count);
  run.causal = true;
  return run;
}

void PointRunsAt(const std::vector<AttentionRun>& segments, const AttentionRun& own, int64_t own_bytes,
                 AttentionForwardPlan* plan) {
  for (size_t i = 0; i < plan->runs.size(); ++i) {
    const int32_t source = plan->run_sources[i];
    plan->runs[i] = source >= 0 ? segments[source] : OwnRows(own, ~source, plan->runs[i].slots, own_bytes);
  }
}

AttentionForwardPlan PlanAttention(const AttentionPlanOptions& options, const std::vector<AttentionRun>& segments,
                                   const AttentionRun& own, const std::vector<AttentionSequence>& sequences) {
  return Planner(options, segments, own, sequences).Run();
}

}  // namespace stillhouse::cuda
