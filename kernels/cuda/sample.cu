#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/device/select.cuh"
#include "kernels/cuda/sample_launch.h"

namespace stillhouse::cuda {
namespace {

constexpr int kThreads = 1024;

// The largest logit and its lowest id, as an entry (0: nothing but −inf); whether there is a NaN or +inf; and the
// largest key among the elements that this thread visits.
struct RowScan {
  uint64_t best = 0;
  bool usable = true;
  uint32_t own = 0;
};

__device__ RowScan Scan(const float* z, int64_t n) {
  RowScan scan;
  float best = -INFINITY;
  int64_t id = 0;
  int bad = 0;
  ForEachInRow<kThreads>(z, n, [&](int64_t i, float x) {
    if (x > best) {  // a thread's elements come in rising order: the lowest id of equals stays
      best = x;
      id = i;
    }
    bad |= !(x < INFINITY);
  });
  scan.own = LogitKey(best);
  scan.best = BlockFold<kThreads>(scan.own ? MakeEntry(scan.own, id) : uint64_t{0}, uint64_t{0}, MaxOf());
  scan.usable = !__syncthreads_or(bad);
  return scan;
}

// The row with its penalties and bans into `to`. Entries of one token belong to one thread, which takes them in order.
__device__ void Penalise(const SampleRows& rows, const SampleSettings& s, const float* z, float* to) {
  for (int64_t i = threadIdx.x; i < rows.n; i += kThreads) to[i] = z[i];
  __syncthreads();
  const int2* history = reinterpret_cast<const int2*>(rows.history) + s.history;
  for (int32_t h = 0; h < s.history_count; ++h) {
    const int2 entry = history[h];
    const int32_t id = entry.x, count = entry.y;
    if (id < 0 || id >= rows.n || count <= 0 || id % kThreads != static_cast<int32_t>(threadIdx.x)) continue;
    float logit = to[id];
    // Rounded step by step, as on the host.
    logit = logit > 0 ? __fdiv_rn(logit, s.repetition_penalty) : __fmul_rn(logit, s.repetition_penalty);
    logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(s.frequency_penalty, static_cast<float>(count)), s.presence_penalty));
    to[id] = logit < INFINITY ? logit : -INFINITY;
  }
  __syncthreads();
  for (int32_t b = threadIdx.x; b < s.banned_count; b += kThreads) {
    const int32_t id = rows.banned[s.banned + b];
    if (id >= 0 && id < rows.n) to[id] = -INFINITY;
  }
  __syncthreads();
}

// Weights of tokens: e^{(z − best)/T} as a float, and as an integer.
struct Weights {
  float best, inverse;

  __device__ __forceinline__ float Distance(float x) const { return (best - x) * inverse; }
  __device__ __forceinline__ float Real(float x) const { return std::exp((x - best) * inverse); }
  __device__ __forceinline__ uint64_t operator()(float x) const {
    return __float2ull_rn(Real(x) * static_cast<float>(uint64_t{1} << kWeightBits));
  }
};

// The integer that a cumulated weight must exceed (for a draw), or reach (for a share).
__device__ __forceinline__ uint64_t DrawTarget(double u, uint64_t total) {
  const uint64_t target = static_cast<uint64_t>(u * static_cast<double>(total));
  return target < total ? target : total - 1;
}
__device__ __forceinline__ uint64_t ShareOf(float share, uint64_t total) {
  if (!(share > 0.0f)) return 0;
  const double wanted = ceil(static_cast<double>(share) * static_cast<double>(total));
  return wanted < static_cast<double>(total) ? static_cast<uint64_t>(wanted) : total;
}

// Inclusive running sums over the block's threads.
__device__ uint64_t RunningSum(uint64_t value) {
  __shared__ uint64_t sums[kThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto scan = [lane](uint64_t v) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint64_t below = __shfl_up_sync(kFullWarp, v, offset);
      if (lane >= offset) v += below;
    }
    return v;
  };
  value = scan(value);
  if (lane == kWarp - 1) sums[warp] = value;
  __syncthreads();
  const uint64_t warps = scan(sums[lane]);
  const uint64_t before = __shfl_sync(kFullWarp, warps, warp > 0 ? warp - 1 : 0);
  __syncthreads();
  return warp > 0 ? value + before : value;
}

// Where running sums of weight(j) over j in [0, count), in order, first exceed `target`; count − 1 if they do not.
template <typename Weight>
__device__ int64_t FirstListExceeding(int64_t count, uint64_t target, const Weight& weight) {
  constexpr int kEach = static_cast<int>(kSelectRoom) / kThreads;
  __shared__ int found;
  if (threadIdx.x == 0) found = static_cast<int>(count) - 1;
  __syncthreads();
  uint64_t own[kEach], sum = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t j = static_cast<int64_t>(threadIdx.x) * kEach + e;
    own[e] = j < count ? weight(j) : 0;
    sum += own[e];
  }
  uint64_t running = RunningSum(sum) - sum;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int64_t j = static_cast<int64_t>(threadIdx.x) * kEach + e;
    running += own[e];
    if (j < count && running > target) {
      atomicMin(&found, static_cast<int>(j));
      break;
    }
  }
  __syncthreads();
  const int result = found;
  __syncthreads();
  return result;
}

// Draws from the entries of `list` (sorted, best first), of which all that a cut may keep are there. `whole` is the
// weight of the row, for a share without a count.
__device__ int32_t DrawFromList(const SampleSettings& s, const Weights& weights, uint64_t* list, int64_t count,
                                bool cut_count, uint64_t whole) {
  const auto weight = [&](int64_t j) { return weights(KeyLogit(EntryKey(list[j]))); };
  const auto sum = [&](int64_t limit) {
    uint64_t own = 0;
    for (int64_t j = threadIdx.x; j < limit; j += kThreads) own += weight(j);
    return BlockSum<kThreads>(own);
  };
  if (cut_count && count > s.top_k) count = s.top_k;
  if (s.top_p < 1.0f) {
    const uint64_t share = ShareOf(s.top_p, cut_count ? sum(count) : whole);
    // The first place at which the sum reaches the share ends the kept ones.
    if (share > 0) {
      count = FirstListExceeding(count, share - 1, weight) + 1;
    } else {
      count = 1;
    }
  }
  if (s.min_p > 0.0f) {
    int kept = 0;
    for (int64_t j = threadIdx.x; j < count; j += kThreads) {
      kept += weights.Real(KeyLogit(EntryKey(list[j]))) >= s.min_p;
    }
    kept = BlockSum<kThreads>(kept);
    count = kept > 1 ? kept : 1;
  }
  // In order of id: the id's half of an entry (it falls as ids rise) goes first.
  for (int64_t j = threadIdx.x; j < count; j += kThreads) list[j] = list[j] << 32 | list[j] >> 32;
  __syncthreads();
  SortFalling<kThreads>(list, count);
  const auto swapped = [&](int64_t j) { return weights(KeyLogit(static_cast<uint32_t>(list[j]))); };
  uint64_t own = 0;
  for (int64_t j = threadIdx.x; j < count; j += kThreads) own += swapped(j);
  const uint64_t total = BlockSum<kThreads>(own);
  const int64_t at = FirstListExceeding(count, DrawTarget(s.u, total), swapped);
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(list[at] >> 32));
}

// The last of the entries that a cut keeps: those with a larger key, and those of this key up to this id.
struct Cut {
  uint32_t key = 1;
  int64_t id = INT64_MAX;

  __device__ __forceinline__ bool Keeps(int64_t i, float x) const {
    const uint32_t k = LogitKey(x);
    return k > key || (k == key && i <= id);
  }
};

// Narrows `cut` to the fewest tokens, best first, whose weights sum to `wanted`; all of one logit weigh `each`.
template <typename Weight, typename Each>
__device__ void Narrow(const float* z, int64_t n, uint64_t wanted, const Weight& weight, const Each& each, Cut& cut) {
  const Cut before = cut;
  const auto left = [&](int64_t i, float x) { return before.Keeps(i, x) ? weight(x) : uint64_t{0}; };
  const uint32_t key = KeyHolding<kThreads>(z, n, wanted, left);
  if (key == 0) return;  // all that is left sums to less
  const uint64_t above =
      SumOverRow<kThreads>(z, n, [&](int64_t i, float x) { return LogitKey(x) > key ? left(i, x) : uint64_t{0}; });
  const uint64_t of_one = each(KeyLogit(key));
  const uint64_t ties = of_one > 0 ? (wanted - above + of_one - 1) / of_one : 1;
  cut.key = key;
  cut.id = FirstExceeding<kThreads>(
      z, n, [&](int64_t, float x) -> uint64_t { return LogitKey(x) == key; },
      [&](uint64_t total) { return (ties < total ? ties : total) - 1; });
}

// Draws where cuts keep more than fits into a list (flat distributions): the row is read once for every bit of a key.
__device__ __noinline__ int32_t DrawFromRow(const SampleSettings& s, const Weights& weights, const float* z, int64_t n,
                                            bool cut_count) {
  Cut cut;
  if (cut_count) {
    const auto one = [](float) { return uint64_t{1}; };
    Narrow(z, n, static_cast<uint64_t>(s.top_k), one, one, cut);
  }
  if (s.top_p < 1.0f) {
    const uint64_t total =
        SumOverRow<kThreads>(z, n, [&](int64_t i, float x) { return cut.Keeps(i, x) ? weights(x) : uint64_t{0}; });
    const uint64_t share = ShareOf(s.top_p, total);
    Narrow(z, n, share > 0 ? share : 1, weights, weights, cut);
  }
  return static_cast<int32_t>(FirstExceeding<kThreads>(
      z, n,
      [&](int64_t i, float x) { return cut.Keeps(i, x) && !(weights.Real(x) < s.min_p) ? weights(x) : uint64_t{0}; },
      [&](uint64_t total) { return DrawTarget(s.u, total); }));
}

__device__ int32_t Draw(const SampleSettings& s, const float* z, int64_t n, const RowScan& scan, uint64_t* list) {
  const Weights weights{KeyLogit(EntryKey(scan.best)), __fdiv_rn(1.0f, s.temperature)};
  const bool cut_count = s.top_k > 0 && s.top_k < n, cut_mass = s.top_p<1.0f, cut_ratio = s.min_p> 0.0f;
  if (!cut_count && !cut_mass && !cut_ratio) {
    return static_cast<int32_t>(FirstExceeding<kThreads>(
        z, n, [&](int64_t, float x) { return weights(x); }, [&](uint64_t total) { return DrawTarget(s.u, total); }));
  }
  if (s.min_p > 1.0f) return EntryId(scan.best);
  int64_t count = kSelectRoom + 1;
  uint64_t whole = 0;
  if (cut_count) {
    if (s.top_k <= kThreads) {
      // As in SelectBest, without the sort when ties overflow the list.
      const uint32_t bound = BoundOfMaxima<kThreads>(scan.own, s.top_k);
      count =
          Gather<kThreads>(z, n, list, kSelectRoom, [bound](int64_t, uint32_t key) { return key >= bound && key > 0; });
    }
  } else {
    // A band below the best that holds what the cuts may keep: as wide as min_p allows, or the narrowest of a few that
    // holds top_p's share.
    float band = cut_ratio ? 1.0f - std::log(s.min_p) : INFINITY;
    if (cut_mass) {
      constexpr int kBands = 4;
      uint64_t mass[kBands] = {};
      ForEachInRow<kThreads>(z, n, [&](int64_t, float x) {
        const uint64_t w = weights(x);
        const float distance = weights.Distance(x);
        whole += w;
#pragma unroll
        for (int b = 0; b < kBands; ++b) {
          if (distance <= static_cast<float>(2 << b)) mass[b] += w;
        }
      });
      whole = BlockSum<kThreads>(whole);
      const uint64_t share = ShareOf(s.top_p, whole);
#pragma unroll
      for (int b = kBands - 1; b >= 0; --b) {
        if (BlockSum<kThreads>(mass[b]) >= share) band = fminf(band, static_cast<float>(2 << b));
      }
    }
    count = Gather<kThreads>(z, n, list, kSelectRoom,
                             [&](int64_t, uint32_t key) { return key > 0 && weights.Distance(KeyLogit(key)) <= band; });
  }
  if (count > kSelectRoom) return DrawFromRow(s, weights, z, n, cut_count);
  SortFalling<kThreads>(list, count);
  return DrawFromList(s, weights, list, count, cut_count, whole);
}

__global__ void __launch_bounds__(kThreads) SampleKernel(SampleRows rows) {
  __shared__ uint64_t list[kSelectRoom];
  const int64_t r = blockIdx.x, n = rows.n;
  const SampleSettings s = rows.settings[r];
  const float* z = rows.logits + r * rows.stride;
  const RowScan scan = Scan(z, n);
  RowScan adjusted = scan;
  const float* logits = z;
  if (scan.usable && s.changed >= 0) {
    float* changed = rows.changed + s.changed * rows.changed_stride;
    Penalise(rows, s, z, changed);
    logits = changed;
    adjusted = Scan(logits, n);
  }
  SampleResult result{-1, 1, 0.0f, 0};
  if (scan.usable && adjusted.best != 0) {
    result.invalid = 0;
    result.id = s.temperature < 1e-5f ? EntryId(adjusted.best) : Draw(s, logits, n, adjusted, list);
    if (s.logprobs > 0) {
      const float m = KeyLogit(EntryKey(scan.best));
      float sum = 0.0f;
      ForEachInRow<kThreads>(z, n, [&](int64_t, float x) { sum += std::exp(x - m); });
      const double log_l = std::log(BlockSum<kThreads>(static_cast<double>(sum)));
      const auto logprob = [&](float x) {
        return static_cast<float>(static_cast<double>(x) - (static_cast<double>(m) + log_l));
      };
      result.logprob = logprob(z[result.id]);
      uint64_t* best = nullptr;
      const int64_t count =
          SelectBest<kThreads>(z, n, s.logprobs, scan.own, list, rows.list + r * rows.list_room, &best);
      for (int64_t j = threadIdx.x; j < count; j += kThreads) {
        rows.top[s.top + j] = {EntryId(best[j]), logprob(KeyLogit(EntryKey(best[j])))};
      }
      result.top_count = static_cast<int32_t>(count);
    }
  }
  if (threadIdx.x == 0) rows.results[r] = result;
}

}  // namespace

void LaunchSample(const SampleRows& rows, cudaStream_t stream) {
  if (rows.rows == 0) return;
  SampleKernel<<<static_cast<unsigned>(rows.rows), kThreads, 0, stream>>>(rows);
  STILLHOUSE_CUDA_LAUNCHED();
}

}  // namespace stillhouse::cuda
