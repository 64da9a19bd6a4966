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
  int tall_queries = 0;                                     // 0: there is no such kernel for this call
  int narrow_blocks = 0, wide_blocks = 0, tall_blocks = 0;  // that the GPU holds at once
};

// Sequences of few rows are taken together: what several of them list is read once for all (a cascade), and their own
// rows are added in the merge. Longer ones go tile by tile over all that their rows see. Either way long ranges of
// slots are split where there would otherwise be too few blocks. Depends on the shapes alone, so results are the same
// in every run.
struct AttentionForwardPlan {
  std::vector<AttentionRun> runs;
  std::vector<AttentionItem> narrow, wide, tall;
  std::vector<int32_t> rows;
  std::vector<AttentionMerge> merges;
  std::vector<int32_t> partials;
  int64_t partial_rows = 0;
};

// `segments[i]` describes the i-th segment; `own` the first row of the step (its slots are set per sequence), row by
// row.
AttentionForwardPlan PlanAttention(const AttentionPlanOptions& options, const std::vector<AttentionRun>& segments,
                                   const AttentionRun& own, const std::vector<AttentionSequence>& sequences);

// The run of rows [begin, begin + count) of a step whose row 0 is described by `own`.
AttentionRun OwnRows(const AttentionRun& own, int64_t begin, int64_t count, int64_t element_bytes);

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_ATTENTION_PLAN_H_
