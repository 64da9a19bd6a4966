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
#include "kernels/ops/attention_shares.h"
#include "kernels/ops/gather.h"
#include "kernels/ops/matmul.h"
#include "server/compact/least_squares.h"

namespace stillhouse {
namespace {

constexpr float kLeastWeight = 1e-4f;

// Logits of a document's keys are made for a tile of queries at a time, and shares of the slots for as many heads as
// fit: a processor's caches like small ones, a GPU large ones.
struct Room {
  int64_t tile_bytes, head_bytes;
};
Room RoomOf(const Context& ctx) {
  if (ctx.backend->device() == DeviceType::kCpu) return {int64_t{4} << 20, int64_t{96} << 20};
  return {int64_t{512} << 20, int64_t{4} << 30};
}

// Everything of one KV head, in steps: products run on the backend, the small systems are solved on the host, for
// several heads at once.
class HeadMatcher {
 public:
  HeadMatcher(const Context& ctx, const std::vector<MatchPart>& parts, int64_t head, float scale,
              const AttentionMatchingOptions& options, const LayerMatch& out)
      : ctx_(ctx), parts_(parts), head_(head), scale_(scale), options_(options) {
    width_ = parts[0].k.dim(2);
    const int64_t kv_heads = parts[0].k.dim(0);
    for (const MatchPart& part : parts) {
      if (!part.queries.defined() || part.queries.dim(0) == 0) continue;
      group_ = part.queries.dim(1) / kv_heads;
      rows_ += part.queries.dim(0) * group_;
    }
    for (const MatchPart& part : parts) slots_ += part.slots;
    k_out_ = out.kv.k.Select(0, head);
    v_out_ = out.kv.v.Select(0, head);
    if (out.kv.beta) beta_out_ = out.kv.beta.Select(0, head);
    weights_.assign(static_cast<size_t>(slots_), 1.0f);
  }

  // Bytes that one head holds between its steps.
  static int64_t Bytes(int64_t rows, int64_t slots, int64_t width) { return 4 * rows * (2 * slots + 2 * width); }

  // Selection; the weights' system.
  void Begin(int32_t* tokens) {
    outputs_ = ctx_.EmptyF32({rows_, width_});
    log_sums_ = ctx_.EmptyF32({rows_});
    AttendAndSelect();
    Gather();
    std::copy(tokens_.begin(), tokens_.end(), tokens);
    if (options_.measure || options_.fit_beta) ShareOut();
  }

  void SolveWeights() {
    if (!options_.fit_beta) return;
    NonNegativeOptions solver;
    solver.floor = kLeastWeight;
    SolveNonNegative(gram_, linear_, solver, absl::MakeSpan(weights_));
  }

  // β is set; the values' system.
  void Continue(MatchErrors* errors) {
    const std::vector<float> ones(static_cast<size_t>(slots_), 1.0f);
    if (options_.measure) {
      errors->selection_mass += MassError(ones);
      errors->selection += OutputError(ones);
    }
    if (options_.fit_beta) ctx_.backend->Upload(Logs(weights_).data(), beta_out_);
    if (options_.measure) {
      errors->biases_mass += MassError(weights_);
      errors->biases += OutputError(weights_);
    }
    shares_ = Tensor();
    if (options_.fit_values) ValueSystem();
  }

  void SolveValues() {
    if (!options_.fit_values) return;
    double mean = 0.0;
    for (int64_t j = 0; j < slots_; ++j) mean += gram_[static_cast<size_t>(j * slots_ + j)];
    mean /= static_cast<double>(slots_);
    const std::vector<float> first = linear_;
    // A matrix that rounding made indefinite needs more of a ridge.
    for (double ridge = options_.ridge * mean; mean > 0.0 && ridge < 1e3 * mean; ridge *= 10.0) {
      linear_ = first;
      if (SolveRidge(gram_, ridge, width_, absl::MakeSpan(linear_))) return;
    }
    linear_.assign(static_cast<size_t>(slots_ * width_), 0.0f);
  }

  void Finish(MatchErrors* errors) {
    if (options_.fit_values) Accumulate(v_out_, linear_);
    if (options_.measure) errors->values += OutputError(weights_);
  }

 private:
  // Rows of the part's queries of one query head: [n, d], strided.
  Tensor Queries(const MatchPart& part, int64_t g) const { return part.queries.Select(1, head_ * group_ + g); }

  static std::vector<float> Logs(const std::vector<float>& w) {
    std::vector<float> out(w.size());
    for (size_t j = 0; j < w.size(); ++j) out[j] = std::log(w[j]);
    return out;
  }

  void Accumulate(const Tensor& t, const std::vector<float>& addend) {
    std::vector<float> sum = ctx_.ToFloats(t);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += addend[i];
    ctx_.backend->Upload(sum.data(), t);
  }

  Tensor Zeros(Shape shape) const {
    const Tensor t = ctx_.EmptyF32(std::move(shape));
    ctx_.backend->Zero(t);
    return t;
  }

  // o and log Σ e^s of every query, and each part's chosen tokens.
  void AttendAndSelect() {
    int64_t row = 0;
    const int64_t tile_bytes = options_.tile_bytes > 0 ? options_.tile_bytes : RoomOf(ctx_).tile_bytes;
    for (const MatchPart& part : parts_) {
      const int64_t length = part.k.dim(1);
      const Tensor score = Zeros({length});
      const int64_t n = part.queries.defined() ? part.queries.dim(0) : 0;
      const Tensor keys = part.k.Select(0, head_).Transpose(0, 1), values = part.v.Select(0, head_);
      const int64_t tile = std::max<int64_t>(16, tile_bytes / (length * 4));
      for (int64_t g = 0; g < group_ && n > 0; ++g) {
        for (int64_t begin = 0; begin < n; begin += tile) {
          const int64_t count = std::min(tile, n - begin);
          const Tensor shares = ctx_.EmptyF32({count, length});
          MatMul(ctx_, {Queries(part, g).Slice(0, begin, begin + count), keys, shares, scale_, false});
          AttentionSharesArgs args;
          args.z = shares;
          args.own = log_sums_.Slice(0, row, row + count);
          args.columns = score;
          args.power = 2;
          AttentionShares(ctx_, args);
          MatMul(ctx_, {shares, values, outputs_.Slice(0, row, row + count)});
          row += count;
        }
      }
      Select(part, ctx_.ToFloats(score));
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

  void Gather() {
    int64_t slot = 0;
    for (const MatchPart& part : parts_) {
      if (part.slots == 0) continue;
      const std::vector<int32_t> rows(tokens_.begin() + slot, tokens_.begin() + slot + part.slots);
      const Tensor index = ctx_.Ints(rows, {part.slots});
      ctx_.backend->Copy(GatherRows(ctx_, part.k.Select(0, head_), index), k_out_.Slice(0, slot, slot + part.slots));
      ctx_.backend->Copy(GatherRows(ctx_, part.v.Select(0, head_), index), v_out_.Slice(0, slot, slot + part.slots));
      slot += part.slots;
    }
  }

  // Every query on the chosen slots: [rows, slots].
  Tensor SlotLogits() {
    const Tensor logits = ctx_.EmptyF32({rows_, slots_});
    const Tensor keys = k_out_.Transpose(0, 1);
    int64_t row = 0;
    for (const MatchPart& part : parts_) {
      const int64_t n = part.queries.defined() ? part.queries.dim(0) : 0;
      for (int64_t g = 0; g < group_ && n > 0; ++g, row += n) {
        MatMul(ctx_, {Queries(part, g), keys, logits.Slice(0, row, row + n), scale_, false});
      }
    }
    return logits;
  }

  // shares_[i, j] = a_ij of the chosen slots: e^{s_ij − log Σ e^s of the query's own part}; their Gram matrix and sums.
  void ShareOut() {
    shares_ = SlotLogits();
    const Tensor linear = Zeros({slots_});
    AttentionSharesArgs args;
    args.z = shares_;
    args.reference = log_sums_;
    args.columns = linear;
    AttentionShares(ctx_, args);
    if (!options_.fit_beta) return;
    gram_ = Gram(shares_);
    linear_ = ctx_.ToFloats(linear);
  }

  std::vector<float> Gram(const Tensor& x) {
    const Tensor gram = ctx_.EmptyF32({slots_, slots_});
    MatMul(ctx_, {x.Transpose(0, 1), x, gram});
    return ctx_.ToFloats(gram);
  }

  // x_ij = a_ij w_j / Σ_j a_ij w_j: a softmax with biases log w.
  Tensor Normalised(const std::vector<float>& w) {
    const Tensor x = SlotLogits();
    AttentionSharesArgs args;
    args.z = x;
    args.column_bias = ctx_.Floats(Logs(w), {slots_});
    AttentionShares(ctx_, args);
    return x;
  }

  void ValueSystem() {
    const Tensor x = Normalised(weights_);
    // What the kept values leave to be explained.
    Tensor rest = outputs_;
    if (options_.measure) {
      rest = ctx_.EmptyF32({rows_, width_});
      ctx_.backend->Copy(outputs_, rest);
    }
    MatMul(ctx_, {x, v_out_, rest, -1.0f, true});
    const Tensor right = ctx_.EmptyF32({slots_, width_});
    MatMul(ctx_, {x.Transpose(0, 1), rest, right});
    gram_ = Gram(x);
    linear_ = ctx_.ToFloats(right);
    if (!options_.measure) outputs_ = Tensor();
  }

  double MassError(const std::vector<float>& w) {
    const std::vector<float> x = ctx_.ToFloats(shares_);
    double sum = 0.0;
    for (int64_t i = 0; i < rows_; ++i) {
      double mass = 0.0;
      for (int64_t j = 0; j < slots_; ++j) {
        mass += static_cast<double>(w[static_cast<size_t>(j)]) * x[static_cast<size_t>(i * slots_ + j)];
      }
      sum += (mass - 1.0) * (mass - 1.0);
    }
    return sum / static_cast<double>(rows_);
  }

  double OutputError(const std::vector<float>& w) {
    const Tensor out = ctx_.EmptyF32({rows_, width_});
    MatMul(ctx_, {Normalised(w), v_out_, out});
    const std::vector<float> o = ctx_.ToFloats(outputs_), p = ctx_.ToFloats(out);
    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < o.size(); ++i) {
      const double d = static_cast<double>(p[i]) - o[i];
      error += d * d;
      norm += static_cast<double>(o[i]) * o[i];
    }
    return norm > 0.0 ? error / norm : error;
  }

  const Context& ctx_;
  const std::vector<MatchPart>& parts_;
  const int64_t head_;
  const float scale_;
  const AttentionMatchingOptions& options_;
  int64_t width_ = 0, group_ = 0, rows_ = 0, slots_ = 0;
  Tensor k_out_, v_out_, beta_out_;   // this head's part of the result
  Tensor outputs_;                    // [rows, d]: o
  Tensor log_sums_;                   // [rows]
  Tensor shares_;                     // [rows, slots]: a
  std::vector<int32_t> tokens_;       // [slots]
  std::vector<float> weights_;        // [slots]: w
  std::vector<float> gram_, linear_;  // the system that is to be solved; linear_ becomes the solution
};

}  // namespace

absl::StatusOr<LayerMatch> MatchLayer(const Context& ctx, const std::vector<MatchPart>& parts, float scale,
                                      const AttentionMatchingOptions& options) {
  STILLHOUSE_CHECK(!parts.empty() && ctx.tape == nullptr);
  int64_t slots = 0, queries = 0, group = 0;
  const int64_t kv_heads = parts[0].k.dim(0), width = parts[0].k.dim(2);
  for (const MatchPart& part : parts) {
    STILLHOUSE_CHECK(part.k.dim(0) == kv_heads && part.k.dim(2) == width);
    if (part.slots > part.k.dim(1) - part.first_candidate) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot choose ", part.slots, " slots among ", part.k.dim(1) - part.first_candidate, " tokens"));
    }
    slots += part.slots;
    if (part.queries.defined()) {
      queries += part.queries.dim(0);
      group = part.queries.dim(1);
    }
  }
  if (queries == 0 || slots == 0) {
    return absl::InvalidArgumentError("attention matching needs at least one query and one slot");
  }
  LayerMatch out;
  out.kv.k = ctx.EmptyF32({kv_heads, slots, width});
  out.kv.v = ctx.EmptyF32({kv_heads, slots, width});
  if (options.fit_beta) out.kv.beta = ctx.EmptyF32({kv_heads, slots});
  out.tokens.resize(static_cast<size_t>(kv_heads * slots));
  const int64_t rows = queries * (group / kv_heads);
  const int64_t together =
      std::clamp<int64_t>(RoomOf(ctx).head_bytes / HeadMatcher::Bytes(rows, slots, width), 1, kv_heads);
  for (int64_t first = 0; first < kv_heads; first += together) {
    std::vector<HeadMatcher> heads;
    for (int64_t h = first; h < std::min(kv_heads, first + together); ++h) {
      heads.emplace_back(ctx, parts, h, scale, options, out);
      heads.back().Begin(out.tokens.data() + h * slots);
    }
    const auto solve = [&](void (HeadMatcher::*step)()) {
      ctx.backend->threads().ParallelFor(static_cast<int64_t>(heads.size()),
                                         [&](int64_t i, int) { (heads[static_cast<size_t>(i)].*step)(); });
    };
    solve(&HeadMatcher::SolveWeights);
    for (HeadMatcher& head : heads) head.Continue(&out.errors);
    solve(&HeadMatcher::SolveValues);
    for (HeadMatcher& head : heads) head.Finish(&out.errors);
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
