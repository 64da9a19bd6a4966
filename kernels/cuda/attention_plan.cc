#include "kernels/cuda/attention_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace stillhouse::cuda {
namespace {

// How a kernel's items are cut. `granule` slots are a step. Costs in steps: of an item beside its slots (its start,
// what it leaves to be merged), and of a partial row's merge.
struct Cut {
  int granule;
  double start, partial, merge;
};
constexpr Cut kNarrowCut = {kAttentionStep, 1.0, 2.0, 0.1}, kWideCut = {kAttentionStep, 1.0, 2.0, 0.1};
constexpr Cut kTallCut = {2 * kAttentionStep, 1.0, 1.0, 0.05};
constexpr double kWideLatency = 1.4;
constexpr int64_t kFinishSlots = 512;  // of a narrow item that merges

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that see the same slots, but for their own sequence's.
struct Chain {
  int32_t run_begin = 0, run_count = 0;
  int64_t slots = 0;    // of the segments
  bool causal = false;  // the last run is the rows' own sequence
  bool alone = false;   // the rows see nothing else
  int32_t rows = 0;     // as AttentionItem::rows
  int64_t row_count = 0;
};

// A tile of a chain's queries, not yet split.
struct Tile {
  const Chain* chain;
  int64_t row_begin, row_count;
  int32_t head_begin, head_count;
  int64_t seen;  // slots, up to the last row's
};

class Planner {
 public:
  Planner(const AttentionPlanOptions& options, const std::vector<AttentionRun>& segments, const AttentionRun& own,
          const std::vector<AttentionSequence>& sequences)
      : o_(options), segments_(segments), own_(own), sequences_(sequences), group_(options.heads / options.kv_heads) {}

  AttentionForwardPlan Run() {
    row_partials_.resize(static_cast<size_t>(o_.rows));
    arrivals_.assign(static_cast<size_t>(o_.rows), 0);
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
    std::vector<Tile> narrow, wide, tall;
    for (const Chain& chain : chains_) {
      // Narrow tiles read the slots once each: from the third on a wide tile is cheaper.
      if (chain.row_count * group_ <= 2 * o_.narrow_queries) {
        AddTiles(chain, o_.narrow_queries, &narrow);
      } else if (o_.tall_queries > 0 && chain.row_count * group_ >= o_.tall_queries) {
        AddTiles(chain, o_.tall_queries, &tall);
      } else {
        AddTiles(chain, o_.wide_queries, &wide);
      }
    }
    Split(narrow, o_.narrow_blocks, o_.narrow_latency, kNarrowCut, &plan_.narrow);
    Split(wide, o_.wide_blocks, kWideLatency, kWideCut, &plan_.wide);
    Split(tall, 1, 1.0, kTallCut, &plan_.tall);
    plan_.finishing = Finishes();
    if (plan_.finishing) {
      for (const AttentionItem& item : plan_.narrow) {
        for (int32_t r = 0; r < item.row_count && item.partial >= 0; ++r) {
          ++arrivals_[item.rows < 0 ? ~item.rows + r : plan_.rows[item.rows + r]];
        }
      }
    }
    AddMerges();
    return std::move(plan_);
  }

 private:
  // Whether narrow items merge the rows that they are the last to see: where all run at once and soon end. What they
  // wait for in the merge would else keep others from starting, and a launch of its own spreads it better.
  bool Finishes() const {
    if (o_.rows * o_.kv_heads > o_.finishing) return false;
    int64_t items = 0, longest = 0;
    for (const AttentionItem& item : plan_.narrow) {
      items += o_.kv_heads;
      longest = std::max<int64_t>(longest, item.slots);
    }
    return items <= static_cast<int64_t>(o_.narrow_blocks) * o_.multiprocessors && longest <= kFinishSlots;
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
      if (m.users.size() == 1) {
        chain.rows = ~static_cast<int32_t>(sequences_[m.users[0]].row_begin);
        chain.row_count = sequences_[m.users[0]].row_count;
      } else {
        chain.rows = static_cast<int32_t>(plan_.rows.size());
        for (int32_t user : m.users) {
          const AttentionSequence& sequence = sequences_[user];
          for (int64_t r = 0; r < sequence.row_count; ++r) {
            plan_.rows.push_back(static_cast<int32_t>(sequence.row_begin + r));
          }
          chain.row_count += sequence.row_count;
        }
      }
      chains_.push_back(chain);
    }
  }

  void AddTiles(const Chain& chain, int queries, std::vector<Tile>* tiles) const {
    const int64_t heads = std::min<int64_t>(group_, queries), rows = std::max<int64_t>(1, queries / group_);
    for (int64_t row = 0; row < chain.row_count; row += rows) {
      const int64_t count = std::min(rows, chain.row_count - row);
      for (int64_t head = 0; head < group_; head += heads) {
        tiles->push_back({&chain, row, count, static_cast<int32_t>(head),
                          static_cast<int32_t>(std::min(heads, group_ - head)),
                          chain.slots + (chain.causal ? row + count : 0)});
      }
    }
  }

  // Slots of a part when every tile is cut into parts of at most `steps` steps, evenly.
  static int64_t PartSlots(const Tile& tile, int64_t steps, const Cut& cut) {
    const int64_t all = CeilDiv(tile.seen, cut.granule);
    return CeilDiv(all, CeilDiv(all, steps)) * cut.granule;
  }

  // The steps of a part: few enough that the multiprocessors are busy, many enough that starting and merging do not
  // cost more than that. A multiprocessor does a step at a time, or `blocks` blocks one each, `latency` as slowly.
  int64_t ChooseSteps(const std::vector<Tile>& tiles, int64_t blocks, double latency, const Cut& cut) const {
    int64_t longest = 1, total = 0;
    for (const Tile& tile : tiles) {
      longest = std::max(longest, CeilDiv(tile.seen, cut.granule));
      total += CeilDiv(tile.seen, cut.granule) * o_.kv_heads;
    }
    const auto all_blocks = static_cast<double>(blocks * o_.multiprocessors);
    int64_t best = longest;
    double best_cost = 0.0;
    for (int64_t parts = 1; parts <= std::min<int64_t>(longest, 4 * blocks * o_.multiprocessors); ++parts) {
      const int64_t steps = CeilDiv(longest, parts);
      if (parts > 1 && steps == CeilDiv(longest, parts - 1)) continue;
      int64_t count_all = 0, partial_items = 0, partial_rows = 0;
      bool alike = true;
      for (const Tile& tile : tiles) {
        const int64_t part = PartSlots(tile, steps, cut), count = CeilDiv(tile.seen, part);
        count_all += count * o_.kv_heads;
        alike = alike && part == PartSlots(tiles[0], steps, cut);
        if (count == 1 && tile.chain->alone) continue;
        partial_items += count * o_.kv_heads;
        partial_rows += count * tile.row_count;
      }
      if (parts > 1 && partial_rows * o_.heads * (o_.width + 3) * 4 > o_.partial_bytes) break;
      const auto items = static_cast<double>(count_all);
      const double beside = cut.start + cut.partial * static_cast<double>(partial_items) / items;
      const double merge = partial_items > 0 ? cut.merge * static_cast<double>(parts) : 0.0;
      // Items of one size run in waves; of several, the longest first, they fill up well.
      const double cost =
          alike ? std::max(std::ceil(items / o_.multiprocessors), latency * std::ceil(items / all_blocks)) *
                          static_cast<double>(steps) +
                      std::ceil(items / all_blocks) * beside + merge
                : std::max(1.0 / o_.multiprocessors, latency / all_blocks) * static_cast<double>(total) +
                      items / all_blocks * beside + 0.25 * static_cast<double>(steps) + merge;
      if (parts == 1 || cost < best_cost) {
        best = steps;
        best_cost = cost;
      }
      if (steps == 1) break;
    }
    return best;
  }

  void Split(const std::vector<Tile>& tiles, int64_t blocks, double latency, const Cut& cut,
             std::vector<AttentionItem>* items) {
    if (tiles.empty()) return;
    const int64_t steps = ChooseSteps(tiles, blocks, latency, cut);
    // Heads of one row in several tiles share its partial rows.
    int64_t shared_base = -1;
    for (const Tile& tile : tiles) {
      const Chain& chain = *tile.chain;
      const int64_t part = PartSlots(tile, steps, cut), parts = CeilDiv(tile.seen, part);
      const bool whole = parts == 1 && chain.alone;
      if (tile.head_begin == 0) {
        shared_base = plan_.partial_rows;
        if (!whole) plan_.partial_rows += parts * tile.row_count;
      }
      int32_t run = chain.run_begin;
      int64_t slot = 0;
      for (int64_t p = 0; p < parts; ++p) {
        AttentionItem item;
        item.run = run;
        item.slot = static_cast<int32_t>(slot);
        item.slots = static_cast<int32_t>(std::min(part, tile.seen - p * part));
        item.rows = chain.rows < 0 ? chain.rows - static_cast<int32_t>(tile.row_begin)
                                   : chain.rows + static_cast<int32_t>(tile.row_begin);
        item.row_count = static_cast<int32_t>(tile.row_count);
        item.causal_limit = static_cast<int32_t>(tile.row_begin + 1);
        item.head_begin = tile.head_begin;
        item.head_count = tile.head_count;
        if (!whole) {
          item.partial = static_cast<int32_t>(shared_base + p * tile.row_count);
          for (int64_t r = 0; r < tile.row_count && tile.head_begin == 0; ++r) {
            const int64_t at = tile.row_begin + r;
            const int64_t row = chain.rows < 0 ? ~chain.rows + at : plan_.rows[chain.rows + at];
            row_partials_[row].push_back(static_cast<int32_t>(item.partial + r));
          }
        }
        items->push_back(item);
        for (slot += item.slots; run < chain.run_begin + chain.run_count && slot >= plan_.runs[run].slots; ++run) {
          slot -= plan_.runs[run].slots;
        }
      }
    }
    // Longest first: the last items to start are short.
    std::stable_sort(items->begin(), items->end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return a.slots > b.slots; });
  }

  // Rows of few-row sequences, rows whose slots were split, and rows that see nothing: first those that no narrow item
  // merges.
  void AddMerges() {
    for (const bool apart : {true, false}) {
      for (const AttentionSequence& sequence : sequences_) {
        const bool few = IsFewRows(sequence.row_count);
        bool nothing = !o_.own;
        for (int32_t s : sequence.segments) nothing = nothing && segments_[s].slots == 0;
        for (int64_t row = sequence.row_begin; row < sequence.row_begin + sequence.row_count; ++row) {
          const std::vector<int32_t>& partials = row_partials_[row];
          if (!few && !nothing && partials.empty()) continue;
          if ((arrivals_[row] == 0) != apart) continue;
          AttentionMerge merge;
          merge.row = static_cast<int32_t>(row);
          merge.own_begin = static_cast<int32_t>(few && o_.own ? sequence.row_begin : row + 1);
          merge.partial_begin = static_cast<int32_t>(plan_.partials.size());
          plan_.partials.insert(plan_.partials.end(), partials.begin(), partials.end());
          merge.partial_end = static_cast<int32_t>(plan_.partials.size());
          merge.arrivals = arrivals_[row];
          plan_.merges.push_back(merge);
        }
      }
      if (apart) plan_.merges_apart = static_cast<int32_t>(plan_.merges.size());
    }
    const auto count = static_cast<int64_t>(plan_.merges.size());
    bool in_order = count == o_.rows;
    for (int64_t i = 0; i < count && in_order; ++i) in_order = plan_.merges[i].row == i;
    if (in_order || plan_.merges_apart == count) return;
    plan_.merge_of.assign(static_cast<size_t>(o_.rows), -1);
    for (int64_t i = 0; i < count; ++i) plan_.merge_of[plan_.merges[i].row] = static_cast<int32_t>(i);
  }

  const AttentionPlanOptions& o_;
  const std::vector<AttentionRun>& segments_;
  const AttentionRun& own_;
  const std::vector<AttentionSequence>& sequences_;
  const int64_t group_;
  std::vector<int32_t> few_;
  std::vector<Chain> chains_;
  std::vector<std::vector<int32_t>> row_partials_;  // by row of the step
  std::vector<int32_t> arrivals_;                   // likewise
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
