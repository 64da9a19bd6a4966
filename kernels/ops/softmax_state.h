// One state for every softmax: (m, ℓ, o) of a partition, and the exact merge of two partitions. The only copy of this
// formula: split decode attention, shared prefixes, prefill chunks and depth routing all use it. Compiles for host and
// device.
#ifndef STILLHOUSE_KERNELS_OPS_SOFTMAX_STATE_H_
#define STILLHOUSE_KERNELS_OPS_SOFTMAX_STATE_H_

#include <cmath>

#ifdef __CUDACC__
#define STILLHOUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STILLHOUSE_HOST_DEVICE inline
#endif

namespace stillhouse {

// m = max of the logits, l = Σ e^{s−m}. The empty partition is (−inf, 0); o lives beside it, unnormalised: Σ e^{s−m} v.
template <typename T>
struct SoftmaxState {
  T m = -INFINITY;
  T l = 0;
};

// e^{a−b} with the two infinities that occur guarded: −inf − (−inf) counts as weight 0, never NaN.
template <typename T>
STILLHOUSE_HOST_DEVICE T SoftmaxWeight(T a, T b) {
  return a == -INFINITY ? T(0) : std::exp(a - b);
}

// Factors by which the two partitions' o are scaled in the merge.
template <typename T>
struct MergeWeights {
  T first;
  T second;
};

// Merges b into a; the caller applies the factors to o: o = first·o_a + second·o_b. Merging two empties gives the empty
// one.
template <typename T>
STILLHOUSE_HOST_DEVICE MergeWeights<T> MergeSoftmax(SoftmaxState<T>& a, const SoftmaxState<T>& b) {
  const T m = a.m > b.m ? a.m : b.m;
  const MergeWeights<T> w{SoftmaxWeight(a.m, m), SoftmaxWeight(b.m, m)};
  a.l = w.first * a.l + w.second * b.l;
  a.m = m;
  return w;
}

// log Σ e^s of a partition; −inf for an empty one.
template <typename T>
STILLHOUSE_HOST_DEVICE T LogSumExp(const SoftmaxState<T>& s) {
  return s.l > T(0) ? s.m + std::log(s.l) : T(-INFINITY);
}

// 1/ℓ, and 0 for an empty partition: a fully masked row gives 0.
template <typename T>
STILLHOUSE_HOST_DEVICE T InverseSum(const SoftmaxState<T>& s) {
  return s.l > T(0) ? T(1) / s.l : T(0);
}

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_SOFTMAX_STATE_H_
