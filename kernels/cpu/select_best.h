// The best of a row of logits without sorting it.
#ifndef STILLHOUSE_KERNELS_CPU_SELECT_BEST_H_
#define STILLHOUSE_KERNELS_CPU_SELECT_BEST_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/simd.h"

namespace stillhouse::cpu {

struct ScoredId {
  float logit;
  int32_t id;
};

// Best first, ties to the lower id.
inline bool Better(const ScoredId& a, const ScoredId& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// The `count` best of z[0, n) into `out`, best first. −inf and NaN are passed over: there may be fewer.
inline void SelectBest(const SimdTable& simd, const float* z, int64_t n, int64_t count, std::vector<ScoredId>& out) {
  out.clear();
  count = std::min(count, n);
  if (count <= 0) return;
  const auto cut = [&] {
    std::nth_element(out.begin(), out.begin() + (count - 1), out.end(), Better);
    out.resize(static_cast<size_t>(count));
  };
  // `out` gathers what is above the threshold; when full, it is cut to the best, and the worst of them is the new
  // threshold (an equal logit further on has a higher id and loses the tie).
  const size_t room = static_cast<size_t>(2 * count + 64);
  float threshold = -std::numeric_limits<float>::infinity();
  for (int64_t i = simd.find_above(z, 0, n, threshold); i < n; i = simd.find_above(z, i + 1, n, threshold)) {
    out.push_back({z[i], static_cast<int32_t>(i)});
    if (out.size() < room) continue;
    cut();
    threshold = out[static_cast<size_t>(count - 1)].logit;
  }
  if (out.size() > static_cast<size_t>(count)) cut();
  std::sort(out.begin(), out.end(), Better);
}

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_SELECT_BEST_H_
