// From logits to tokens: penalties, temperature, top-k, top-p, min-p, a seeded draw, and log-probabilities.
#ifndef STILLHOUSE_KERNELS_OPS_SAMPLE_H_
#define STILLHOUSE_KERNELS_OPS_SAMPLE_H_

#include <cstdint>
#include <vector>

#include "kernels/ops/context.h"

namespace stillhouse {

// One row's settings, in the order in which they apply: logits at or above `vocabulary` are masked; penalties on tokens
// of `history` (repetition: positive logits divided, negative multiplied; frequency·count and presence subtracted);
// temperature; top_k; top_p over what is left (the fewest tokens, best first, whose share reaches it); min_p against
// the best; draw. Ties go to the lower id. The draw takes the first kept token, in order of id, at which the cumulated
// probability exceeds UniformDraw(seed, step). temperature < 1e-5 is greedy: the best logit after penalties.
struct SampleRow {
  float temperature = 0.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0: all
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float frequency_penalty = 0.0f;
  float presence_penalty = 0.0f;
  uint64_t seed = 0;
  uint64_t step = 0;  // draws with one (seed, step) are the same whatever else is in the batch
  std::vector<std::pair<int32_t, int32_t>> history;  // (token, count), for the penalties
  std::vector<int32_t> banned;                       // never drawn
  int32_t logprobs = 0;                              // how many best to report (0: none, not even the drawn token's)
};

struct SampledToken {
  int32_t id = -1;
  bool invalid = false;  // the row held a NaN or +inf, or nothing but −inf: id is −1 and the request fails
  float logprob = 0.0f;  // of the drawn token, from the unmodified logits of the vocabulary (natural logarithm)
  std::vector<std::pair<int32_t, float>> top;  // best first, from the unmodified logits
};

// logits f32 [n, V]; rows and results have n entries. `vocabulary` ≤ V: ids that the tokenizer knows.
struct SampleArgs {
  Tensor logits;
  int64_t vocabulary = 0;
  const std::vector<SampleRow>* rows = nullptr;
  std::vector<SampledToken>* out = nullptr;
};
std::vector<SampledToken> Sample(const Context& ctx, const Tensor& logits, int64_t vocabulary,
                                 const std::vector<SampleRow>& rows);

// Counter-based generator (Philox 4x32-10, Salmon et al. 2011): a uniform in [0, 1) from (seed, step), the same on
// every backend.
double UniformDraw(uint64_t seed, uint64_t step);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_SAMPLE_H_
