#include "kernels/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/kernel_table.h"
#include "kernels/ops/softmax_state.h"

namespace stillhouse::cpu {

namespace {

float Dot(const float* a, const float* b, int64_t n) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < n; ++i, ++j) sums[j] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Keys and values of one KV head in one run of slots.
struct Run {
  const float* k;
  const float* v;
  const float* beta;
  int64_t k_stride, v_stride;
  int64_t slots;
  bool memory;
};

Run SegmentRun(const KvSegment& s, int64_t kv) {
  return {s.k.f32() + kv * s.k.stride(0),
          s.v.f32() + kv * s.v.stride(0),
          s.beta ? s.beta.f32() + kv * s.beta.stride(0) : nullptr,
          s.k.stride(1),
          s.v.stride(1),
          s.k.dim(1),
          s.memory};
}

}  // namespace

void Attention(Backend& backend, const AttentionArgs& args) {
  const int64_t heads = args.q.dim(1), width = args.q.dim(2);
  const int64_t kv_heads = args.k ? args.k.dim(1) : (*args.segments)[0].k.dim(0);
  const int64_t group = heads / kv_heads;
  for (const AttentionSequence& sequence : *args.sequences) {
    backend.threads().ParallelFor(sequence.row_count, [&](int64_t i, int) {
      const int64_t r = sequence.row_begin + i;
      float stored = 0.0f;
      std::vector<float> scores, acc(static_cast<size_t>(width)), o(static_cast<size_t>(width));
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t kv = h / group;
        const float* q = args.q.f32() + r * args.q.stride(0) + h * args.q.stride(1);
        SoftmaxState<float> state, memory;
        std::fill(o.begin(), o.end(), 0.0f);
        auto visit = [&](const Run& run) {
          SoftmaxState<float> part;
          scores.resize(static_cast<size_t>(run.slots));
          for (int64_t j = 0; j < run.slots; ++j) {
            scores[j] = args.scale * Dot(q, run.k + j * run.k_stride, width) + (run.beta ? run.beta[j] : 0.0f);
            part.m = std::max(part.m, scores[j]);
          }
          std::fill(acc.begin(), acc.end(), 0.0f);
          for (int64_t j = 0; j < run.slots; ++j) {
            const float p = SoftmaxWeight(scores[j], part.m);
            part.l += p;
            for (int64_t c = 0; c < width; ++c) acc[c] += p * run.v[j * run.v_stride + c];
          }
          if (run.memory) MergeSoftmax(memory, part);
          const MergeWeights<float> w = MergeSoftmax(state, part);
          for (int64_t c = 0; c < width; ++c) o[c] = w.first * o[c] + w.second * acc[c];
        };
        for (int32_t s : sequence.segments) visit(SegmentRun((*args.segments)[s], kv));
        if (args.k) {
          visit({args.k.f32() + sequence.row_begin * args.k.stride(0) + kv * args.k.stride(1),
                 args.v.f32() + sequence.row_begin * args.v.stride(0) + kv * args.v.stride(1), nullptr,
                 args.k.stride(0), args.v.stride(0), i + 1, false});
        }
        const float inverse = InverseSum(state);
        float* out = args.out.f32() + r * args.out.stride(0) + h * args.out.stride(1);
        for (int64_t c = 0; c < width; ++c) out[c] = o[c] * inverse;
        if (args.lse) args.lse.f32()[r * args.lse.stride(0) + h * args.lse.stride(1)] = LogSumExp(state);
        stored += memory.l * SoftmaxWeight(memory.m, state.m) * inverse;
      }
      if (args.stored_mass) args.stored_mass.f32()[r] = stored / static_cast<float>(heads);
    });
  }
}

void AttentionGrad(Backend& backend, const AttentionGradArgs& args) {
  const int64_t heads = args.q.dim(1), width = args.q.dim(2);
  const int64_t kv_heads = args.k ? args.k.dim(1) : (*args.segments)[0].k.dim(0);
  const int64_t group = heads / kv_heads;
  auto at = [](const Tensor& t, int64_t a, int64_t b) {
    return t ? t.f32() + a * t.stride(0) + b * t.stride(1) : nullptr;
  };
  backend.threads().ParallelFor(kv_heads, [&](int64_t kv, int) {
    for (const AttentionSequence& sequence : *args.sequences) {
      for (int64_t i = 0; i < sequence.row_count; ++i) {
        const int64_t r = sequence.row_begin + i;
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          const float* q = at(args.q, r, h);
          const float* dout = at(args.dout, r, h);
          const float lse = *at(args.lse, r, h);
          const float delta = Dot(dout, at(args.out, r, h), width);
          float* dq = at(args.dq, r, h);
          auto visit = [&](const Run& run, float* dk, int64_t dk_stride, float* dv, int64_t dv_stride, float* dbeta) {
            for (int64_t j = 0; j < run.slots; ++j) {
              const float* k = run.k + j * run.k_stride;
              const float* v = run.v + j * run.v_stride;
              const float s = args.scale * Dot(q, k, width) + (run.beta ? run.beta[j] : 0.0f);
              const float p = SoftmaxWeight(s, lse);
              const float ds = p == 0.0f ? 0.0f : p * (Dot(dout, v, width) - delta);
              if (dbeta) dbeta[j] += ds;
              for (int64_t c = 0; c < width; ++c) {
                if (dq) dq[c] += args.scale * ds * k[c];
                if (dk) dk[j * dk_stride + c] += args.scale * ds * q[c];
                if (dv) dv[j * dv_stride + c] += p * dout[c];
              }
            }
          };
          for (int32_t s : sequence.segments) {
            const Tensor dk = args.dsegment_k.empty() ? Tensor() : args.dsegment_k[s];
            const Tensor dv = args.dsegment_v.empty() ? Tensor() : args.dsegment_v[s];
            const Tensor dbeta = args.dsegment_beta.empty() ? Tensor() : args.dsegment_beta[s];
            visit(SegmentRun((*args.segments)[s], kv), at(dk, kv, 0), dk ? dk.stride(1) : 0, at(dv, kv, 0),
                  dv ? dv.stride(1) : 0, at(dbeta, kv, 0));
          }
          if (args.k) {
            visit({at(args.k, sequence.row_begin, kv), at(args.v, sequence.row_begin, kv), nullptr, args.k.stride(0),
                   args.v.stride(0), i + 1, false},
                  at(args.dk, sequence.row_begin, kv), args.dk ? args.dk.stride(0) : 0,
                  at(args.dv, sequence.row_begin, kv), args.dv ? args.dv.stride(0) : 0, nullptr);
          }
        }
      }
    }
  });
}

}  // namespace stillhouse::cpu
