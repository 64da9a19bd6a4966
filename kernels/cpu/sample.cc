#include "kernels/ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/select_best.h"

namespace stillhouse::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The largest logit, its lowest id (−1 if there is nothing but −inf), and whether every logit can be used (no NaN, no
// +inf).
struct RowScan {
  ScoredId best{-kInf, -1};
  bool usable = true;
};

RowScan Scan(const SimdTable& simd, const float* z, int64_t n) {
  RowScan scan;
  bool unusable = false;
  scan.best.logit = simd.row_max(z, n, &unusable);
  scan.usable = !unusable;
  if (scan.usable && scan.best.logit > -kInf) {
    scan.best.id = static_cast<int32_t>(simd.find_above(z, 0, n, std::nextafter(scan.best.logit, -kInf)));
  }
  return scan;
}

void Penalise(const SampleRow& row, int64_t n, float* z) {
  for (const auto& [id, count] : row.history) {
    if (id < 0 || id >= n || count <= 0) continue;
    float& logit = z[id];
    logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    logit -= row.frequency_penalty * static_cast<float>(count) + row.presence_penalty;
    if (!(logit < kInf)) logit = -kInf;
  }
  for (int32_t id : row.banned) {
    if (id >= 0 && id < n) z[id] = -kInf;
  }
}

bool Changes(const SampleRow& row) {
  const bool penalties =
      row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
  return !row.banned.empty() || (penalties && !row.history.empty());
}

// A draw from the whole vocabulary: blocks are summed first, and only the one that holds the target is walked.
int32_t DrawFromAll(const SimdTable& simd, const float* z, int64_t n, float best, float inverse_temperature, double u) {
  constexpr int64_t kBlock = 1024;
  std::vector<double> sums;
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    sums.push_back(simd.exp_sum(z + begin, std::min(kBlock, n - begin), best, inverse_temperature));
    total += sums.back();
  }
  double left = u * total;
  size_t block = 0;
  while (block + 1 < sums.size() && left >= sums[block]) left -= sums[block++];
  // Rounding may leave the target just past the last weight: then the last one that has any is taken.
  while (block > 0 && sums[block] <= 0.0) --block;
  int32_t last = -1;
  const int64_t begin = static_cast<int64_t>(block) * kBlock;
  for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) {
    const double weight = std::exp((z[i] - best) * inverse_temperature);
    if (weight <= 0.0) continue;
    last = static_cast<int32_t>(i);
    left -= weight;
    if (left < 0.0) break;
  }
  return last;
}

// Draws among z[0, n) by the row's settings; `best` is the largest logit.
int32_t Draw(const SimdTable& simd, const SampleRow& row, const float* z, int64_t n, float best,
             std::vector<ScoredId>& kept) {
  const float inverse = 1.0f / row.temperature;
  const double u = UniformDraw(row.seed, row.step);
  const bool cut_count = row.top_k > 0 && row.top_k < n;
  const bool cut_mass = row.top_p < 1.0f;
  const bool cut_ratio = row.min_p > 0.0f;
  if (!cut_count && !cut_mass && !cut_ratio) return DrawFromAll(simd, z, n, best, inverse, u);
  auto weight = [&](float logit) { return static_cast<double>(std::exp((logit - best) * inverse)); };

  // Every cut keeps a prefix of the tokens in order of their logits.
  double total = 0.0;
  if (cut_count) {
    SelectBest(simd, z, n, row.top_k, kept);
    for (const ScoredId& c : kept) total += weight(c.logit);
  } else {
    if (cut_mass) total = simd.exp_sum(z, n, best, inverse);
    // A band of logits below the best, as wide as min_p allows and, for top_p, widened until it holds the mass.
    const float widest = cut_ratio ? 1.0f - std::log(std::min(row.min_p, 1.0f)) : kInf;
    for (float band = cut_mass ? std::min(4.0f, widest) : widest;; band = band < 64.0f ? 2.0f * band : kInf) {
      // Never the best itself: it may be so large that the band is below its last place.
      const float threshold = std::min(best - band * row.temperature, std::nextafter(best, -kInf));
      kept.clear();
      double mass = 0.0;
      for (int64_t i = simd.find_above(z, 0, n, threshold); i < n; i = simd.find_above(z, i + 1, n, threshold)) {
        kept.push_back({z[i], static_cast<int32_t>(i)});
        mass += weight(z[i]);
      }
      if (!cut_mass || band >= widest || mass >= static_cast<double>(row.top_p) * total) break;
    }
    std::sort(kept.begin(), kept.end(), Better);
  }
  size_t count = kept.size();
  if (cut_mass) {
    double mass = 0.0;
    for (size_t i = 0; i < count; ++i) {
      mass += weight(kept[i].logit);
      if (mass >= static_cast<double>(row.top_p) * total) count = i + 1;
    }
  }
  if (cut_ratio) {
    while (count > 1 && weight(kept[count - 1].logit) < row.min_p) --count;
  }
  kept.resize(std::max<size_t>(count, 1));
  // The draw walks the kept tokens in order of id, whatever was cut.
  std::sort(kept.begin(), kept.end(), [](const ScoredId& a, const ScoredId& b) { return a.id < b.id; });
  double left = 0.0;
  for (const ScoredId& c : kept) left += weight(c.logit);
  left *= u;
  int32_t last = kept[0].id;
  for (const ScoredId& c : kept) {
    const double w = weight(c.logit);
    if (w <= 0.0) continue;
    last = c.id;
    left -= w;
    if (left < 0.0) break;
  }
  return last;
}

SampledToken SampleOne(const SimdTable& simd, const SampleRow& row, const float* z, int64_t n) {
  SampledToken out;
  const RowScan scan = Scan(simd, z, n);
  RowScan adjusted = scan;
  std::vector<float> changed;
  const float* logits = z;
  if (scan.usable && Changes(row)) {
    changed.assign(z, z + n);
    Penalise(row, n, changed.data());
    logits = changed.data();
    adjusted = Scan(simd, logits, n);
  }
  if (!scan.usable || adjusted.best.id < 0) {
    out.invalid = true;
    return out;
  }
  std::vector<ScoredId> kept;
  out.id = row.temperature < 1e-5f ? adjusted.best.id : Draw(simd, row, logits, n, adjusted.best.logit, kept);
  if (row.logprobs > 0) {
    const double lse = scan.best.logit + std::log(simd.exp_sum(z, n, scan.best.logit, 1.0f));
    out.logprob = static_cast<float>(z[out.id] - lse);
    SelectBest(simd, z, n, row.logprobs, kept);
    for (const ScoredId& c : kept) out.top.emplace_back(c.id, static_cast<float>(c.logit - lse));
  }
  return out;
}

}  // namespace

void Sample(Backend& backend, const SampleArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const float* logits = args.logits.f32();
  const int64_t stride = args.logits.stride(0);
  backend.threads().ParallelFor(args.logits.dim(0), [&](int64_t r, int) {
    (*args.out)[r] = SampleOne(simd, (*args.rows)[r], logits + r * stride, args.vocabulary);
  });
}

}  // namespace stillhouse::cpu
