#include "kernels/ops/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/row_view.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Logits of a fused loss are made for this many rows at a time: 64 rows of a vocabulary of 49152 are 12 MiB.
constexpr int64_t kChunkRows = 64;

float Max(const float* z, int64_t n) {
  float m = -kInf;
  for (int64_t i = 0; i < n; ++i) m = std::max(m, z[i]);
  return m;
}

SoftmaxState<float> RowState(const float* z, int64_t n) {
  SoftmaxState<float> state;
  state.m = Max(z, n);
  if (state.m == -kInf) return state;
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(z[i] - state.m);
  state.l = static_cast<float>(sum);
  return state;
}

// z becomes scale · softmax(z).
void SoftmaxInPlace(float* z, int64_t n, float lse, float scale) {
  for (int64_t i = 0; i < n; ++i) z[i] = lse == -kInf ? 0.0f : scale * std::exp(z[i] - lse);
}

// --- cross-entropy -------------------------------------------------------------------------------------------------

// One row's target distribution: ids with smoothing, or soft.
struct RowTarget {
  int32_t id = -1;
  const float* soft = nullptr;
  float weight = 0.0f;  // 0: the row does not count
};

float RowLoss(const float* z, int64_t n, const RowTarget& target, const CrossEntropyOptions& options, float lse) {
  double dot = 0.0;  // Σ y z, terms with y = 0 left out (their z may be −inf)
  if (target.soft) {
    for (int64_t i = 0; i < n; ++i) {
      if (target.soft[i] != 0.0f) dot += static_cast<double>(target.soft[i]) * z[i];
    }
  } else {
    const double smoothing = options.label_smoothing;
    dot = (1.0 - smoothing) * z[target.id];
    if (smoothing != 0.0) {
      double sum = 0.0;
      for (int64_t i = 0; i < n; ++i) sum += z[i];
      dot += smoothing / static_cast<double>(n) * sum;
    }
  }
  if (dot == -kInf) return kInf;
  double loss = static_cast<double>(lse) - dot;
  if (options.z_loss != 0.0f) loss += static_cast<double>(options.z_loss) * lse * lse;
  return static_cast<float>(loss);
}

// out (+)= scale · d loss / d z. `z` may be `out` when not adding.
template <bool kAdd>
void RowGrad(const float* z, int64_t n, const RowTarget& target, const CrossEntropyOptions& options, float lse,
             float scale, float* out) {
  const float softmax_scale = scale * (1.0f + 2.0f * options.z_loss * lse);
  const float uniform = target.soft ? 0.0f : scale * options.label_smoothing / static_cast<float>(n);
  for (int64_t i = 0; i < n; ++i) {
    float d = (lse == -kInf ? 0.0f : softmax_scale * std::exp(z[i] - lse)) - uniform;
    if (target.soft) d -= scale * target.soft[i];
    out[i] = kAdd ? out[i] + d : d;
  }
  if (!target.soft) out[target.id] -= scale * (1.0f - options.label_smoothing);
}

// The weight of each row, and what a mean divides by.
struct RowWeights {
  std::vector<float> weight;
  double sum = 0.0;

  float Scale(Reduction reduction) const {
    if (reduction != Reduction::kMean) return 1.0f;
    return sum > 0.0 ? static_cast<float>(1.0 / sum) : 0.0f;
  }
};

RowWeights WeighRows(const Tensor& targets, const Tensor& class_weights, int64_t rows, int64_t classes,
                     int32_t ignore_index) {
  RowWeights result;
  result.weight.assign(static_cast<size_t>(rows), 1.0f);
  for (int64_t r = 0; r < rows && targets; ++r) {
    const int32_t id = targets.i32()[r];
    if (id == ignore_index) {
      result.weight[r] = 0.0f;
      continue;
    }
    STILLHOUSE_CHECK(id >= 0 && id < classes) << "target " << id << " of " << classes << " classes";
    if (class_weights) result.weight[r] = class_weights.f32()[id];
  }
  for (float w : result.weight) result.sum += w;
  return result;
}

RowTarget TargetOf(const Tensor& targets, const Tensor& soft_targets, const RowWeights& weights, int64_t r) {
  RowTarget target;
  target.weight = weights.weight[r];
  if (targets) target.id = targets.i32()[r];
  if (soft_targets) target.soft = soft_targets.f32() + r * soft_targets.stride(0);
  return target;
}

float Total(const std::vector<float>& losses) {
  double sum = 0.0;
  for (float l : losses) sum += l;
  return static_cast<float>(sum);
}

// --- losses fused with the projection ------------------------------------------------------------------------------

// Calls row(r, logits) for every row of x · weightᵀ, chunk by chunk; with dx, what `row` leaves in the logits is their
// gradient and is folded into dx.
template <typename RowFn>
void ForEachLogitsRow(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& dx, const RowFn& row) {
  const int64_t rows = x.dim(0), vocabulary = weight.dim(0);
  if (rows == 0) return;
  const Tensor scratch = Tensor::Empty(backend.pool(), DType::kF32, {std::min(rows, kChunkRows), vocabulary});
  if (dx) FillF32(dx, 0.0f);
  for (int64_t begin = 0; begin < rows; begin += kChunkRows) {
    const int64_t end = std::min(rows, begin + kChunkRows);
    const Tensor logits = scratch.Slice(0, 0, end - begin);
    const Tensor part = x.Slice(0, begin, end);
    backend.kernels().Linear(backend, {part, weight, Tensor(), logits});
    float* z = logits.f32();
    backend.threads().ParallelFor(end - begin, [&](int64_t i, int) { row(begin + i, z + i * vocabulary); });
    if (dx) {
      LinearGradArgs grad{part, weight, logits};
      grad.dx = dx.Slice(0, begin, end);
      backend.kernels().LinearGrad(backend, grad);
    }
  }
}

struct TeacherEntry {
  int32_t id;
  float q;
};

// Loss of one row against the teacher's candidates; with `gradient`, z becomes scale · dz.
float DistillRow(const LinearDistillArgs& args, int64_t r, float* z, int64_t n, bool gradient, float scale) {
  const int64_t columns = args.ids.dim(1);
  const int32_t* ids = args.ids.i32() + r * columns;
  const float* logprobs = args.logprobs.f32() + r * columns;
  std::vector<TeacherEntry> entries;
  float best = -kInf;
  for (int64_t c = 0; c < columns; ++c) {
    if (ids[c] < 0) continue;
    STILLHOUSE_CHECK(ids[c] < n) << "candidate " << ids[c] << " of " << n;
    best = std::max(best, logprobs[c]);
    entries.push_back({ids[c], logprobs[c]});
  }
  const bool renormalised = args.mode == DistillMode::kRenormalised;
  const float shift = renormalised && best > -kInf ? best : 0.0f;
  double mass = 0.0;
  for (TeacherEntry& e : entries) {
    e.q = std::exp(e.q - shift);
    mass += e.q;
  }
  if (renormalised) {
    for (TeacherEntry& e : entries) e.q = mass > 0.0 ? static_cast<float>(e.q / mass) : 0.0f;
    mass = mass > 0.0 ? 1.0 : 0.0;
  }

  double loss = 0.0;
  float lse;
  if (args.mode == DistillMode::kTail) {
    // The tail's own log-sum is taken over the other tokens: 1 − Σp would cancel.
    std::vector<float> logits(entries.size());
    for (size_t e = 0; e < entries.size(); ++e) {
      logits[e] = z[entries[e].id];
      z[entries[e].id] = -kInf;
    }
    const SoftmaxState<float> tail = RowState(z, n);
    SoftmaxState<float> all = RowState(logits.data(), static_cast<int64_t>(logits.size()));
    MergeSoftmax(all, tail);
    lse = LogSumExp(all);
    const float tail_lse = LogSumExp(tail);
    const float rest = static_cast<float>(std::max(0.0, 1.0 - mass));
    const float total = static_cast<float>(mass) + rest;
    if (rest > 0.0f) loss -= static_cast<double>(rest) * (tail_lse - lse);
    if (gradient) {
      // Tokens of the tail: p·total − rest·p/p_tail; p/p_tail is the softmax within the tail.
      for (int64_t i = 0; i < n; ++i) {
        if (z[i] == -kInf) {
          z[i] = 0.0f;
          continue;
        }
        z[i] = scale * (total * std::exp(z[i] - lse) - rest * std::exp(z[i] - tail_lse));
      }
    }
    for (size_t e = 0; e < entries.size(); ++e) {
      const float q = entries[e].q, logit = logits[e];
      if (q > 0.0f) loss -= static_cast<double>(q) * (logit - lse);
      z[entries[e].id] = gradient ? scale * (total * SoftmaxWeight(logit, lse) - q) : logit;
    }
    return static_cast<float>(loss);
  }

  lse = LogSumExp(RowState(z, n));
  for (const TeacherEntry& e : entries) {
    if (e.q > 0.0f) loss -= static_cast<double>(e.q) * (z[e.id] - lse);
  }
  if (gradient) {
    SoftmaxInPlace(z, n, lse, scale * static_cast<float>(mass));
    for (const TeacherEntry& e : entries) z[e.id] -= scale * e.q;
  }
  return static_cast<float>(loss);
}

// The k best of z, best first, ties to the lower id.
struct Entry {
  float logit;
  int32_t id;
};
bool Better(const Entry& a, const Entry& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

void SelectBest(const float* z, int64_t n, int64_t k, std::vector<Entry>& out) {
  out.clear();
  for (int64_t i = 0; i < n; ++i) {
    if (static_cast<int64_t>(out.size()) >= 4 * k + 64) {
      std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), Better);
      out.resize(static_cast<size_t>(k));
    }
    out.push_back({z[i], static_cast<int32_t>(i)});
  }
  std::partial_sort(out.begin(), out.begin() + k, out.end(), Better);
  out.resize(static_cast<size_t>(k));
}

}  // namespace

void Softmax(Backend& backend, const SoftmaxArgs& args) {
  const RowView z(args.z), out(args.out);
  const int64_t n = z.width();
  backend.threads().ParallelRanges(z.rows(), 1 + 4096 / (n + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = z.row(r);
      float* to = out.row(r);
      const SoftmaxState<float> state = RowState(in, n);
      const float inverse = InverseSum(state);
      for (int64_t i = 0; i < n; ++i) to[i] = SoftmaxWeight(in[i], state.m) * inverse;
    }
  });
}

void SoftmaxGrad(Backend& backend, const SoftmaxGradArgs& args) {
  const RowView s(args.out), g(args.dout), dz(args.dz);
  const int64_t n = s.width();
  backend.threads().ParallelRanges(s.rows(), 1 + 4096 / (n + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float *p = s.row(r), *d = g.row(r);
      float* to = dz.row(r);
      double dot = 0.0;
      for (int64_t i = 0; i < n; ++i) dot += static_cast<double>(p[i]) * d[i];
      for (int64_t i = 0; i < n; ++i) to[i] += p[i] * (d[i] - static_cast<float>(dot));
    }
  });
}

void LogSoftmax(Backend& backend, const LogSoftmaxArgs& args) {
  const RowView z(args.z), out(args.out);
  const int64_t n = z.width();
  backend.threads().ParallelRanges(z.rows(), 1 + 4096 / (n + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = z.row(r);
      float* to = out.row(r);
      const SoftmaxState<float> state = RowState(in, n);
      const float log_sum = std::log(state.l);
      for (int64_t i = 0; i < n; ++i) to[i] = state.m == -kInf ? -kInf : (in[i] - state.m) - log_sum;
    }
  });
}

void LogSoftmaxGrad(Backend& backend, const LogSoftmaxGradArgs& args) {
  const RowView log_p(args.out), g(args.dout), dz(args.dz);
  const int64_t n = log_p.width();
  backend.threads().ParallelRanges(log_p.rows(), 1 + 4096 / (n + 1), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float *lp = log_p.row(r), *d = g.row(r);
      float* to = dz.row(r);
      double sum = 0.0;
      for (int64_t i = 0; i < n; ++i) sum += d[i];
      for (int64_t i = 0; i < n; ++i) to[i] += d[i] - std::exp(lp[i]) * static_cast<float>(sum);
    }
  });
}

void CrossEntropy(Backend& backend, const CrossEntropyArgs& args) {
  const RowView z(args.z);
  const int64_t rows = z.rows(), n = z.width();
  const RowWeights weights = WeighRows(args.targets, args.class_weights, rows, n, args.options.ignore_index);
  std::vector<float> losses(static_cast<size_t>(rows));
  backend.threads().ParallelFor(rows, [&](int64_t r, int) {
    const RowTarget target = TargetOf(args.targets, args.soft_targets, weights, r);
    if (target.weight == 0.0f) return;
    const float lse = LogSumExp(RowState(z.row(r), n));
    losses[r] = target.weight * RowLoss(z.row(r), n, target, args.options, lse);
  });
  float* loss = args.loss.f32();
  if (args.options.reduction == Reduction::kNone) {
    for (int64_t r = 0; r < rows; ++r) loss[r * args.loss.stride(0)] = losses[r];
  } else {
    loss[0] = Total(losses) * weights.Scale(args.options.reduction);
  }
}

void CrossEntropyGrad(Backend& backend, const CrossEntropyGradArgs& args) {
  const RowView z(args.z), dz(args.dz);
  const int64_t rows = z.rows(), n = z.width();
  const RowWeights weights = WeighRows(args.targets, args.class_weights, rows, n, args.options.ignore_index);
  const float* dloss = args.dloss.f32();
  const bool per_row = args.options.reduction == Reduction::kNone;
  const float reduction = weights.Scale(args.options.reduction);
  backend.threads().ParallelFor(rows, [&](int64_t r, int) {
    const RowTarget target = TargetOf(args.targets, args.soft_targets, weights, r);
    if (target.weight == 0.0f) return;
    const float scale = reduction * target.weight * dloss[per_row ? r * args.dloss.stride(0) : 0];
    const float lse = LogSumExp(RowState(z.row(r), n));
    RowGrad<true>(z.row(r), n, target, args.options, lse, scale, dz.row(r));
  });
}

void LinearCrossEntropy(Backend& backend, const LinearCrossEntropyArgs& args) {
  const int64_t rows = args.x.dim(0), n = args.weight.dim(0);
  const RowWeights weights = WeighRows(args.targets, Tensor(), rows, n, args.options.ignore_index);
  const float scale = weights.Scale(args.options.reduction);
  std::vector<float> losses(static_cast<size_t>(rows));
  ForEachLogitsRow(backend, args.x, args.weight, args.dx, [&](int64_t r, float* z) {
    const RowTarget target = TargetOf(args.targets, Tensor(), weights, r);
    if (target.weight == 0.0f) {
      if (args.dx) std::fill(z, z + n, 0.0f);
      return;
    }
    const float lse = LogSumExp(RowState(z, n));
    losses[r] = RowLoss(z, n, target, args.options, lse);
    if (args.dx) RowGrad<false>(z, n, target, args.options, lse, scale, z);
  });
  args.loss.f32()[0] = Total(losses) * scale;
}

void LinearDistill(Backend& backend, const LinearDistillArgs& args) {
  const int64_t rows = args.x.dim(0), n = args.weight.dim(0), columns = args.ids.dim(1);
  RowWeights weights;
  weights.weight.assign(static_cast<size_t>(rows), 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* ids = args.ids.i32() + r * columns;
    if (std::none_of(ids, ids + columns, [](int32_t id) { return id >= 0; })) continue;
    weights.weight[r] = args.row_weights ? args.row_weights.f32()[r] : 1.0f;
    weights.sum += weights.weight[r];
  }
  const float scale = weights.Scale(Reduction::kMean);
  std::vector<float> losses(static_cast<size_t>(rows));
  ForEachLogitsRow(backend, args.x, args.weight, args.dx, [&](int64_t r, float* z) {
    const float w = weights.weight[r];
    if (w == 0.0f) {
      if (args.dx) std::fill(z, z + n, 0.0f);
      return;
    }
    losses[r] = w * DistillRow(args, r, z, n, args.dx.defined(), scale * w);
  });
  args.loss.f32()[0] = Total(losses) * scale;
}

void TopLogprobs(Backend& backend, const TopLogprobsArgs& args) {
  const int64_t n = args.weight.dim(0);
  ForEachLogitsRow(backend, args.x, args.weight, Tensor(), [&](int64_t r, float* z) {
    const float lse = LogSumExp(RowState(z, n));
    std::vector<Entry> best;
    if (args.k > 0) SelectBest(z, n, args.k, best);
    for (int64_t i = 0; i < args.k; ++i) {
      args.top_ids.i32()[r * args.k + i] = best[i].id;
      args.top_logprobs.f32()[r * args.k + i] = best[i].logit - lse;
    }
    if (args.tokens) {
      const int32_t id = args.tokens.i32()[r];
      STILLHOUSE_CHECK(id >= 0 && id < n) << id;
      args.token_logprobs.f32()[r] = z[id] - lse;
    }
  });
}

}  // namespace stillhouse::cpu
