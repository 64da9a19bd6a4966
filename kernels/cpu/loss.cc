#include "kernels/ops/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/row_view.h"
#include "kernels/cpu/select_best.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cpu {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Logits of a fused loss are made for this many rows at a time: 64 rows of a vocabulary of 49152 are 12 MiB.
constexpr int64_t kChunkRows = 64;

// A row's running softmax: its largest logit and Σ e^{z−m}.
SoftmaxState<float> RowState(const SimdTable& simd, const float* z, int64_t n) {
  SoftmaxState<float> state;
  state.m = simd.row_max(z, n, nullptr);
  if (state.m > -kInf) state.l = static_cast<float>(simd.exp_sum(z, n, state.m, 1.0f));
  return state;
}

// The same, with `out` (which may be z) set to e^{z−m}; a row of −inf gives zeros.
SoftmaxState<float> ExponentiateRow(const SimdTable& simd, const float* z, int64_t n, float* out) {
  SoftmaxState<float> state;
  state.m = simd.row_max(z, n, nullptr);
  if (state.m > -kInf) {
    state.l = static_cast<float>(simd.exp_into(z, n, state.m, out));
  } else {
    std::fill(out, out + n, 0.0f);
  }
  return state;
}

int64_t RowsPerTask(int64_t width) { return 1 + 4096 / (width + 1); }

// --- cross-entropy -------------------------------------------------------------------------------------------------

// One row's target distribution: ids with smoothing, or soft.
struct RowTarget {
  int32_t id = -1;
  const float* soft = nullptr;
  float weight = 0.0f;  // 0: the row does not count
};

// Σ y z, terms with y = 0 left out (their z may be −inf).
double TargetLogit(const float* z, int64_t n, const RowTarget& target, const CrossEntropyOptions& options) {
  double dot = 0.0;
  if (target.soft) {
    for (int64_t i = 0; i < n; ++i) {
      if (target.soft[i] != 0.0f) dot += static_cast<double>(target.soft[i]) * z[i];
    }
    return dot;
  }
  const double smoothing = options.label_smoothing;
  if (smoothing != 0.0) {
    for (int64_t i = 0; i < n; ++i) dot += z[i];
    dot *= smoothing / static_cast<double>(n);
  }
  return smoothing == 1.0 ? dot : dot + (1.0 - smoothing) * z[target.id];
}

float RowLoss(float lse, double target_logit, const CrossEntropyOptions& options) {
  if (target_logit == -kInf) return kInf;
  double loss = static_cast<double>(lse) - target_logit;
  if (options.z_loss != 0.0f) loss += static_cast<double>(options.z_loss) * lse * lse;
  return static_cast<float>(loss);
}

// What a row's exponentials are multiplied by to become the softmax's part of its gradient.
float SoftmaxFactor(const SoftmaxState<float>& state, const CrossEntropyOptions& options, float scale) {
  if (state.l <= 0.0f) return 0.0f;
  return scale * (1.0f + 2.0f * options.z_loss * LogSumExp(state)) / state.l;
}

// out −= scale · y.
void SubtractTarget(const RowTarget& target, const CrossEntropyOptions& options, float scale, int64_t n, float* out) {
  if (target.soft) {
    for (int64_t i = 0; i < n; ++i) out[i] -= scale * target.soft[i];
    return;
  }
  const float uniform = scale * options.label_smoothing / static_cast<float>(n);
  for (int64_t i = 0; i < n && uniform != 0.0f; ++i) out[i] -= uniform;
  out[target.id] -= scale * (1.0f - options.label_smoothing);
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

// Floats from one row of logits to the next: rows of a power-of-two vocabulary would all fall into the same few sets of
// every cache, and a product walks down many rows at once. 13 lines of 64 bytes past a page's multiple, no two do.
int64_t LogitsRow(int64_t vocabulary) {
  constexpr int64_t kLine = 16, kPage = 64 * kLine;
  const int64_t rest = 13 * kLine;
  return (std::max<int64_t>(vocabulary - rest, 0) + kPage - 1) / kPage * kPage + rest;
}

// Calls row(r, logits) for every row of x · weightᵀ, chunk by chunk; with dx, what `row` leaves in the logits is their
// gradient and is folded into dx.
template <typename RowFn>
void ForEachLogitsRow(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& dx, const RowFn& row) {
  const int64_t rows = x.dim(0), vocabulary = weight.dim(0);
  if (rows == 0) return;
  const int64_t stride = LogitsRow(vocabulary);
  const Tensor scratch =
      Tensor::Empty(backend.pool(), DType::kF32, {std::min(rows, kChunkRows), stride}).Slice(1, 0, vocabulary);
  if (dx) FillF32(dx, 0.0f);
  for (int64_t begin = 0; begin < rows; begin += kChunkRows) {
    const int64_t end = std::min(rows, begin + kChunkRows);
    const Tensor logits = scratch.Slice(0, 0, end - begin);
    const Tensor part = x.Slice(0, begin, end);
    backend.kernels().Linear(backend, {part, weight, Tensor(), logits});
    float* z = logits.f32();
    backend.threads().ParallelFor(end - begin, [&](int64_t i, int) { row(begin + i, z + i * stride); });
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
float DistillRow(const SimdTable& simd, const LinearDistillArgs& args, int64_t r, float* z, int64_t n, bool gradient,
                 float scale) {
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
  if (args.mode == DistillMode::kTail) {
    // The tail's own log-sum is taken over the other tokens: 1 − Σp would cancel.
    std::vector<float> logits(entries.size());
    for (size_t e = 0; e < entries.size(); ++e) {
      logits[e] = z[entries[e].id];
      z[entries[e].id] = -kInf;
    }
    const SoftmaxState<float> tail = gradient ? ExponentiateRow(simd, z, n, z) : RowState(simd, z, n);
    SoftmaxState<float> all = RowState(simd, logits.data(), static_cast<int64_t>(logits.size()));
    MergeSoftmax(all, tail);
    const float lse = LogSumExp(all);
    const float rest = static_cast<float>(std::max(0.0, 1.0 - mass));
    const float total = static_cast<float>(mass) + rest;
    if (rest > 0.0f) loss -= static_cast<double>(rest) * (LogSumExp(tail) - lse);
    if (gradient) {
      // Tokens of the tail: p·total − rest·p/p_tail; p/p_tail is the softmax within the tail.
      simd.scale(scale * (total * SoftmaxWeight(tail.m, lse) - rest * InverseSum(tail)), z, n);
    }
    for (size_t e = 0; e < entries.size(); ++e) {
      const float q = entries[e].q, logit = logits[e];
      if (q > 0.0f) loss -= static_cast<double>(q) * (logit - lse);
      if (gradient) z[entries[e].id] = scale * (total * SoftmaxWeight(logit, lse) - q);
    }
    return static_cast<float>(loss);
  }

  double target_logit = 0.0;
  for (const TeacherEntry& e : entries) {
    if (e.q > 0.0f) target_logit += static_cast<double>(e.q) * z[e.id];
  }
  const SoftmaxState<float> state = gradient ? ExponentiateRow(simd, z, n, z) : RowState(simd, z, n);
  if (gradient) {
    simd.scale(scale * static_cast<float>(mass) * InverseSum(state), z, n);
    for (const TeacherEntry& e : entries) z[e.id] -= scale * e.q;
  }
  if (target_logit == -kInf) return kInf;
  return static_cast<float>(mass * LogSumExp(state) - target_logit);
}

}  // namespace

void Softmax(Backend& backend, const SoftmaxArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView z(args.z), out(args.out);
  const int64_t n = z.width();
  backend.threads().ParallelRanges(z.rows(), RowsPerTask(n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* to = out.row(r);
      const SoftmaxState<float> state = ExponentiateRow(simd, z.row(r), n, to);
      simd.scale(InverseSum(state), to, n);
    }
  });
}

void SoftmaxGrad(Backend& backend, const SoftmaxGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView s(args.out), g(args.dout), dz(args.dz);
  const int64_t n = s.width();
  backend.threads().ParallelRanges(s.rows(), RowsPerTask(n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      simd.softmax_grad_row(s.row(r), g.row(r), simd.dot(s.row(r), g.row(r), n), dz.row(r), n);
    }
  });
}

void LogSoftmax(Backend& backend, const LogSoftmaxArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView z(args.z), out(args.out);
  const int64_t n = z.width();
  backend.threads().ParallelRanges(z.rows(), RowsPerTask(n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* in = z.row(r);
      float* to = out.row(r);
      const SoftmaxState<float> state = RowState(simd, in, n);
      if (state.m == -kInf) {
        std::fill(to, to + n, -kInf);
        continue;
      }
      // In two steps: m + log ℓ would be rounded to m's last place.
      simd.shift_into(in, state.m, to, n);
      simd.shift_into(to, std::log(state.l), to, n);
    }
  });
}

void LogSoftmaxGrad(Backend& backend, const LogSoftmaxGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView log_p(args.out), g(args.dout), dz(args.dz);
  const int64_t n = log_p.width();
  backend.threads().ParallelRanges(log_p.rows(), RowsPerTask(n), [&](int64_t begin, int64_t end, int) {
    float* p = ThreadScratch(ScratchSlot::kRows, n);
    for (int64_t r = begin; r < end; ++r) {
      const float* d = g.row(r);
      double sum = 0.0;
      for (int64_t i = 0; i < n; ++i) sum += d[i];
      simd.exp_into(log_p.row(r), n, 0.0f, p);
      simd.axpy(1.0f, d, dz.row(r), n);
      simd.axpy(-static_cast<float>(sum), p, dz.row(r), n);
    }
  });
}

void CrossEntropy(Backend& backend, const CrossEntropyArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const RowView z(args.z);
  const int64_t rows = z.rows(), n = z.width();
  const RowWeights weights = WeighRows(args.targets, args.class_weights, rows, n, args.options.ignore_index);
  std::vector<float> losses(static_cast<size_t>(rows));
  backend.threads().ParallelFor(rows, [&](int64_t r, int) {
    const RowTarget target = TargetOf(args.targets, args.soft_targets, weights, r);
    if (target.weight == 0.0f) return;
    const float lse = LogSumExp(RowState(simd, z.row(r), n));
    losses[r] = target.weight * RowLoss(lse, TargetLogit(z.row(r), n, target, args.options), args.options);
  });
  float* loss = args.loss.f32();
  if (args.options.reduction == Reduction::kNone) {
    for (int64_t r = 0; r < rows; ++r) loss[r * args.loss.stride(0)] = losses[r];
  } else {
    loss[0] = Total(losses) * weights.Scale(args.options.reduction);
  }
}

void CrossEntropyGrad(Backend& backend, const CrossEntropyGradArgs& args) {
  const SimdTable& simd = SimdOf(backend);
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
    float* p = ThreadScratch(ScratchSlot::kRows, n);
    const SoftmaxState<float> state = ExponentiateRow(simd, z.row(r), n, p);
    simd.axpy(SoftmaxFactor(state, args.options, scale), p, dz.row(r), n);
    SubtractTarget(target, args.options, scale, n, dz.row(r));
  });
}

void LinearCrossEntropy(Backend& backend, const LinearCrossEntropyArgs& args) {
  const SimdTable& simd = SimdOf(backend);
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
    const double target_logit = TargetLogit(z, n, target, args.options);
    const SoftmaxState<float> state = args.dx ? ExponentiateRow(simd, z, n, z) : RowState(simd, z, n);
    losses[r] = RowLoss(LogSumExp(state), target_logit, args.options);
    if (!args.dx) return;
    simd.scale(SoftmaxFactor(state, args.options, scale), z, n);
    SubtractTarget(target, args.options, scale, n, z);
  });
  args.loss.f32()[0] = Total(losses) * scale;
}

void LinearDistill(Backend& backend, const LinearDistillArgs& args) {
  const SimdTable& simd = SimdOf(backend);
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
    losses[r] = w * DistillRow(simd, args, r, z, n, args.dx.defined(), scale * w);
  });
  args.loss.f32()[0] = Total(losses) * scale;
}

void TopLogprobs(Backend& backend, const TopLogprobsArgs& args) {
  const SimdTable& simd = SimdOf(backend);
  const int64_t n = args.weight.dim(0);
  ForEachLogitsRow(backend, args.x, args.weight, Tensor(), [&](int64_t r, float* z) {
    const float lse = LogSumExp(RowState(simd, z, n));
    if (args.k > 0) {
      std::vector<ScoredId> best;
      SelectBest(simd, z, n, args.k, best);
      int32_t* ids = args.top_ids.i32() + r * args.k;
      float* logprobs = args.top_logprobs.f32() + r * args.k;
      for (size_t i = 0; i < best.size(); ++i) {
        ids[i] = best[i].id;
        logprobs[i] = best[i].logit - lse;
      }
      // Fewer finite logits than asked for (a broken model): the rest says so.
      std::fill(ids + best.size(), ids + args.k, -1);
      std::fill(logprobs + best.size(), logprobs + args.k, -kInf);
    }
    if (args.tokens) {
      const int32_t id = args.tokens.i32()[r];
      STILLHOUSE_CHECK(id >= 0 && id < n) << id;
      args.token_logprobs.f32()[r] = z[id] - lse;
    }
  });
}

}  // namespace stillhouse::cpu
