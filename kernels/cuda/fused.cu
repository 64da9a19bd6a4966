#include <cmath>
#include <type_traits>

#include "kernels/cuda/device/async_copy.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dtype.cuh"
#include "kernels/cuda/device/grid.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/fused_launch.h"

namespace stillhouse::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kSlicesAtOnce = 4;  // of a product: in flight together
constexpr int kMostShares = 4;

// A cluster takes a row, of which its blocks have equal shares. A thread keeps kKept vectors of it in registers; what
// is more is read again. kAdds: there are slices.
template <int kKept, bool kAdds>
__global__ void __launch_bounds__(kThreads) NormToBf16Kernel(const NormToBf16Params p) {
  __shared__ float squares[kMostShares];
  LetNextKernelStart();
  const int shares = ClusterBlocks(), rank = ClusterRank();
  if (shares > 1) ClusterArrive();
  const int64_t share = (p.width / 4 + shares - 1) / shares, end = min(p.width / 4, (rank + 1) * share);
  const int64_t begin = rank * share + threadIdx.x, rest = begin + kKept * kThreads;  // vectors
  Vec16<float> weight[kKept];
#pragma unroll
  for (int e = 0; e < kKept; ++e) {
    const int64_t i = begin + e * kThreads;
    if (i < end) weight[e] = LoadVec16(p.weight + 4 * i);
  }
  WaitForPreviousKernel();
  const int64_t r = blockIdx.x / shares;
  float* const x = p.x + r * p.x_stride;
  const float* const slices = p.slices + r * p.width;
  // Reads vectors, kThreads apart, and adds to them; gives the sum of their squares.
  const auto read = [&](int64_t first, auto& value) {
    constexpr int kCount = static_cast<int>(sizeof(value) / sizeof(value[0]));
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int64_t i = first + e * kThreads;
      value[e] = i < end ? LoadVec16(x + 4 * i) : Vec16<float>{};
    }
    if constexpr (kAdds) {
      for (int s = 0; s < p.splits; s += kSlicesAtOnce) {
        Vec16<float> part[kSlicesAtOnce][kCount];
#pragma unroll
        for (int q = 0; q < kSlicesAtOnce; ++q) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            const int64_t i = first + e * kThreads;
            part[q][e] =
                s + q < p.splits && i < end ? LoadVec16(slices + (s + q) * p.rows * p.width + 4 * i) : Vec16<float>{};
          }
        }
#pragma unroll
        for (int q = 0; q < kSlicesAtOnce; ++q) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
#pragma unroll
            for (int c = 0; c < 4; ++c) value[e].at[c] += part[q][e].at[c];
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const int64_t i = first + e * kThreads;
        if (i < end) StoreVec16(x + 4 * i, value[e]);
      }
    }
    float sum = 0.0f;
#pragma unroll
    for (const Vec16<float>& v : value)
      sum += v.at[0] * v.at[0] + v.at[1] * v.at[1] + (v.at[2] * v.at[2] + v.at[3] * v.at[3]);
    return sum;
  };
  Vec16<float> kept[kKept];
  float sum = read(begin, kept);
  for (int64_t i = rest; i < end; i += kThreads) {
    Vec16<float> one[1];
    sum += read(i, one);
  }
  sum = BlockSum<kThreads>(sum);
  if (shares > 1) {
    // Each block gives its sum to all, and adds in their order.
    ClusterWait();
    const int to = static_cast<int>(threadIdx.x);
    if (to < shares) *const_cast<float*>(OfBlock(squares + rank, to)) = sum;
    ClusterArrive();
    ClusterWait();
    sum = squares[0];
    for (int i = 1; i < shares; ++i) sum += squares[i];
  }
  const float rstd = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
  Bf16* const out = static_cast<Bf16*>(p.out) + r * p.width;
  const auto store = [&](int64_t i, const Vec16<float>& v, const Vec16<float>& w) {
    *reinterpret_cast<uint2*>(out + 4 * i) = make_uint2(PackBf16(v.at[0] * rstd * w.at[0], v.at[1] * rstd * w.at[1]),
                                                        PackBf16(v.at[2] * rstd * w.at[2], v.at[3] * rstd * w.at[3]));
  };
#pragma unroll
  for (int e = 0; e < kKept; ++e) {
    const int64_t i = begin + e * kThreads;
    if (i < end) store(i, kept[e], weight[e]);
  }
  for (int64_t i = rest; i < end; i += kThreads) store(i, LoadVec16(x + 4 * i), LoadVec16(p.weight + 4 * i));
}

// A row of blocks takes a row of x.
template <typename X>
__global__ void __launch_bounds__(kThreads) SwiGluToBf16Kernel(const X* x, int64_t rows, int64_t width, Bf16* out) {
  constexpr int kCount = Vec16<X>::kCount;
  struct alignas(2 * kCount) Rounded {
    uint32_t pairs[kCount / 2];
  };
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t c = kCount * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
  if (c >= width) return;
  for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
    const Vec16<X> gates = LoadVec16(x + r * 2 * width + c), ups = LoadVec16(x + r * 2 * width + width + c);
    const auto gated = [&](int e) {
      const float gate = ToFloat(gates.at[e]);
      return __fdividef(gate, 1.0f + __expf(-gate)) * ToFloat(ups.at[e]);
    };
    Rounded y;
#pragma unroll
    for (int e = 0; e < kCount; e += 2) y.pairs[e / 2] = PackBf16(gated(e), gated(e + 1));
    *reinterpret_cast<Rounded*>(out + r * width + c) = y;
  }
}

__global__ void RopeAnglesKernel(const __grid_constant__ RopeAnglesParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.rows * p.pairs) return;
  const int64_t r = i / p.pairs;
  const int j = static_cast<int>(i - r * p.pairs);
  double s, c;
  sincos(static_cast<double>(p.positions[r]) * p.inv_freq[j], &s, &c);
  p.out[r * 2 * p.pairs + j] = p.scale * static_cast<float>(c);
  p.out[r * 2 * p.pairs + p.pairs + j] = p.scale * static_cast<float>(s);
}

__device__ __forceinline__ int KindOf(const QkvRopeParams& p, int head) {  // q, k, v
  return head < p.heads ? 0 : head < p.heads + p.kv_heads ? 1 : 2;
}

// Where a head of row r is kept; null: nowhere.
template <typename Kv>
__device__ __forceinline__ Kv* KeptAt(const QkvRopeParams& p, int64_t r, int head) {
  const int kind = KindOf(p, head);
  if (kind == 0 || !p.places) return nullptr;
  const int64_t place = p.places[2 * r + kind - 1];
  if (place == 0) return nullptr;
  return reinterpret_cast<Kv*>(place) + p.layer_offset + (head - p.heads - (kind - 1) * p.kv_heads) * p.head_stride;
}

constexpr int kHeadWarps = 4;
constexpr int kPairsAtOnce = 2;  // of a lane, read together: a head of 128

// A warp takes one head of one row; a lane owns pairs, so that they are turned in place. kAdds: there are slices.
template <typename Kv, bool kAdds>
__global__ void __launch_bounds__(kHeadWarps* kWarp) QkvRopeKernel(const QkvRopeParams p) {
  LetNextKernelStart();
  const int all = p.heads + 2 * p.kv_heads, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int head = static_cast<int>(blockIdx.y * kHeadWarps + threadIdx.x / kWarp);
  const int64_t r = blockIdx.x;
  float* const x = p.qkv + (r * all + head) * p.width;
  WaitForPreviousKernel();
  if (head >= all) return;
  const int kind = KindOf(p, head);
  Kv* const to = KeptAt<Kv>(p, r, head);
  // Elements at(e) of the head, asked for together; what lies beyond its end is 0.
  const auto read = [&](auto& value, const auto& at) {
    constexpr int kCount = static_cast<int>(sizeof(value) / sizeof(value[0]));
    if constexpr (!kAdds) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) value[e] = at(e) < p.width ? x[at(e)] : 0.0f;
      return;
    }
    const int64_t step = p.rows * all * p.width;
    const float* slices = p.slices + (r * all + head) * p.width;
#pragma unroll
    for (int e = 0; e < kCount; ++e) value[e] = 0.0f;
    for (int s = 0; s < p.splits; s += kSlicesAtOnce, slices += kSlicesAtOnce * step) {
      float part[kSlicesAtOnce][kCount];
#pragma unroll
      for (int q = 0; q < kSlicesAtOnce; ++q) {
#pragma unroll
        for (int e = 0; e < kCount; ++e)
          part[q][e] = s + q < p.splits && at(e) < p.width ? slices[q * step + at(e)] : 0.0f;
      }
#pragma unroll
      for (int q = 0; q < kSlicesAtOnce; ++q) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) value[e] += part[q][e];
      }
    }
  };
  constexpr int kAtOnce = 2 * kPairsAtOnce;
  if (kind == 2) {
    for (int begin = lane; begin < p.width; begin += kAtOnce * kWarp) {
      float value[kAtOnce];
      const auto at = [&](int e) { return begin + e * kWarp; };
      read(value, at);
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (at(e) >= p.width) break;
        if (kAdds) x[at(e)] = value[e];
        if (to) to[at(e)] = FromFloat<Kv>(value[e]);
      }
    }
    return;
  }
  const float* const norm = kind == 0 ? p.q_norm : p.k_norm;
  float rstd = 1.0f;
  if (norm) {
    float sum = 0.0f;
    for (int begin = lane; begin < p.width; begin += kAtOnce * kWarp) {
      float value[kAtOnce];
      read(value, [&](int e) { return begin + e * kWarp; });
#pragma unroll
      for (const float v : value) sum += v * v;
    }
    rstd = 1.0f / sqrtf(WarpSum(sum) / static_cast<float>(p.width) + p.eps);
  }
  const auto normed = [&](int i, float value) { return norm ? value * rstd * norm[i] : value; };
  const auto store = [&](int i, float turned) {
    x[i] = turned;
    if (to) to[i] = FromFloat<Kv>(turned);
  };
  const float* const cosine = p.angles + r * 2 * p.pairs;
  const float* const sine = cosine + p.pairs;
  for (int begin = lane; begin < p.pairs; begin += kPairsAtOnce * kWarp) {
    // The first of each pair, then the seconds.
    float value[kAtOnce], c[kPairsAtOnce], s[kPairsAtOnce];
    const auto pair = [&](int e) { return begin + e % kPairsAtOnce * kWarp; };
    const auto at = [&](int e) {
      const bool second = e >= kPairsAtOnce;
      if (pair(e) >= p.pairs) return p.width;
      return p.interleaved ? 2 * pair(e) + second : pair(e) + (second ? p.pairs : 0);
    };
#pragma unroll
    for (int e = 0; e < kPairsAtOnce; ++e) {
      if (pair(e) >= p.pairs) continue;
      c[e] = cosine[pair(e)];
      s[e] = sine[pair(e)];
    }
    read(value, at);
#pragma unroll
    for (int e = 0; e < kPairsAtOnce; ++e) {
      if (pair(e) >= p.pairs) continue;
      const int first = at(e), second = at(e + kPairsAtOnce);
      const float a = normed(first, value[e]), b = normed(second, value[e + kPairsAtOnce]);
      store(first, a * c[e] - b * s[e]);
      store(second, b * c[e] + a * s[e]);
    }
  }
  for (int i = 2 * p.pairs + lane; i < p.width; i += kWarp) {
    float value[1];
    read(value, [&](int) { return i; });
    store(i, normed(i, value[0]));
  }
}

constexpr int kRowThreads = 128;

// bf16 rows of heads kLanes · 16 wide, turned whole. A block takes a row, kLanes lanes a head after the other, each
// always the same eight pairs.
template <int kLanes, bool kInterleaved>
__global__ void __launch_bounds__(kRowThreads) QkvRopeBf16(const QkvRopeParams p) {
  constexpr int kWidth = 16 * kLanes, kHeads = kRowThreads / kLanes;  // at once
  using Vec = Vec16<Bf16>;
  LetNextKernelStart();
  const int64_t r = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, all = p.heads + 2 * p.kv_heads;
  const int first = kInterleaved ? 16 * lane : 8 * lane, second = first + (kInterleaved ? 8 : kWidth / 2);
  Bf16* const row = static_cast<Bf16*>(p.qkv_bf16) + r * all * kWidth;
  WaitForPreviousKernel();
  const float* const angles = p.angles + r * kWidth + 8 * lane;
  const Vec16<float> cosines[2] = {LoadVec16(angles), LoadVec16(angles + 4)};
  const Vec16<float> sines[2] = {LoadVec16(angles + kWidth / 2), LoadVec16(angles + kWidth / 2 + 4)};
  for (int begin = 0; begin < all; begin += kHeads) {
    const int head = begin + static_cast<int>(threadIdx.x) / kLanes;
    const bool there = head < all;  // the warp's lanes stay together, for its sums
    const int kind = KindOf(p, head);
    Bf16* const x = row + head * kWidth;
    Vec a = {}, b = {};
    if (there) {
      a = LoadVec16(x + first);
      b = LoadVec16(x + second);
    }
    float value[16];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      value[e] = ToFloat(a.at[e]);
      value[8 + e] = ToFloat(b.at[e]);
    }
    if (p.q_norm || p.k_norm) {
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < 16; ++e) sum += value[e] * value[e];
      const float rstd = 1.0f / sqrtf(WarpSum<kLanes>(sum) / static_cast<float>(kWidth) + p.eps);
      const float* const norm = kind == 0 ? p.q_norm : p.k_norm;
      if (norm && kind < 2) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          value[e] *= rstd * norm[first + e];
          value[8 + e] *= rstd * norm[second + e];
        }
      }
    }
    if (!there) break;
    if (kind < 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // A pair is two neighbours, or columns half a head apart.
        float& from = value[kInterleaved ? 2 * j : j];
        float& to = value[kInterleaved ? 2 * j + 1 : 8 + j];
        const float cosine = cosines[j / 4].at[j % 4], sine = sines[j / 4].at[j % 4],
                    turned = from * cosine - to * sine;
        to = to * cosine + from * sine;
        from = turned;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        a.at[e] = FromFloat<Bf16>(value[e]);
        b.at[e] = FromFloat<Bf16>(value[8 + e]);
      }
      StoreVec16(x + first, a);
      StoreVec16(x + second, b);
    }
    if (Bf16* const kept = KeptAt<Bf16>(p, r, head)) {
      StoreVec16(kept + first, a);
      StoreVec16(kept + second, b);
    }
  }
}

template <int kLanes>
void LaunchQkvRopeBf16(const QkvRopeParams& params, cudaStream_t stream) {
  const auto kernel = params.interleaved ? QkvRopeBf16<kLanes, true> : QkvRopeBf16<kLanes, false>;
  LaunchKernelEarly(kernel, static_cast<unsigned>(params.rows), kRowThreads, 0, stream, params);
}

__global__ void LayRunsKernel(const AttentionRun* base, const AttentionRunLayers* layers, int64_t runs,
                              int64_t layer_count, int element_bytes, AttentionRun* to) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= runs * layer_count) return;
  const int64_t layer = at / runs, i = at - layer * runs;
  AttentionRun run = base[i];
  const AttentionRunLayers on = layers[i];
  if (run.slots > 0) {
    run.k = static_cast<const char*>(run.k) + layer * on.k * element_bytes;
    run.v = static_cast<const char*>(run.v) + layer * on.v * element_bytes;
    if (run.beta) run.beta += layer * on.beta;
  }
  to[at] = run;
}

}  // namespace

void LaunchNormToBf16(const NormToBf16Params& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  // Few rows are shared out, down to a vector a thread.
  int shares = 1;
  while (shares < kMostShares && 2 * shares * params.rows <= params.multiprocessors &&
         params.width / 4 > shares * kThreads) {
    shares *= 2;
  }
  const int64_t each = CeilDiv(CeilDiv(params.width / 4, shares), kThreads);
  const auto run = [&](auto kept) {
    constexpr int kKept = decltype(kept)::value;
    const auto kernel = params.slices ? NormToBf16Kernel<kKept, true> : NormToBf16Kernel<kKept, false>;
    LaunchClustersEarly(kernel, dim3(static_cast<unsigned>(params.rows * shares)), dim3(static_cast<unsigned>(shares)),
                        kThreads, 0, stream, params);
  };
  using std::integral_constant;
  each <= 1   ? run(integral_constant<int, 1>())
  : each <= 2 ? run(integral_constant<int, 2>())
              : run(integral_constant<int, 4>());
}

void LaunchSwiGluToBf16(const void* x, bool x_bf16, int64_t rows, int64_t width, void* out, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const auto launch = [&](auto* from) {
    constexpr int kCount = Vec16<std::decay_t<decltype(*from)>>::kCount;
    const dim3 grid(static_cast<unsigned>(CeilDiv(width, kCount * kThreads)), GridFor(rows, 1, 32768));
    LaunchKernelEarly(SwiGluToBf16Kernel<std::decay_t<decltype(*from)>>, grid, kThreads, 0, stream, from, rows, width,
                      static_cast<Bf16*>(out));
  };
  x_bf16 ? launch(static_cast<const Bf16*>(x)) : launch(static_cast<const float*>(x));
}

void LaunchRopeAngles(const RopeAnglesParams& params, cudaStream_t stream) {
  const int64_t angles = params.rows * params.pairs;
  if (angles == 0) return;
  LaunchKernel(RopeAnglesKernel, static_cast<unsigned>(CeilDiv(angles, 64)), 64, 0, stream, params);
}

void LaunchQkvRope(const QkvRopeParams& params, cudaStream_t stream) {
  const int64_t heads = params.heads + 2 * params.kv_heads;
  if (params.rows * heads == 0) return;
  if (params.qkv_bf16) {
    return params.width == 64    ? LaunchQkvRopeBf16<4>(params, stream)
           : params.width == 128 ? LaunchQkvRopeBf16<8>(params, stream)
                                 : LaunchQkvRopeBf16<16>(params, stream);
  }
  const dim3 blocks(static_cast<unsigned>(params.rows), static_cast<unsigned>(CeilDiv(heads, kHeadWarps)));
  const auto kernel = params.slices ? (params.kv_bf16 ? QkvRopeKernel<Bf16, true> : QkvRopeKernel<float, true>)
                                    : (params.kv_bf16 ? QkvRopeKernel<Bf16, false> : QkvRopeKernel<float, false>);
  LaunchKernelEarly(kernel, blocks, kHeadWarps * kWarp, 0, stream, params);
}

void LaunchLayRuns(const AttentionRun* base, const AttentionRunLayers* layers, int64_t runs, int64_t layer_count,
                   int element_bytes, AttentionRun* to, cudaStream_t stream) {
  if (runs * layer_count == 0) return;
  LaunchKernel(LayRunsKernel, static_cast<unsigned>(CeilDiv(runs * layer_count, 128)), 128, 0, stream, base, layers,
               runs, layer_count, element_bytes, to);
}

}  // namespace stillhouse::cuda
