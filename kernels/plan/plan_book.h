// Plans found by timing: which way suits which product on which GPU. Read from text files at start, printed by the
// tuner.
//
// A file is lines of words; '#' begins a comment. The first line says what it is and its version, every other line is a
// plan:
//
//   stillhouse-plans 1
//   decompose_k gpu="NVIDIA H200" dtype=bf16 m=2-8 n=256 k=7168 layout=b-rows epilogue=element way=slices tile=16x32
//       splits=16 us=2.41   (one line)
//
// Anything else is refused, with the line's number: unknown words and versions, missing, repeated or impossible values,
// two plans for one key, and files beyond the caps below.
#ifndef STILLHOUSE_KERNELS_PLAN_PLAN_BOOK_H_
#define STILLHOUSE_KERNELS_PLAN_PLAN_BOOK_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/plan/decompose_k_plan.h"

namespace stillhouse {

enum class PlanDType : uint8_t { kF32, kBf16, kMixed };         // of both operands
enum class PlanLayout : uint8_t { kBRows, kBColumns, kOther };  // A's rows contiguous, and B's rows or columns
// What becomes of the product. Decompose-K's: what needs one element, or a row. Linear's: nothing (a bias, or what the
// product is added to). The fused ops' (kernels/ops/fused.h), of rows that a sum left scaled: nothing (NormLinear),
// gates (NormSwiGlu), heads that are turned (NormQkvRope); and rows left scaled by a sum (LinearAdd).
enum class PlanEpilogue : uint8_t { kElement, kRow, kNone, kNormed, kScaledRows, kGlu, kTurn };
enum class RowBucket : uint8_t { k1, k2, k9, k33, k129, k513 };  // rows of A: 1, 2-8, 9-32, 33-128, 129-512, 513+
// Linear's and the fused ops': rows times a weight [N, K], kBColumns.
inline bool IsLinear(PlanEpilogue epilogue) { return epilogue > PlanEpilogue::kRow; }

inline constexpr int kRowBuckets = 6;
RowBucket BucketOf(int64_t m);
// The rows that stand for a bucket where it is timed.
int64_t RowsOf(RowBucket bucket);
// As files write them: "2-8", "b-rows", "element". False for other text.
bool ParseRowBucket(std::string_view text, RowBucket* bucket);
bool ParsePlanLayout(std::string_view text, PlanLayout* layout);
bool ParsePlanEpilogue(std::string_view text, PlanEpilogue* epilogue);

struct DecomposeKKey {
  std::string gpu;  // as the driver names it
  PlanDType dtype = PlanDType::kBf16;
  RowBucket m = RowBucket::k1;
  int64_t n = 0, k = 0;
  PlanLayout layout = PlanLayout::kBRows;
  PlanEpilogue epilogue = PlanEpilogue::kElement;

  friend bool operator<(const DecomposeKKey& a, const DecomposeKKey& b) {
    const auto fields = [](const DecomposeKKey& x) {
      return std::tie(x.gpu, x.dtype, x.layout, x.epilogue, x.n, x.k, x.m);
    };
    return fields(a) < fields(b);
  }
};

struct TimedPlan {
  DecomposeKPlan plan;
  double microseconds = 0.0;  // when it was chosen; 0: not known
};

// The plans for one GPU as products look them up: by a hash of their shapes, whatever the keys' `gpu`. Copies nothing,
// locks nothing.
class PlanTable {
 public:
  // Null: there is no plan.
  const DecomposeKPlan* Find(const DecomposeKKey& key) const;
  // Replaces what was there; while nothing looks for plans.
  void Put(const DecomposeKKey& key, const DecomposeKPlan& plan) { plans_[key] = plan; }

 private:
  struct Hash {
    size_t operator()(const DecomposeKKey& key) const;
  };
  struct Same {
    bool operator()(const DecomposeKKey& a, const DecomposeKKey& b) const;
  };
  std::unordered_map<DecomposeKKey, DecomposeKPlan, Hash, Same> plans_;
};

// Not changed once it is shared.
class PlanBook {
 public:
  static constexpr size_t kMaxBytes = size_t{1} << 20;
  static constexpr int kMaxPlans = 10000;

  static absl::StatusOr<PlanBook> Parse(std::string_view text);
  static absl::StatusOr<PlanBook> Load(const std::string& path);
  // What comes with the program (kernels/plan/*.plans).
  static const PlanBook& Shipped();

  // Replaces what was there.
  void Add(const DecomposeKKey& key, const TimedPlan& plan) { decompose_k_[key] = plan; }
  // The other book's plans go first.
  void AddAll(const PlanBook& other);
  std::optional<DecomposeKPlan> Find(const DecomposeKKey& key) const;
  PlanTable TableFor(std::string_view gpu) const;
  // Plans for the GPU whose name `text` begins with ("NVIDIA H200 bf16").
  int CountFor(std::string_view text) const;
  const std::map<DecomposeKKey, TimedPlan>& decompose_k() const { return decompose_k_; }
  // Text that Parse reads.
  std::string Print() const;
  // One plan's line.
  static std::string PrintLine(const DecomposeKKey& key, const TimedPlan& plan);

 private:
  std::map<DecomposeKKey, TimedPlan> decompose_k_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_PLAN_PLAN_BOOK_H_
