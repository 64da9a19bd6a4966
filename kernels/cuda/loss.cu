#include <type_traits>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/select.cuh"
#include "kernels/cuda/device/trap.cuh"
#include "kernels/cuda/loss_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kWide = 1024;        // threads of a block on one long row
constexpr int kNarrowRows = 8;     // short rows: one warp each
constexpr int64_t kNarrow = 1024;  // … up to this length

// The row of this block, or of this warp.
template <int kThreads>
__device__ __forceinline__ int64_t MyRow() {
  return static_cast<int64_t>(blockIdx.x) * (kThreads == kWarp ? kNarrowRows : 1) + threadIdx.y;
}

// --- softmax --------------------------------------------------------------------------------------------------------

template <int kThreads, bool kLog>
__global__ void SoftmaxKernel(Rows z, Rows out, int64_t rows, int64_t n) {
  const int64_t r = MyRow<kThreads>();
  if (r >= rows) return;
  const float* in = z.data + r * z.stride;
  float* to = out.data + r * out.stride;
  const SoftmaxState<float> state = RowState<kThreads>(in, n);
  if constexpr (kLog) {
    const float log_l = std::log(state.l);
    // In two steps: m + log ℓ would be rounded to m's last place. Rows of −inf stay.
    MapRow<kThreads>(in, to, n, [&](int64_t, float x) { return x == -INFINITY ? x : (x - state.m) - log_l; });
  } else {
    const float inverse = InverseSum(state);
    MapRow<kThreads>(in, to, n, [&](int64_t, float x) { return SoftmaxWeight(x, state.m) * inverse; });
  }
}

template <int kThreads, bool kLog>
__global__ void SoftmaxGradKernel(Rows out, Rows dout, Rows dz, int64_t rows, int64_t n) {
  const int64_t r = MyRow<kThreads>();
  if (r >= rows) return;
  const float* s = out.data + r * out.stride;
  const float* g = dout.data + r * dout.stride;
  float* d = dz.data + r * dz.stride;
  double sum = 0.0;  // Σ g s, or Σ g
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += static_cast<double>(g[i]) * (kLog ? 1.0f : s[i]);
  const float total = static_cast<float>(BlockSum<kThreads>(sum));
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    d[i] += kLog ? g[i] - SoftmaxWeight(s[i], 0.0f) * total : s[i] * (g[i] - total);
  }
}

// Calls launch(threads as a constant, grid, block).
template <typename Launch>
void ByLength(int64_t rows, int64_t n, const Launch& launch) {
  if (rows == 0 || n == 0) return;
  if (n <= kNarrow) {
    launch(std::integral_constant<int, kWarp>(), dim3(static_cast<unsigned>(CeilDiv(rows, kNarrowRows))),
           dim3(kWarp, kNarrowRows));
  } else {
    launch(std::integral_constant<int, kWide>(), dim3(static_cast<unsigned>(rows)), dim3(kWide));
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

// --- weights and sums of rows ---------------------------------------------------------------------------------------

__device__ __forceinline__ void FinishScale(double sum, bool mean, float* scale) {
  sum = BlockSum<kWide>(sum);
  if (threadIdx.x == 0) scale[0] = !mean ? 1.0f : sum > 0.0 ? static_cast<float>(1.0 / sum) : 0.0f;
}

__global__ void __launch_bounds__(kWide)
    WeighTargetsKernel(const int32_t* targets, const float* class_weights, int64_t rows, int64_t n,
                       int32_t ignore_index, bool mean, float* weights, float* scale) {
  double sum = 0.0;
  for (int64_t r = threadIdx.x; r < rows; r += kWide) {
    float weight = 1.0f;
    if (targets) {
      const int32_t id = targets[r];
      if (id == ignore_index) {
        weight = 0.0f;
      } else if (id < 0 || id >= n) {
        IndexTrap(id, n);
      } else if (class_weights) {
        weight = class_weights[id];
      }
    }
    weights[r] = weight;
    sum += weight;
  }
  FinishScale(sum, mean, scale);
}

__global__ void __launch_bounds__(kWide)
    WeighCandidatesKernel(const int32_t* ids, int64_t columns, const float* row_weights, int64_t rows, int64_t n,
                          float* weights, float* scale) {
  double sum = 0.0;
  for (int64_t r = threadIdx.x; r < rows; r += kWide) {
    bool any = false;
    for (int64_t c = 0; c < columns; ++c) {
      const int32_t id = ids[r * columns + c];
      any |= id >= 0;
      if (id >= n) IndexTrap(id, n);
    }
    const float weight = !any ? 0.0f : row_weights ? row_weights[r] : 1.0f;
    weights[r] = weight;
    sum += weight;
  }
  FinishScale(sum, true, scale);
}

__global__ void __launch_bounds__(kWide) ReduceLossesKernel(const float* losses, const float* scale, int64_t rows,
                                                            bool per_row, float* loss, int64_t stride) {
  if (per_row) {
    for (int64_t r = threadIdx.x; r < rows; r += kWide) loss[r * stride] = losses[r];
    return;
  }
  double sum = 0.0;
  for (int64_t r = threadIdx.x; r < rows; r += kWide) sum += losses[r];
  sum = BlockSum<kWide>(sum);
  if (threadIdx.x == 0) loss[0] = static_cast<float>(sum) * scale[0];
}

// --- cross-entropy --------------------------------------------------------------------------------------------------

// A row's target distribution, and the gradient of its loss.
struct RowTarget {
  int32_t id = -1;
  const float* soft = nullptr;

  __device__ __forceinline__ float Minus(int64_t i, float value, float scale, float smoothing, float uniform) const {
    if (soft) return value - scale * soft[i];
    value -= uniform;
    return i == id ? value - scale * (1.0f - smoothing) : value;
  }
};

__device__ __forceinline__ RowTarget TargetOf(const CrossEntropyRows& rows, int64_t r) {
  RowTarget target;
  if (rows.targets) target.id = rows.targets[r];
  if (rows.soft) target.soft = rows.soft + r * rows.soft_stride;
  return target;
}

// Σ y z; terms with y = 0 are left out (their z may be −inf).
template <int kThreads>
__device__ double TargetLogit(const float* z, int64_t n, const RowTarget& target, float smoothing) {
  if (!target.soft && smoothing == 0.0f) return z[target.id];
  double dot = 0.0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    if (!target.soft) {
      dot += z[i];
    } else if (target.soft[i] != 0.0f) {
      dot += static_cast<double>(target.soft[i]) * z[i];
    }
  }
  dot = BlockSum<kThreads>(dot);
  if (target.soft) return dot;
  dot *= static_cast<double>(smoothing) / static_cast<double>(n);
  return smoothing == 1.0f ? dot : dot + (1.0 - static_cast<double>(smoothing)) * z[target.id];
}

// What a row's exponentials are multiplied by to become the softmax's part of its gradient.
__device__ __forceinline__ float SoftmaxFactor(const SoftmaxState<float>& state, float z_loss, float scale) {
  return state.l > 0.0f ? scale * (1.0f + 2.0f * z_loss * LogSumExp(state)) / state.l : 0.0f;
}

template <int kThreads, bool kGradient>
__global__ void CrossEntropyKernel(CrossEntropyRows rows, float* losses) {
  const int64_t r = MyRow<kThreads>();
  if (r >= rows.rows) return;
  float* z = rows.z.data + r * rows.z.stride;
  const int64_t n = rows.n;
  const float weight = rows.weights[r];
  if (weight == 0.0f) {
    if (kGradient) MapRow<kThreads>(z, z, n, [](int64_t, float) { return 0.0f; });
    if (threadIdx.x == 0) losses[r] = 0.0f;
    return;
  }
  const RowTarget target = TargetOf(rows, r);
  const double target_logit = TargetLogit<kThreads>(z, n, target, rows.label_smoothing);
  // Its barriers also stand between the read of the target's logit and the writes below.
  const SoftmaxState<float> state = RowState<kThreads>(z, n);
  if constexpr (kThreads == kWarp) __syncwarp();
  if (threadIdx.x == 0) {
    const float lse = LogSumExp(state);
    double loss = static_cast<double>(lse) - target_logit;
    if (rows.z_loss != 0.0f) loss += static_cast<double>(rows.z_loss) * lse * lse;
    losses[r] = weight * (target_logit == -INFINITY ? INFINITY : static_cast<float>(loss));
  }
  if constexpr (kGradient) {
    const float scale = rows.scale[0] * weight, smoothing = rows.label_smoothing;
    const float factor = SoftmaxFactor(state, rows.z_loss, scale);
    const float uniform = scale * smoothing / static_cast<float>(n);
    MapRow<kThreads>(z, z, n, [&](int64_t i, float x) {
      return target.Minus(i, factor * SoftmaxWeight(x, state.m), scale, smoothing, uniform);
    });
  }
}

template <int kThreads>
__global__ void CrossEntropyGradKernel(CrossEntropyRows rows, const float* dloss, int64_t dloss_stride, Rows dz) {
  const int64_t r = MyRow<kThreads>();
  if (r >= rows.rows) return;
  const float weight = rows.weights[r];
  if (weight == 0.0f) return;
  const float* z = rows.z.data + r * rows.z.stride;
  float* d = dz.data + r * dz.stride;
  const int64_t n = rows.n;
  const RowTarget target = TargetOf(rows, r);
  const float scale = rows.scale[0] * weight * dloss[r * dloss_stride], smoothing = rows.label_smoothing;
  const SoftmaxState<float> state = RowState<kThreads>(z, n);
  const float factor = SoftmaxFactor(state, rows.z_loss, scale);
  const float uniform = scale * smoothing / static_cast<float>(n);
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    d[i] += target.Minus(i, factor * SoftmaxWeight(z[i], state.m), scale, smoothing, uniform);
  }
}

// --- distillation ---------------------------------------------------------------------------------------------------

template <bool kGradient>
__global__ void __launch_bounds__(kWide) DistillKernel(DistillRows rows) {
  const int64_t r = blockIdx.x, n = rows.n, columns = rows.columns;
  float* z = rows.z + r * n;
  const float weight = rows.weights[r];
  if (weight == 0.0f) {
    if (kGradient) MapRow<kWide>(z, z, n, [](int64_t, float) { return 0.0f; });
    if (threadIdx.x == 0) rows.losses[r] = 0.0f;
    return;
  }
  const int32_t* ids = rows.ids + r * columns;
  const float* logprobs = rows.logprobs + r * columns;
  // A thread reads and writes only its own columns of these two.
  float* q = rows.q + r * columns;
  float* logits = rows.logits + r * columns;
  const bool renormalised = rows.kind == DistillKind::kRenormalised;
  float shift = 0.0f;
  if (renormalised) {
    float best = -INFINITY;
    for (int64_t c = threadIdx.x; c < columns; c += kWide) {
      if (ids[c] >= 0) best = fmaxf(best, logprobs[c]);
    }
    best = BlockMax<kWide>(best, -INFINITY);
    shift = best > -INFINITY ? best : 0.0f;
  }
  double mass = 0.0;
  for (int64_t c = threadIdx.x; c < columns; c += kWide) {
    q[c] = ids[c] >= 0 ? std::exp(logprobs[c] - shift) : 0.0f;
    mass += q[c];
  }
  mass = BlockSum<kWide>(mass);
  if (renormalised) {
    for (int64_t c = threadIdx.x; c < columns; c += kWide) q[c] = mass > 0.0 ? static_cast<float>(q[c] / mass) : 0.0f;
    mass = mass > 0.0 ? 1.0 : 0.0;
  }
  for (int64_t c = threadIdx.x; c < columns; c += kWide) logits[c] = ids[c] >= 0 ? z[ids[c]] : -INFINITY;
  const float scale = rows.scale[0] * weight;

  if (rows.kind == DistillKind::kTail) {
    // The tail's own log-sum is taken over the other tokens: 1 − Σp would cancel.
    __syncthreads();
    for (int64_t c = threadIdx.x; c < columns; c += kWide) {
      if (ids[c] >= 0) z[ids[c]] = -INFINITY;
    }
    __syncthreads();
    const SoftmaxState<float> tail = RowState<kWide>(z, n);
    SoftmaxState<float> all;
    for (int64_t c = threadIdx.x; c < columns; c += kWide) PushLogit(all, logits[c]);
    all = FoldStates<kWide>(all);
    MergeSoftmax(all, tail);
    const float lse = LogSumExp(all);
    const float rest = static_cast<float>(mass < 1.0 ? 1.0 - mass : 0.0), total = static_cast<float>(mass) + rest;
    double loss = 0.0;
    for (int64_t c = threadIdx.x; c < columns; c += kWide) {
      if (q[c] > 0.0f) loss -= static_cast<double>(q[c]) * (logits[c] - lse);
    }
    loss = BlockSum<kWide>(loss);
    if (rest > 0.0f) loss -= static_cast<double>(rest) * (LogSumExp(tail) - lse);
    if (threadIdx.x == 0) rows.losses[r] = weight * static_cast<float>(loss);
    if constexpr (kGradient) {
      // Tokens of the tail: p·total − rest·p/p_tail; p/p_tail is the softmax within the tail.
      const float factor = scale * (total * SoftmaxWeight(tail.m, lse) - rest * InverseSum(tail));
      MapRow<kWide>(z, z, n, [&](int64_t, float x) { return factor * SoftmaxWeight(x, tail.m); });
      __syncthreads();
      for (int64_t c = threadIdx.x; c < columns; c += kWide) {
        if (ids[c] >= 0) z[ids[c]] = scale * (total * SoftmaxWeight(logits[c], lse) - q[c]);
      }
    }
    return;
  }

  double target_logit = 0.0;
  for (int64_t c = threadIdx.x; c < columns; c += kWide) {
    if (q[c] > 0.0f) target_logit += static_cast<double>(q[c]) * logits[c];
  }
  target_logit = BlockSum<kWide>(target_logit);
  const SoftmaxState<float> state = RowState<kWide>(z, n);
  if (threadIdx.x == 0) {
    rows.losses[r] =
        weight * (target_logit == -INFINITY ? INFINITY : static_cast<float>(mass * LogSumExp(state) - target_logit));
  }
  if constexpr (kGradient) {
    const float factor = scale * static_cast<float>(mass) * InverseSum(state);
    MapRow<kWide>(z, z, n, [&](int64_t, float x) { return factor * SoftmaxWeight(x, state.m); });
    __syncthreads();
    for (int64_t c = threadIdx.x; c < columns; c += kWide) {
      if (ids[c] >= 0) z[ids[c]] -= scale * q[c];
    }
  }
}

// --- the best logprobs ----------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kWide) TopLogprobsKernel(TopLogprobsRows rows) {
  __shared__ uint64_t list[kSelectRoom];
  const int64_t r = blockIdx.x, n = rows.n, k = rows.k;
  const float* z = rows.z + r * n;
  SoftmaxState<float> state;
  uint32_t own = 0;
  ForEachInRow<kWide>(z, n, [&](int64_t, float x) {
    PushLogit(state, x);
    own = max(own, LogitKey(x));
  });
  state = FoldStates<kWide>(state);
  const float log_l = std::log(state.l);
  // In two steps, as in LogSoftmax.
  const auto logprob = [&](float x) { return x == -INFINITY ? x : (x - state.m) - log_l; };
  if (k > 0) {
    uint64_t* best = nullptr;
    const int64_t count = SelectBest<kWide>(z, n, k, own, list, rows.list + r * SelectListRoom(k), &best);
    // Fewer finite logits than asked for (a broken model): the rest says so.
    for (int64_t i = threadIdx.x; i < k; i += kWide) {
      rows.top_ids[r * k + i] = i < count ? EntryId(best[i]) : -1;
      rows.top_logprobs[r * k + i] = i < count ? logprob(KeyLogit(EntryKey(best[i]))) : -INFINITY;
    }
  }
  if (rows.tokens && threadIdx.x == 0) {
    const int32_t id = rows.tokens[r];
    if (id < 0 || id >= n) IndexTrap(id, n);
    rows.token_logprobs[r] = logprob(z[id]);
  }
}

}  // namespace

void LaunchSoftmax(Rows z, Rows out, int64_t rows, int64_t n, bool log, cudaStream_t stream) {
  ByLength(rows, n, [&](auto threads, dim3 grid, dim3 block) {
    if (log) {
      SoftmaxKernel<threads.value, true><<<grid, block, 0, stream>>>(z, out, rows, n);
    } else {
      SoftmaxKernel<threads.value, false><<<grid, block, 0, stream>>>(z, out, rows, n);
    }
  });
}

void LaunchSoftmaxGrad(Rows out, Rows dout, Rows dz, int64_t rows, int64_t n, bool log, cudaStream_t stream) {
  ByLength(rows, n, [&](auto threads, dim3 grid, dim3 block) {
    if (log) {
      SoftmaxGradKernel<threads.value, true><<<grid, block, 0, stream>>>(out, dout, dz, rows, n);
    } else {
      SoftmaxGradKernel<threads.value, false><<<grid, block, 0, stream>>>(out, dout, dz, rows, n);
    }
  });
}

void LaunchWeighTargets(const int32_t* targets, const float* class_weights, int64_t rows, int64_t n,
                        int32_t ignore_index, bool mean, float* weights, float* scale, cudaStream_t stream) {
  WeighTargetsKernel<<<1, kWide, 0, stream>>>(targets, class_weights, rows, n, ignore_index, mean, weights, scale);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchWeighCandidates(const int32_t* ids, int64_t columns, const float* row_weights, int64_t rows, int64_t n,
                           float* weights, float* scale, cudaStream_t stream) {
  WeighCandidatesKernel<<<1, kWide, 0, stream>>>(ids, columns, row_weights, rows, n, weights, scale);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchReduceLosses(const float* losses, const float* scale, int64_t rows, bool per_row, float* loss,
                        int64_t stride, cudaStream_t stream) {
  ReduceLossesKernel<<<1, kWide, 0, stream>>>(losses, scale, rows, per_row, loss, stride);
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchCrossEntropy(const CrossEntropyRows& rows, bool gradient, float* losses, cudaStream_t stream) {
  ByLength(rows.rows, rows.n, [&](auto threads, dim3 grid, dim3 block) {
    if (gradient) {
      CrossEntropyKernel<threads.value, true><<<grid, block, 0, stream>>>(rows, losses);
    } else {
      CrossEntropyKernel<threads.value, false><<<grid, block, 0, stream>>>(rows, losses);
    }
  });
}

void LaunchCrossEntropyGrad(const CrossEntropyRows& rows, const float* dloss, int64_t dloss_stride, Rows dz,
                            cudaStream_t stream) {
  ByLength(rows.rows, rows.n, [&](auto threads, dim3 grid, dim3 block) {
    CrossEntropyGradKernel<threads.value><<<grid, block, 0, stream>>>(rows, dloss, dloss_stride, dz);
  });
}

void LaunchDistill(const DistillRows& rows, bool gradient, cudaStream_t stream) {
  if (rows.rows == 0) return;
  const unsigned grid = static_cast<unsigned>(rows.rows);
  if (gradient) {
    DistillKernel<true><<<grid, kWide, 0, stream>>>(rows);
  } else {
    DistillKernel<false><<<grid, kWide, 0, stream>>>(rows);
  }
  STILLHOUSE_CUDA_LAUNCHED();
}

void LaunchTopLogprobs(const TopLogprobsRows& rows, cudaStream_t stream) {
  if (rows.rows == 0) return;
  TopLogprobsKernel<<<static_cast<unsigned>(rows.rows), kWide, 0, stream>>>(rows);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
