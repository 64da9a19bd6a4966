#include "kernels/ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/kernel_table.h"

namespace stillhouse::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Candidate {
  float logit;
  int32_t id;
};

// Best first, ties to the lower id.
bool Better(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// The largest logit, its lowest id, and whether every logit can be used (no NaN, no +inf).
struct RowScan {
  Candidate best{-kInf, -1};
  bool usable = true;
};

RowScan Scan(const float* z, int64_t n) {
  RowScan scan;
  bool bad = false;
  float best = -kInf;
  for (int64_t i = 0; i < n; ++i) {
    bad |= !(z[i] < kInf);
    best = z[i] > best ? z[i] : best;
  }
  scan.usable = !bad;
  for (int64_t i = 0; i < n && best > -kInf; ++i) {
    if (z[i] == best) {
      scan.best = {best, static_cast<int32_t>(i)};
      break;
    }
  }
  return scan;
}

double SumExp(const float* z, int64_t n, float shift, float inverse_temperature) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp((z[i] - shift) * inverse_temperature);
  return sum;
}

// The `count` best logits (or fewer, if there are fewer above −inf), best first.
void SelectBest(const float* z, int64_t n, int64_t count, std::vector<Candidate>& out) {
  out.clear();
  count = std::min(count, n);
  if (count <= 0) return;
  // `out` holds up to 2·count candidates above the running threshold; when full, it is cut to the best `count`.
  const size_t room = static_cast<size_t>(2 * count + 64);
  float threshold = -kInf;
  for (int64_t i = 0; i < n; ++i) {
    if (!(z[i] > threshold)) continue;
    out.push_back({z[i], static_cast<int32_t>(i)});
    if (out.size() >= room) {
      std::nth_element(out.begin(), out.begin() + (count - 1), out.end(), Better);
      out.resize(static_cast<size_t>(count));
      threshold = out[static_cast<size_t>(count - 1)].logit;  // equal logits with higher ids lose the tie
    }
  }
  if (out.size() > static_cast<size_t>(count)) {
    std::nth_element(out.begin(), out.begin() + (count - 1), out.end(), Better);
    out.resize(static_cast<size_t>(count));
  }
  std::sort(out.begin(), out.end(), Better);
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

// Draws among z[0, n) by the row's settings; `best` is the largest logit.
int32_t Draw(const SampleRow& row, const float* z, int64_t n, float best, std::vector<Candidate>& kept) {
  const float inverse = 1.0f / row.temperature;
  const double u = UniformDraw(row.seed, row.step);
  const bool cut_count = row.top_k > 0 && row.top_k < n;
  const bool cut_mass = row.top_p < 1.0f;
  const bool cut_ratio = row.min_p > 0.0f;
  auto weight = [&](float logit) { return std::exp((logit - best) * inverse); };

  if (!cut_count && !cut_mass && !cut_ratio) {
    const double target = u * SumExp(z, n, best, inverse);
    double sum = 0.0;
    int32_t last = -1;
    for (int64_t i = 0; i < n; ++i) {
      const double w = weight(z[i]);
      if (w <= 0.0) continue;
      sum += w;
      last = static_cast<int32_t>(i);
      if (sum > target) break;
    }
    return last;
  }

  // Every cut keeps a prefix of the tokens in order of their logits.
  double total = 0.0;
  if (cut_count) {
    SelectBest(z, n, row.top_k, kept);
    for (const Candidate& c : kept) total += weight(c.logit);
  } else {
    total = cut_mass ? SumExp(z, n, best, inverse) : 0.0;
    // Widen the band of logits below the best until it holds the mass that top_p asks for.
    float band = cut_ratio ? std::max(0.0f, -std::log(std::min(row.min_p, 1.0f))) * 1.0001f + 1e-6f : kInf;
    if (cut_mass) band = std::min(band, 4.0f);
    while (true) {
      kept.clear();
      double mass = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        if (z[i] == -kInf || (best - z[i]) * inverse > band) continue;
        kept.push_back({z[i], static_cast<int32_t>(i)});
        mass += weight(z[i]);
      }
      if (!cut_mass || mass >= static_cast<double>(row.top_p) * total || band == kInf) break;
      if (cut_ratio && std::exp(-band) <= row.min_p) break;
      band = band < 64.0f ? 2.0f * band : kInf;
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
  std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  double sum = 0.0;
  for (const Candidate& c : kept) sum += weight(c.logit);
  const double target = u * sum;
  sum = 0.0;
  int32_t last = kept[0].id;
  for (const Candidate& c : kept) {
    const double w = weight(c.logit);
    if (w <= 0.0) continue;
    sum += w;
    last = c.id;
    if (sum > target) break;
  }
  return last;
}

SampledToken SampleOne(const SampleRow& row, const float* z, int64_t n) {
  SampledToken out;
  const RowScan scan = Scan(z, n);
  RowScan adjusted = scan;
  std::vector<float> changed;
  const float* logits = z;
  if (scan.usable && Changes(row)) {
    changed.assign(z, z + n);
    Penalise(row, n, changed.data());
    logits = changed.data();
    adjusted = Scan(logits, n);
  }
  if (!scan.usable || adjusted.best.id < 0) {
    out.invalid = true;
    return out;
  }
  std::vector<Candidate> kept;
  out.id = row.temperature < 1e-5f ? adjusted.best.id : Draw(row, logits, n, adjusted.best.logit, kept);
  if (row.logprobs > 0) {
    const double lse = scan.best.logit + std::log(SumExp(z, n, scan.best.logit, 1.0f));
    out.logprob = static_cast<float>(z[out.id] - lse);
    SelectBest(z, n, row.logprobs, kept);
    for (const Candidate& c : kept) out.top.emplace_back(c.id, static_cast<float>(c.logit - lse));
  }
  return out;
}

}  // namespace

void Sample(Backend& backend, const SampleArgs& args) {
  const float* logits = args.logits.f32();
  const int64_t stride = args.logits.stride(0);
  backend.threads().ParallelFor(args.logits.dim(0), [&](int64_t r, int) {
    (*args.out)[r] = SampleOne((*args.rows)[r], logits + r * stride, args.vocabulary);
  });
}

}  // namespace stillhouse::cpu
