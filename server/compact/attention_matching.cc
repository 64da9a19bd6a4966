// Per layer and KV head, for reference queries i (those of the group's query heads pooled) and a document's keys k_j
// and values v_j: a_ij = softmax_j(q_i·k_j/√d), o_i = Σ_j a_ij v_j.
//   1. Slots are the keys with the largest mean a_ij² (the sink always), in temporal order.
//   2. β = ln w with w ≥ 0 minimising Σ_i (Σ_{j∈S} w_j a_ij − 1)²: the slots carry the mass of all keys.
//   3. V' = V + Δ with Δ the ridge least squares of Σ_{j∈S} x_ij Δ_j to o_i − Σ_{j∈S} x_ij v_j, x = softmax over S with
//      β.
// With several parts, each query's a and o are those of its own part, selection is per part, and 2 and 3 are fitted
// over the slots of all parts together: a query learns to pass over the slots of the parts that it does not mean.
#include "server/compact/attention_matching.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/ops/gather.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/matmul.h"
#include "server/compact/least_squares.h"
#include "server/compact/vector_clones.h"

namespace stillhouse {
namespace {

constexpr float kLeastWeight = 1e-4f;
constexpr float kMostShare = 1e6f;  // of one query's own mass that another part's slots may seem to hold

// Host access to a contiguous f32 tensor: the memory itself on the CPU, else a copy that Commit writes back.
class HostFloats {
 public:
  HostFloats(const Context& ctx, const Tensor& t) : ctx_(ctx), tensor_(t) {
    if (t.device() == DeviceType::kCpu) {
      STILLHOUSE_CHECK(t.contiguous());
      data_ = t.f32();
    } else {
      copy_ = ctx.ToFloats(t);
      data_ = copy_.data();
    }
  }
  float* data() { return data_; }
  void Commit() {
    if (!copy_.empty()) ctx_.backend->Upload(copy_.data(), tensor_);
  }

 private:
  const Context& ctx_;
  Tensor tensor_;
  std::vector<float> copy_;
  float* data_ = nullptr;
};

// sums[j] += Σ_i a[i, j]² for columns [begin, end).
STILLHOUSE_VECTOR_CLONES void AddSquares(const float* a, int64_t rows, int64_t stride, int64_t begin, int64_t end,
                                         float* __restrict sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* __restrict row = a + i * stride;
    for (int64_t j = begin; j < end; ++j) sums[j] += row[j] * row[j];
  }
}

// row *= factor; then the same with a vector; the sum of the products.
STILLHOUSE_VECTOR_CLONES void Scale(int64_t n, float factor, float* row) {
  for (int64_t j = 0; j < n; ++j) row[j] *= factor;
}
STILLHOUSE_VECTOR_CLONES void Multiply(int64_t n, const float* __restrict w, float* __restrict row) {
  for (int64_t j = 0; j < n; ++j) row[j] *= w[j];
}
STILLHOUSE_VECTOR_CLONES float Sum(int64_t n, const float* row) {
  float lanes[16] = {};
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    for (int k = 0; k < 16; ++k) lanes[k] += row[j + k];
  }
  float total = 0.0f;
  for (int k = 0; k < 16; ++k) total += lanes[k];
  for (; j < n; ++j) total += row[j];
  return total;
}

// log Σ_j e^{s_j} from a row's logits and their softmax, read at the largest share.
float LogSumOf(const float* logits, const float* shares, int64_t n) {
  const int64_t best = std::max_element(shares, shares + n) - shares;
  return logits[best] - std::log(shares[best]);
}

// Everything of one KV head.
class HeadMatcher {
 public:
  HeadMatcher(const Context& ctx, const std::vector<MatchPart>& parts, int64_t head, float scale,
              const AttentionMatchingOptions& options)
      : ctx_(ctx), parts_(parts), head_(head), scale_(scale), options_(options) {
    width_ = parts[0].k.dim(2);
    const int64_t kv_heads = parts[0].k.dim(0);
    for (const MatchPart& part : parts) {
      if (!part.queries.defined() || part.queries.dim(0) == 0) continue;
      group_ = part.queries.dim(1) / kv_heads;
      rows_ += part.queries.dim(0) * group_;
    }
    for (const MatchPart& part : parts) slots_ += part.slots;
  }

  void Run(const Tensor& k_out, const Tensor& v_out, const Tensor& beta_out, int32_t* tokens, MatchErrors* errors) {
    outputs_ = ctx_.EmptyF32({rows_, width_});
    log_sums_.resize(static_cast<size_t>(rows_));
    AttendAndSelect();
    Gather(k_out, v_out);
    std::copy(tokens_.begin(), tokens_.end(), tokens);
    ShareOut(k_out);
    std::vector<float> w(static_cast<size_t>(slots_), 1.0f);
    if (options_.measure) {
      errors->selection_mass += MassError(w);
      errors->selection += OutputError(w, v_out);
    }
    if (options_.fit_beta) {
      w = FitWeights();
      HostFloats beta(ctx_, beta_out);
      for (int64_t j = 0; j < slots_; ++j) beta.data()[j] = std::log(w[static_cast<size_t>(j)]);
      beta.Commit();
    }
    if (options_.measure) {
      errors->biases_mass += MassError(w);
      errors->biases += OutputError(w, v_out);
    }
    if (options_.fit_values) FitValues(w, v_out);
    if (options_.measure) errors->values += OutputError(w, v_out);
  }

 private:
  // Rows of the part's queries of one query head: [n, d], strided.
  Tensor Queries(const MatchPart& part, int64_t g) const { return part.queries.Select(1, head_ * group_ + g); }

  // o and log Σ e^s of every query, and each part's chosen tokens.
  void AttendAndSelect() {
    int64_t row = 0;
    for (const MatchPart& part : parts_) {
      const int64_t length = part.k.dim(1);
      std::vector<float> score(static_cast<size_t>(length), 0.0f);
      const int64_t n = part.queries.defined() ? part.queries.dim(0) : 0;
      const Tensor keys = part.k.Select(0, head_).Transpose(0, 1), values = part.v.Select(0, head_);
      const int64_t tile = std::max<int64_t>(16, options_.tile_bytes / (length * 4));
      for (int64_t g = 0; g < group_ && n > 0; ++g) {
        for (int64_t begin = 0; begin < n; begin += tile) {
          const int64_t count = std::min(tile, n - begin);
          const Tensor logits = ctx_.EmptyF32({count, length});
          MatMul(ctx_, {Queries(part, g).Slice(0, begin, begin + count), keys, logits, scale_, false});
          const Tensor shares = Softmax(ctx_, logits);
          MatMul(ctx_, {shares, values, outputs_.Slice(0, row, row + count)});
          HostFloats s(ctx_, logits), a(ctx_, shares);
          ctx_.backend->threads().ParallelRanges(length, 512, [&](int64_t from, int64_t to, int) {
            AddSquares(a.data(), count, length, from, to, score.data());
          });
          for (int64_t i = 0; i < count; ++i) {
            log_sums_[static_cast<size_t>(row + i)] = LogSumOf(s.data() + i * length, a.data() + i * length, length);
          }
          row += count;
        }
      }
      Select(part, score);
    }
  }

  void Select(const MatchPart& part, std::vector<float> score) {
    const int32_t length = static_cast<int32_t>(score.size());
    if (part.keep_first && part.slots > 0) {
      score[static_cast<size_t>(part.first_candidate)] = std::numeric_limits<float>::infinity();
    }
    std::vector<int32_t> order(static_cast<size_t>(length - part.first_candidate));
    std::iota(order.begin(), order.end(), static_cast<int32_t>(part.first_candidate));
    const auto middle = order.begin() + part.slots;
    // Ties go to the earlier token.
    std::nth_element(order.begin(), middle, order.end(), [&](int32_t a, int32_t b) {
      const float sa = score[static_cast<size_t>(a)], sb = score[static_cast<size_t>(b)];
      return sa != sb ? sa > sb : a < b;
    });
    std::sort(order.begin(), middle);
    tokens_.insert(tokens_.end(), order.begin(), middle);
  }

  void Gather(const Tensor& k_out, const Tensor& v_out) {
    int64_t slot = 0;
    for (const MatchPart& part : parts_) {
      if (part.slots == 0) continue;
      const std::vector<int32_t> rows(tokens_.begin() + slot, tokens_.begin() + slot + part.slots);
      const Tensor index = ctx_.Ints(rows, {part.slots});
      ctx_.backend->Copy(GatherRows(ctx_, part.k.Select(0, head_), index), k_out.Slice(0, slot, slot + part.slots));
      ctx_.backend->Copy(GatherRows(ctx_, part.v.Select(0, head_), index), v_out.Slice(0, slot, slot + part.slots));
      slot += part.slots;
    }
  }

  // shares_[i, j] = a_ij of the chosen slots: e^{s_ij − log Σ e^s of the query's own part}.
  void ShareOut(const Tensor& k_out) {
    const Tensor logits = ctx_.EmptyF32({rows_, slots_});
    const Tensor keys = k_out.Transpose(0, 1);
    int64_t row = 0;
    for (const MatchPart& part : parts_) {
      const int64_t n = part.queries.defined() ? part.queries.dim(0) : 0;
      for (int64_t g = 0; g < group_ && n > 0; ++g, row += n) {
        MatMul(ctx_, {Queries(part, g), keys, logits.Slice(0, row, row + n), scale_, false});
      }
    }
    shares_ = Softmax(ctx_, logits);
    HostFloats s(ctx_, logits), x(ctx_, shares_);
    ctx_.backend->threads().ParallelRanges(rows_, 64, [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to; ++i) {
        float* shares = x.data() + i * slots_;
        const float own = LogSumOf(s.data() + i * slots_, shares, slots_);
        const float mass = std::min(kMostShare, std::exp(own - log_sums_[static_cast<size_t>(i)]));
        Scale(slots_, mass, shares);
      }
    });
    x.Commit();
  }

  std::vector<float> FitWeights() {
    const Tensor gram = ctx_.EmptyF32({slots_, slots_});
    MatMul(ctx_, {shares_.Transpose(0, 1), shares_, gram});
    const Tensor ones = ctx_.EmptyF32({1, rows_});
    const std::vector<float> one(static_cast<size_t>(rows_), 1.0f);
    ctx_.backend->Upload(one.data(), ones);
    const Tensor linear = ctx_.EmptyF32({1, slots_});
    MatMul(ctx_, {ones, shares_, linear});
    HostFloats g(ctx_, gram), c(ctx_, linear);
    std::vector<float> w(static_cast<size_t>(slots_), 1.0f);
    NonNegativeOptions solver;
    solver.floor = kLeastWeight;
    SolveNonNegative(absl::MakeConstSpan(g.data(), static_cast<size_t>(slots_ * slots_)),
                     absl::MakeConstSpan(c.data(), static_cast<size_t>(slots_)), solver, absl::MakeSpan(w));
    return w;
  }

  // shares_ becomes x_ij = a_ij w_j / Σ_j a_ij w_j, in place.
  void Normalise(const Tensor& shares, const std::vector<float>& w) {
    HostFloats x(ctx_, shares);
    ctx_.backend->threads().ParallelRanges(rows_, 64, [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to; ++i) {
        float* row = x.data() + i * slots_;
        Multiply(slots_, w.data(), row);
        const float total = Sum(slots_, row);
        Scale(slots_, total > 0.0f ? 1.0f / total : 0.0f, row);
      }
    });
    x.Commit();
  }

  void FitValues(const std::vector<float>& w, const Tensor& v_out) {
    Normalise(shares_, w);
    // o − x·V, into outputs_ (which the measurement has copied if it needs it).
    if (options_.measure) {
      targets_ = ctx_.EmptyF32({rows_, width_});
      ctx_.backend->Copy(outputs_, targets_);
    }
    MatMul(ctx_, {shares_, v_out, outputs_, -1.0f, true});
    const Tensor gram = ctx_.EmptyF32({slots_, slots_}), right = ctx_.EmptyF32({slots_, width_});
    MatMul(ctx_, {shares_.Transpose(0, 1), shares_, gram});
    MatMul(ctx_, {shares_.Transpose(0, 1), outputs_, right});
    HostFloats g(ctx_, gram), b(ctx_, right), v(ctx_, v_out);
    double mean = 0.0;
    for (int64_t j = 0; j < slots_; ++j) mean += g.data()[j * slots_ + j];
    mean /= static_cast<double>(slots_);
    const std::vector<float> first(b.data(), b.data() + slots_ * width_);
    // A matrix that rounding made indefinite needs more of a ridge.
    for (double ridge = options_.ridge * mean; mean > 0.0 && ridge < 1e3 * mean; ridge *= 10.0) {
      std::copy(first.begin(), first.end(), b.data());
      if (!SolveRidge(absl::MakeConstSpan(g.data(), static_cast<size_t>(slots_ * slots_)), ridge, width_,
                      absl::MakeSpan(b.data(), static_cast<size_t>(slots_ * width_)))) {
        continue;
      }
      for (int64_t i = 0; i < slots_ * width_; ++i) v.data()[i] += b.data()[i];
      v.Commit();
      return;
    }
  }

  double MassError(const std::vector<float>& w) {
    HostFloats x(ctx_, shares_);
    double sum = 0.0;
    for (int64_t i = 0; i < rows_; ++i) {
      double mass = 0.0;
      for (int64_t j = 0; j < slots_; ++j) {
        mass += static_cast<double>(w[static_cast<size_t>(j)]) * x.data()[i * slots_ + j];
      }
      sum += (mass - 1.0) * (mass - 1.0);
    }
    return sum / static_cast<double>(rows_);
  }

  double OutputError(const std::vector<float>& w, const Tensor& v_out) {
    Tensor shares = ctx_.EmptyF32({rows_, slots_});
    ctx_.backend->Copy(shares_, shares);
    if (!targets_.defined()) {  // shares_ are still a_ij
      Normalise(shares, w);
    }
    const Tensor out = ctx_.EmptyF32({rows_, width_});
    MatMul(ctx_, {shares, v_out, out});
    HostFloats o(ctx_, targets_.defined() ? targets_ : outputs_), p(ctx_, out);
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < rows_ * width_; ++i) {
      const double d = static_cast<double>(p.data()[i]) - o.data()[i];
      error += d * d;
      norm += static_cast<double>(o.data()[i]) * o.data()[i];
    }
    return norm > 0.0 ? error / norm : error;
  }

  const Context& ctx_;
  const std::vector<MatchPart>& parts_;
  const int64_t head_;
  const float scale_;
  const AttentionMatchingOptions& options_;
  int64_t width_ = 0, group_ = 0, rows_ = 0, slots_ = 0;
  Tensor outputs_;               // [rows, d]
  Tensor targets_;               // a copy of outputs_, when measuring
  std::vector<float> log_sums_;  // [rows]
  std::vector<int32_t> tokens_;  // [slots]
  Tensor shares_;                // [rows, slots]
};

}  // namespace

absl::StatusOr<LayerMatch> MatchLayer(const Context& ctx, const std::vector<MatchPart>& parts, float scale,
                                      const AttentionMatchingOptions& options) {
  STILLHOUSE_CHECK(!parts.empty() && ctx.tape == nullptr);
  int64_t slots = 0, queries = 0;
  const int64_t kv_heads = parts[0].k.dim(0), width = parts[0].k.dim(2);
  for (const MatchPart& part : parts) {
    STILLHOUSE_CHECK(part.k.dim(0) == kv_heads && part.k.dim(2) == width);
    if (part.slots > part.k.dim(1) - part.first_candidate) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot choose ", part.slots, " slots among ", part.k.dim(1) - part.first_candidate, " tokens"));
    }
    slots += part.slots;
    if (part.queries.defined()) queries += part.queries.dim(0);
  }
  if (queries == 0 || slots == 0) {
    return absl::InvalidArgumentError("attention matching needs at least one query and one slot");
  }
  LayerMatch out;
  out.kv.k = ctx.EmptyF32({kv_heads, slots, width});
  out.kv.v = ctx.EmptyF32({kv_heads, slots, width});
  if (options.fit_beta) out.kv.beta = ctx.EmptyF32({kv_heads, slots});
  out.tokens.resize(static_cast<size_t>(kv_heads * slots));
  for (int64_t h = 0; h < kv_heads; ++h) {
    HeadMatcher head(ctx, parts, h, scale, options);
    head.Run(out.kv.k.Select(0, h), out.kv.v.Select(0, h), out.kv.beta ? out.kv.beta.Select(0, h) : Tensor(),
             out.tokens.data() + h * slots, &out.errors);
  }
  const double n = static_cast<double>(kv_heads);
  for (double* e : {&out.errors.selection, &out.errors.biases, &out.errors.values, &out.errors.selection_mass,
                    &out.errors.biases_mass}) {
    *e /= n;
  }
  return out;
}

std::function<void(int64_t, const Tensor&)> QueryCollector::Observer(const Context& ctx, std::vector<int32_t> rows) {
  count_ += static_cast<int64_t>(rows.size());
  return [this, ctx, index = std::move(rows)](int64_t layer, const Tensor& q) {
    const int64_t heads = q.dim(1), width = q.dim(2);
    const int64_t n = static_cast<int64_t>(index.size());
    STILLHOUSE_CHECK(q.stride(1) == width && q.stride(2) == 1);
    const Tensor flat = q.contiguous() ? q.Reshape({q.dim(0), heads * width}) : [&] {
      Tensor copy = ctx.EmptyF32(q.shape());
      ctx.backend->Copy(q, copy);
      return copy.Reshape({q.dim(0), heads * width});
    }();
    layers_[static_cast<size_t>(layer)].push_back(
        GatherRows(ctx, flat, ctx.Ints(index, {n})).Reshape({n, heads, width}));
  };
}

Tensor QueryCollector::Layer(const Context& ctx, int64_t layer) const {
  const std::vector<Tensor>& pieces = layers_[static_cast<size_t>(layer)];
  if (pieces.empty()) return Tensor();
  if (pieces.size() == 1) return pieces[0];
  int64_t rows = 0;
  for (const Tensor& piece : pieces) rows += piece.dim(0);
  const Tensor all = ctx.EmptyF32({rows, pieces[0].dim(1), pieces[0].dim(2)});
  int64_t row = 0;
  for (const Tensor& piece : pieces) {
    ctx.backend->Copy(piece, all.Slice(0, row, row + piece.dim(0)));
    row += piece.dim(0);
  }
  return all;
}

void QueryCollector::Clear() {
  for (auto& layer : layers_) layer.clear();
  count_ = 0;
}

std::vector<int64_t> AllotSlots(int64_t total, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& capacities) {
  const size_t n = lengths.size();
  std::vector<int64_t> slots(n, 0);
  const int64_t sum = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  int64_t left = std::min(total, std::accumulate(capacities.begin(), capacities.end(), int64_t{0}));
  // Floors first, then the largest remainders, then wherever there is room.
  std::vector<std::pair<double, size_t>> remainders;
  for (size_t i = 0; i < n; ++i) {
    const double exact = sum > 0 ? static_cast<double>(total) * static_cast<double>(lengths[i]) / sum : 0.0;
    slots[i] = std::min({static_cast<int64_t>(exact), capacities[i], left});
    left -= slots[i];
    remainders.emplace_back(exact - std::floor(exact), i);
  }
  std::stable_sort(remainders.begin(), remainders.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  while (left > 0) {
    for (const auto& [fraction, i] : remainders) {
      if (left > 0 && slots[i] < capacities[i]) {
        ++slots[i];
        --left;
      }
    }
  }
  // No part goes without while another has two.
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] > 0 || capacities[i] == 0) continue;
    const auto richest = std::max_element(slots.begin(), slots.end());
    if (*richest < 2) break;
    --*richest;
    ++slots[i];
  }
  return slots;
}

Tensor RotateKeys(const Context& ctx, const RopeConfig& rope, const Tensor& k, const std::vector<int32_t>& from,
                  const std::vector<int32_t>& to) {
  const int64_t tokens = k.dim(1);
  STILLHOUSE_CHECK(static_cast<int64_t>(from.size()) == tokens && static_cast<int64_t>(to.size()) == tokens);
  const Tensor plain = Rope(ctx, k.Transpose(0, 1), ctx.Ints(from, {tokens}), rope, /*inverse=*/true);
  const Tensor turned = Rope(ctx, plain, ctx.Ints(to, {tokens}), rope);
  Tensor out = ctx.EmptyF32(k.shape());
  ctx.backend->Copy(turned.Transpose(0, 1), out);
  return out;
}

}  // namespace stillhouse
