// Attention over segments in fp64, as one plain softmax over everything that a row sees; and its gradients.
#ifndef STILLHOUSE_TESTS_KERNELS_ATTENTION_REFERENCE_H_
#define STILLHOUSE_TESTS_KERNELS_ATTENTION_REFERENCE_H_

#include <memory>
#include <utility>
#include <vector>

#include "kernels/ops/attention.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {

struct AttentionProblem {
  struct Segment {
    int64_t slots = 0;
    Doubles k, v, beta;  // [Hkv, slots, d], [Hkv, slots] (beta may be empty)
    bool memory = false;
  };
  int64_t rows = 0, heads = 0, kv_heads = 0, width = 0;
  bool own = true;  // rows attend to themselves and their past
  double scale = 0.0;
  Doubles q, k, v;
  std::vector<Segment> segments;
  std::vector<AttentionSequence> sequences;
};

struct AttentionResult {
  Doubles out, lse, stored_mass;
};

struct AttentionGradients {
  Doubles dq, dk, dv;
  std::vector<Doubles> dsegment_k, dsegment_v, dsegment_beta;
};

namespace internal {

// One source of a row's softmax: where its key, value and gradients are.
struct Source {
  const double* k;
  const double* v;
  double beta;
  bool memory;
  double* dk;
  double* dv;
  double* dbeta;
};

inline std::vector<Source> SourcesOf(const AttentionProblem& p, const AttentionSequence& sequence, int64_t row,
                                     int64_t kv, AttentionGradients* g) {
  std::vector<Source> sources;
  for (int32_t s : sequence.segments) {
    const auto& segment = p.segments[static_cast<size_t>(s)];
    for (int64_t j = 0; j < segment.slots; ++j) {
      const int64_t slot = kv * segment.slots + j, at = slot * p.width;
      sources.push_back({&segment.k[at], &segment.v[at], segment.beta.empty() ? 0.0 : segment.beta[slot],
                         segment.memory, g ? &g->dsegment_k[s][at] : nullptr, g ? &g->dsegment_v[s][at] : nullptr,
                         g && !segment.beta.empty() ? &g->dsegment_beta[s][slot] : nullptr});
    }
  }
  for (int64_t r = sequence.row_begin; p.own && r <= row; ++r) {
    const int64_t at = (r * p.kv_heads + kv) * p.width;
    sources.push_back({&p.k[at], &p.v[at], 0.0, false, g ? &g->dk[at] : nullptr, g ? &g->dv[at] : nullptr, nullptr});
  }
  return sources;
}

// Runs the forward pass and, where `dout` is given, the backward pass too.
inline AttentionResult RunReference(const AttentionProblem& p, const Doubles* dout, AttentionGradients* g) {
  AttentionResult result;
  result.out.assign(p.q.size(), 0.0);
  result.lse.assign(static_cast<size_t>(p.rows * p.heads), -INFINITY);
  result.stored_mass.assign(static_cast<size_t>(p.rows), 0.0);
  const int64_t group = p.heads / p.kv_heads, d = p.width;
  for (const AttentionSequence& sequence : p.sequences) {
    for (int64_t r = sequence.row_begin; r < sequence.row_begin + sequence.row_count; ++r) {
      for (int64_t h = 0; h < p.heads; ++h) {
        const std::vector<Source> sources = SourcesOf(p, sequence, r, h / group, g);
        const double* q = &p.q[(r * p.heads + h) * d];
        Doubles logits;
        double m = -INFINITY, sum = 0.0;
        for (const Source& s : sources) {
          double dot = 0.0;
          for (int64_t c = 0; c < d; ++c) dot += q[c] * s.k[c];
          logits.push_back(p.scale * dot + s.beta);
          m = std::max(m, logits.back());
        }
        if (m == -INFINITY) continue;
        for (double& s : logits) sum += s = std::exp(s - m);
        result.lse[r * p.heads + h] = m + std::log(sum);
        double* out = &result.out[(r * p.heads + h) * d];
        for (size_t j = 0; j < sources.size(); ++j) {
          const double w = logits[j] / sum;
          for (int64_t c = 0; c < d; ++c) out[c] += w * sources[j].v[c];
          if (sources[j].memory) result.stored_mass[r] += w / static_cast<double>(p.heads);
        }
        if (!dout) continue;
        const double* up = &(*dout)[(r * p.heads + h) * d];
        double delta = 0.0;
        for (int64_t c = 0; c < d; ++c) delta += up[c] * out[c];
        for (size_t j = 0; j < sources.size(); ++j) {
          const Source& s = sources[j];
          const double w = logits[j] / sum;
          double dw = 0.0;
          for (int64_t c = 0; c < d; ++c) dw += up[c] * s.v[c];
          const double ds = w * (dw - delta);
          if (s.dbeta) *s.dbeta += ds;
          for (int64_t c = 0; c < d; ++c) {
            g->dq[(r * p.heads + h) * d + c] += p.scale * ds * s.k[c];
            s.dk[c] += p.scale * ds * q[c];
            s.dv[c] += w * up[c];
          }
        }
      }
    }
  }
  return result;
}

}  // namespace internal

inline AttentionResult ReferenceAttention(const AttentionProblem& p) {
  return internal::RunReference(p, nullptr, nullptr);
}

inline AttentionGradients ReferenceAttentionGrad(const AttentionProblem& p, const Doubles& dout) {
  AttentionGradients g;
  g.dq.assign(p.q.size(), 0.0);
  g.dk.assign(p.k.size(), 0.0);
  g.dv.assign(p.v.size(), 0.0);
  for (const auto& s : p.segments) {
    g.dsegment_k.emplace_back(s.k.size(), 0.0);
    g.dsegment_v.emplace_back(s.v.size(), 0.0);
    g.dsegment_beta.emplace_back(s.beta.size(), 0.0);
  }
  internal::RunReference(p, &dout, &g);
  return g;
}

// Random problems.
struct SegmentShape {
  int64_t slots;
  bool beta;
  bool memory;
};

inline AttentionProblem MakeProblem(std::mt19937& rng, int64_t heads, int64_t kv_heads, int64_t width,
                                    const std::vector<SegmentShape>& segments,
                                    const std::vector<std::pair<int64_t, std::vector<int32_t>>>& sequences,
                                    bool own = true, double q_scale = 1.0) {
  AttentionProblem p;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.width = width;
  p.own = own;
  p.scale = 1.0 / std::sqrt(static_cast<double>(width));
  p.scale = static_cast<double>(static_cast<float>(p.scale));
  for (const auto& [rows, list] : sequences) {
    p.sequences.push_back({p.rows, rows, list});
    p.rows += rows;
  }
  p.q = RandomValues(rng, p.rows * heads * width, q_scale);
  if (own) {
    p.k = RandomValues(rng, p.rows * kv_heads * width);
    p.v = RandomValues(rng, p.rows * kv_heads * width);
  }
  for (const SegmentShape& s : segments) {
    AttentionProblem::Segment segment{s.slots,
                                      RandomValues(rng, kv_heads * s.slots * width),
                                      RandomValues(rng, kv_heads * s.slots * width),
                                      {},
                                      s.memory};
    if (s.beta) {
      segment.beta = RandomValues(rng, kv_heads * s.slots);
      for (double& b : segment.beta) b = rng() % 5 == 0 ? -INFINITY : b;  // ragged heads
    }
    p.segments.push_back(segment);
  }
  return p;
}

// The problem as tensors.
struct AttentionTensors {
  Tensor q, k, v;
  std::shared_ptr<AttentionPlan> plan;
};

inline AttentionTensors ToTensors(const Context& ctx, const AttentionProblem& p, bool strided) {
  AttentionTensors t;
  t.q = ToTensor(ctx, p.q, {p.rows, p.heads, p.width}, strided);
  if (p.own) {
    t.k = ToTensor(ctx, p.k, {p.rows, p.kv_heads, p.width}, strided);
    t.v = ToTensor(ctx, p.v, {p.rows, p.kv_heads, p.width}, strided);
  }
  t.plan = std::make_shared<AttentionPlan>();
  for (const auto& s : p.segments) {
    KvSegment segment;
    segment.k = ToTensor(ctx, s.k, {p.kv_heads, s.slots, p.width}, strided);
    segment.v = ToTensor(ctx, s.v, {p.kv_heads, s.slots, p.width}, strided);
    if (!s.beta.empty()) segment.beta = ToTensor(ctx, s.beta, {p.kv_heads, s.slots});
    segment.memory = s.memory;
    t.plan->segments.push_back(segment);
  }
  t.plan->sequences = p.sequences;
  return t;
}

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_KERNELS_ATTENTION_REFERENCE_H_
