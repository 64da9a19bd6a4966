// Decode steps, recorded once for each shape and run again.
#ifndef STILLHOUSE_SERVER_MODEL_DECODE_STEPS_H_
#define STILLHOUSE_SERVER_MODEL_DECODE_STEPS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops/sample.h"
#include "server/model/forward.h"

namespace stillhouse {

// What a step launches depends on a few sizes (rows, padded to a few counts, and how attention is cut); all else,
// positions and pages and memories among it, is read from one block of device memory. So a step of known sizes is one
// upload, one launch of what was recorded, and one download: the tokens. Recordings name no memory and no page, so that
// they outlive both; the least recently used go first. While a step runs the host plans the one after it, in case the
// same sequences go on. One thread; the backend outlives it.
class DecodeSteps {
 public:
  // `vocabulary`: ids that may be drawn. At most `limit` recordings are kept.
  DecodeSteps(const Context& ctx, std::shared_ptr<const Weights> weights, int64_t vocabulary, size_t limit = 48);
  ~DecodeSteps();
  DecodeSteps(const DecodeSteps&) = delete;
  DecodeSteps& operator=(const DecodeSteps&) = delete;

  struct Result {
    std::vector<SampledToken> tokens;  // of each sequence
    std::vector<float> stored_mass;    // [R], where it was asked for
  };
  // Runs a batch in which every sequence has one row, reserved, and wants its output; rows are kept and states moved on
  // as by Forward. False, with nothing done, where there is no such step (PlanDecodeStep): use Forward.
  bool Run(const Batch& wanted, const std::vector<SampleRow>& wanted_rows, bool measure_stored_mass, Result* result);

  struct Stats {
    int64_t steps = 0, recordings = 0, evictions = 0;
    int64_t planned_ahead = 0;  // steps whose plan was there
  };
  const Stats& stats() const { return stats_; }

 private:
  struct Key {
    AttentionStep::Sizes sizes;
    bool draws = false, mass = false;
    auto operator<=>(const Key&) const = default;
  };
  struct Step;
  // What a plan is of: each sequence's state and rows.
  using PlanKey = std::vector<std::pair<uint64_t, int64_t>>;

  Step* Find(const Key& key);

  Context ctx_;
  std::shared_ptr<const Weights> weights_;
  int64_t vocabulary_;
  size_t limit_;
  uint64_t clock_ = 0;
  std::vector<std::unique_ptr<Step>> steps_;
  PlanKey ahead_key_;  // of `ahead_`; empty: there is none
  AttentionStep ahead_;
  Stats stats_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_MODEL_DECODE_STEPS_H_
