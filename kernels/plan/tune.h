// Finds plans by trying: every way that can run a product is checked against a product in fp64, timed in a CUDA graph,
// and the fastest is kept.
#ifndef STILLHOUSE_KERNELS_PLAN_TUNE_H_
#define STILLHOUSE_KERNELS_PLAN_TUNE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/plan/plan_book.h"

namespace stillhouse {

struct TuneProduct {
  int64_t n = 0, k = 0;
  PlanDType dtype = PlanDType::kBf16;      // not kMixed
  PlanLayout layout = PlanLayout::kBRows;  // not kOther
  PlanEpilogue epilogue = PlanEpilogue::kElement;
  std::vector<RowBucket> rows;
};

// report: one line for each bucket of a product. UNIMPLEMENTED in a build without CUDA, NOT_FOUND where there is no
// such GPU, RESOURCE_EXHAUSTED where its memory does not hold a product, INTERNAL (naming it) where a way gives wrong
// results.
absl::StatusOr<PlanBook> TunePlans(int device, const std::vector<TuneProduct>& products,
                                   const std::function<void(const std::string&)>& report);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_PLAN_TUNE_H_
