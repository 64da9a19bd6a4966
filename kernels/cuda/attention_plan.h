// The tables of a forward call of attention: which tiles of queries visit which slots, and which partial rows are
// merged.
#ifndef STILLHOUSE_KERNELS_CUDA_ATTENTION_PLAN_H_
#define STILLHOUSE_KERNELS_CUDA_ATTENTION_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/attention_launch.h"
#include "kernels/ops/attention.h"

namespace stillhouse::cuda {

// Sequences of at most so many rows are batched by what they attend to.
inline bool IsFewRows(int64_t rows) { return rows <= 8; }

// Sizes of a call and of the kernels that will run it.
struct AttentionPlanOptions {
  int64_t rows = 0;
  int heads = 0, kv_heads = 0, width = 0;
  bool own = false;       // rows attend to their own sequence's rows
  int64_t own_bytes = 4;  // of one element of these
  int narrow_queries = 0, wide_queries = 0;
  int tall_queries = 0;  // 0: there is no such kernel for this call
  int multiprocessors = 1;
  AttentionCapacity narrow, wide, tall;
  double narrow_latency = 1.0;                 // of a step of a narrow block alone, to that of a multiprocessor's share
  int64_t partial_bytes = int64_t{256} << 20;  // for partial rows; what would need more is split less
};

// Sequences of few rows are taken together: what several of them list is read once for all (a cascade), and their own
// rows are added in the merge. Longer ones go tile by tile over all that their rows see. Either way long ranges of
// slots are split where there would otherwise be too few blocks: among the blocks of a cluster, which bring their sums
// together, or into items that leave partial rows. A row ends in the one item of the last kernel that sees it, if there
// is one, or by a merge of its own. Depends on the shapes alone, so results are the same in every run.
struct AttentionForwardPlan {
  struct Items {
    std::vector<AttentionItem> items;
    int32_t cluster = 1;
    bool merges = false;  // some have merges
    bool brief = false;   // they have few slots and are more than the blocks that run at once
  };
  std::vector<AttentionRun> runs;
  std::vector<int32_t> run_sources;  // of each run: its segment, or ~the first row of its sequence
  Items narrow, wide, tall;          // launched from the last to the first
  std::vector<int32_t> rows;
  std::vector<AttentionMerge> merges;
  int32_t merges_apart = 0;  // of these, the last, are for a launch of their own
  std::vector<int32_t> partials;
  int64_t partial_rows = 0;

  int32_t merges_begin() const { return static_cast<int32_t>(merges.size()) - merges_apart; }
  // Of a row whose merge has a launch of its own.
  int32_t most_partials() const {
    int32_t most = 0;
    for (size_t i = static_cast<size_t>(merges_begin()); i < merges.size(); ++i) {
      const int32_t count = merges[i].partial_end - merges[i].partial_begin;
      most = count > most ? count : most;
    }
    return most;
  }
};

// `segments[i]` describes the i-th segment; `own` the first row of the step (its slots are set per sequence), row by
// row.
AttentionForwardPlan PlanAttention(const AttentionPlanOptions& options, const std::vector<AttentionRun>& segments,
                                   const AttentionRun& own, const std::vector<AttentionSequence>& sequences);

// Points a plan's runs at other keys and values of the same shapes and strides: another layer's.
void PointRunsAt(const std::vector<AttentionRun>& segments, const AttentionRun& own, int64_t own_bytes,
                 AttentionForwardPlan* plan);

// The run of rows [begin, begin + count) of a step whose row 0 is described by `own`.
AttentionRun OwnRows(const AttentionRun& own, int64_t begin, int64_t count, int64_t element_bytes);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_PLAN_H_
