#include "kernels/ops/loss.h"

#include <gtest/gtest.h>

#include <set>

#include "kernels/ops/matmul.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

double LogSumExp(const double* z, int64_t n) {
  double m = -INFINITY, sum = 0.0;
  for (int64_t i = 0; i < n; ++i) m = std::max(m, z[i]);
  if (m == -INFINITY) return m;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(z[i] - m);
  return m + std::log(sum);
}

Doubles LogSoftmaxOf(const Doubles& z, int64_t n) {
  Doubles out(z.size());
  for (size_t r = 0; r < z.size() / static_cast<size_t>(n); ++r) {
    const size_t at = r * static_cast<size_t>(n);
    const double lse = LogSumExp(&z[at], n);
    for (int64_t i = 0; i < n; ++i) out[at + i] = lse == -INFINITY ? -INFINITY : z[at + i] - lse;
  }
  return out;
}

Doubles SoftmaxOf(const Doubles& z, int64_t n) {
  Doubles out = LogSoftmaxOf(z, n);
  for (double& v : out) v = std::exp(v);
  return out;
}

struct Size {
  int64_t rows, n;
};
const Size kSizes[] = {{1, 1}, {3, 2}, {5, 7}, {4, 64}, {2, 1001}, {70, 33}, {0, 4}};

void CheckForward(bool log) {
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  for (const auto& [rows, n] : kSizes) {
    for (double scale : {1.0, 1e4}) {
      for (bool strided : {false, true}) {
        Doubles z = RandomValues(rng, rows * n, scale);
        if (rows > 2) {
          for (int64_t i = 0; i < n; ++i) z[n + i] = -INFINITY;  // a masked row
          z[0] = -INFINITY;
        }
        const Shape shape{rows, n};
        const Tensor in = ToTensor(ctx, z, shape, strided);
        const Tensor out = strided ? StridedEmpty(ctx, shape) : PoisonedEmpty(ctx, shape);
        if (log) {
          ctx.kernels().LogSoftmax(*ctx.backend, {in, out});
        } else {
          ctx.kernels().Softmax(*ctx.backend, {in, out});
        }
        EXPECT_LE(RelativeError(out, log ? LogSoftmaxOf(z, n) : SoftmaxOf(z, n)), kForwardTolerance)
            << rows << " " << n << " " << scale;
      }
    }
  }
}

void CheckGradients(bool log) {
  std::mt19937 rng = TestRng(2);
  for (const auto& [rows, n] : {Size{1, 1}, Size{3, 2}, Size{5, 7}, Size{2, 71}}) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    Doubles z = RandomValues(rng, rows * n, 2.0);
    const Doubles w = RandomValues(rng, rows * n);
    const Tensor tz = ToTensor(ctx, z, {rows, n}, true);
    tape.Watch(tz);
    PoisonNext(ctx, {rows, n});
    const Tensor out = log ? LogSoftmax(ctx, tz) : Softmax(ctx, tz);
    tape.BackwardFrom({out}, {ToTensor(ctx, w, {rows, n})});
    const Doubles want = CentralDifferences(z, [&] { return Inner(w, log ? LogSoftmaxOf(z, n) : SoftmaxOf(z, n)); });
    const Doubles got = ToDoubles(tape.Grad(tz));
    // One logit alone: the gradient is 0, and the differences are rounding.
    EXPECT_LE(RelativeError(got, n == 1 ? Doubles(static_cast<size_t>(rows), 0.0) : want), kGradientTolerance);
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0.0;
      for (int64_t i = 0; i < n; ++i) sum += got[r * n + i];
      EXPECT_NEAR(sum, 0.0, 1e-5);
    }
  }
}

TEST(Softmax, MatchesReference) { CheckForward(false); }
TEST(Softmax, GradientsMatchCentralDifferencesAndSumToZero) { CheckGradients(false); }
TEST(LogSoftmax, MatchesReference) { CheckForward(true); }
TEST(LogSoftmax, GradientsMatchCentralDifferencesAndSumToZero) { CheckGradients(true); }

// --- cross-entropy -------------------------------------------------------------------------------------------------

struct CrossEntropyCase {
  CrossEntropyOptions options;
  bool class_weights = false;
  bool soft = false;
};

std::vector<CrossEntropyCase> CrossEntropyCases() {
  std::vector<CrossEntropyCase> cases;
  for (Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
    for (float smoothing : {0.0f, 0.1f}) {
      for (float z_loss : {0.0f, 0.01f}) {
        for (bool class_weights : {false, true}) {
          cases.push_back({{smoothing, -100, reduction, z_loss}, class_weights, false});
        }
      }
    }
    cases.push_back({{0.0f, 3, reduction, 0.0f}, true, false});
    cases.push_back({{0.0f, -100, reduction, 0.02f}, false, true});
  }
  return cases;
}

// Row losses, or their reduction (one element).
Doubles ReferenceCrossEntropy(const Doubles& z, int64_t rows, int64_t n, const std::vector<int32_t>& targets,
                              const Doubles& soft, const Doubles& class_weights, const CrossEntropyOptions& options) {
  Doubles losses;
  double weight_sum = 0.0, sum = 0.0;
  const double eps = static_cast<double>(options.label_smoothing);
  for (int64_t r = 0; r < rows; ++r) {
    const double* row = &z[r * n];
    double loss = 0.0;
    if (!soft.empty() || targets[r] != options.ignore_index) {
      const double lse = LogSumExp(row, n);
      double weight = 1.0;
      for (int64_t i = 0; i < n; ++i) {
        const double y =
            soft.empty() ? (i == targets[r] ? 1.0 - eps : 0.0) + eps / static_cast<double>(n) : soft[r * n + i];
        if (y != 0.0) loss += y * (lse - row[i]);
      }
      loss += static_cast<double>(options.z_loss) * lse * lse;
      if (!class_weights.empty()) weight = class_weights[targets[r]];
      loss *= weight;
      weight_sum += weight;
    }
    losses.push_back(loss);
    sum += loss;
  }
  if (options.reduction == Reduction::kNone) return losses;
  if (options.reduction == Reduction::kSum) return {sum};
  return {weight_sum > 0.0 ? sum / weight_sum : 0.0};
}

TEST(CrossEntropy, MatchesReferenceAndGradientsForAllOptions) {
  std::mt19937 rng = TestRng(3);
  for (const CrossEntropyCase& c : CrossEntropyCases()) {
    for (const auto& [rows, n] : {Size{1, 1}, Size{5, 6}, Size{3, 301}}) {
      SCOPED_TRACE(::testing::Message() << rows << "x" << n << " reduction " << int(c.options.reduction)
                                        << " smoothing " << c.options.label_smoothing << " weights " << c.class_weights
                                        << " soft " << c.soft);
      Tape tape(BackendForTests());
      const Context ctx = TestContext(&tape);
      Doubles z = RandomValues(rng, rows * n, 2.0);
      std::vector<int32_t> targets;
      for (int64_t r = 0; r < rows; ++r) targets.push_back(static_cast<int32_t>(rng() % n));
      if (rows > 2) targets[1] = c.options.ignore_index;
      Doubles soft, class_weights;
      if (c.soft) {
        soft = SoftmaxOf(RandomValues(rng, rows * n), n);
        for (double& y : soft) y = static_cast<double>(static_cast<float>(y));
      }
      if (c.class_weights) {
        for (int64_t i = 0; i < n; ++i) class_weights.push_back(static_cast<double>(static_cast<float>(rng() % 7) / 4));
      }
      const Tensor tz = ToTensor(ctx, z, {rows, n}, true);
      tape.Watch(tz);
      const bool per_row = c.options.reduction == Reduction::kNone;
      const Shape shape{per_row ? rows : 1};
      PoisonNext(ctx, shape);
      const Tensor loss = c.soft ? CrossEntropySoft(ctx, tz, ToTensor(ctx, soft, {rows, n}, true), c.options)
                                 : CrossEntropy(ctx, tz, ctx.Ints(targets, {rows}), c.options,
                                                c.class_weights ? ToTensor(ctx, class_weights, {n}) : Tensor());
      auto reference = [&] { return ReferenceCrossEntropy(z, rows, n, targets, soft, class_weights, c.options); };
      EXPECT_LE(RelativeError(loss, reference()), kForwardTolerance);
      const Doubles w = RandomValues(rng, shape[0]);
      tape.BackwardFrom({loss}, {ToTensor(ctx, w, shape)});
      const Doubles want = CentralDifferences(z, [&] { return Inner(w, reference()); });
      const Doubles got = ToDoubles(tape.Grad(tz));
      // dz = s − y in fp32: where the two nearly cancel (one class, a sure row), what is left has their rounding.
      EXPECT_LE(RelativeError(got, want, 0.01), kGradientTolerance);
    }
  }
}

TEST(CrossEntropy, MaskedLogitsAndEmptyMeans) {
  const Context ctx = TestContext();
  // A masked token that is no target costs nothing; a masked target costs infinity; nothing is NaN.
  const Tensor z = ToTensor(ctx, {0.0, -INFINITY, 1.0, -INFINITY, 2.0, 0.0}, {2, 3});
  CrossEntropyOptions none;
  none.reduction = Reduction::kNone;
  const Doubles losses = ToDoubles(CrossEntropy(ctx, z, ctx.Ints({0, 0}, {2}), none));
  EXPECT_NEAR(losses[0], std::log(1 + std::exp(1.0)), 1e-6);
  EXPECT_EQ(losses[1], INFINITY);
  const Tensor ignored = CrossEntropy(ctx, z, ctx.Ints({-100, -100}, {2}), {});
  EXPECT_EQ(ToDoubles(ignored)[0], 0.0);
}

TEST(CrossEntropyDeathTest, RejectsTargetsOutsideOfTheVocabulary) {
  STILLHOUSE_CPU_ONLY();  // a kernel traps: the process ends with the next checked call
  const Context ctx = TestContext();
  const Tensor z = ToTensor(ctx, {0.0, 1.0}, {1, 2});
  EXPECT_DEATH(CrossEntropy(ctx, z, ctx.Ints({2}, {1}), {}), "target 2 of 2");
}

// --- fused with the projection -------------------------------------------------------------------------------------

Doubles Project(const Doubles& x, const Doubles& weight, int64_t rows, int64_t width, int64_t n) {
  Doubles z(static_cast<size_t>(rows * n));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < width; ++c) z[r * n + i] += x[r * width + c] * weight[i * width + c];
    }
  }
  return z;
}

TEST(LinearCrossEntropy, EqualsCrossEntropyOfLinear) {
  std::mt19937 rng = TestRng(4);
  for (const auto& [rows, n] : {Size{1, 3}, Size{5, 40}, Size{130, 67}}) {  // 130: more than one chunk, and a tail
    for (Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
      for (bool strided : {false, true}) {
        const int64_t width = 24;
        Tape tape(BackendForTests());
        const Context ctx = TestContext(&tape);
        const CrossEntropyOptions options{0.05f, -1, reduction, 0.001f};
        const Doubles x = RandomValues(rng, rows * width), weight = RandomValues(rng, n * width);
        std::vector<int32_t> targets;
        for (int64_t r = 0; r < rows; ++r) targets.push_back(r % 3 == 1 ? -1 : static_cast<int32_t>(rng() % n));
        const Tensor a = ToTensor(ctx, x, {rows, width}, strided), b = ToTensor(ctx, x, {rows, width});
        const Tensor w = ToTensor(ctx, weight, {n, width}), ids = ctx.Ints(targets, {rows});
        tape.Watch(a);
        tape.Watch(b);
        PoisonNext(ctx, {rows, width});
        const Tensor fused = LinearCrossEntropy(ctx, a, w, ids, options);
        const Tensor plain = CrossEntropy(ctx, Linear(ctx, b, w), ids, options);
        const Doubles want =
            ReferenceCrossEntropy(Project(x, weight, rows, width, n), rows, n, targets, {}, {}, options);
        EXPECT_LE(RelativeError(fused, want), kForwardTolerance);
        EXPECT_LE(RelativeError(plain, want), kForwardTolerance);
        tape.BackwardFrom({fused, plain}, {ToTensor(ctx, {1.5}, {1}), ToTensor(ctx, {1.5}, {1})});
        EXPECT_LE(RelativeError(tape.Grad(a), ToDoubles(tape.Grad(b))), 1e-5);
      }
    }
  }
}

struct Teacher {
  std::vector<int32_t> ids;
  Doubles logprobs;
};

// Per row: `used` candidates with different ids, the rest −1; their mass stays below 1.
Teacher MakeTeacher(std::mt19937& rng, int64_t rows, int64_t columns, int64_t n) {
  Teacher t;
  for (int64_t r = 0; r < rows; ++r) {
    std::set<int32_t> ids;
    const int64_t used = r == 1 ? 0 : 1 + static_cast<int64_t>(rng()) % columns;
    while (static_cast<int64_t>(ids.size()) < std::min(used, n - 1)) ids.insert(static_cast<int32_t>(rng() % n));
    const Doubles lp = LogSoftmaxOf(RandomValues(rng, n, 2.0), n);
    std::vector<int32_t> list(ids.begin(), ids.end());
    std::shuffle(list.begin(), list.end(), rng);
    for (int64_t c = 0; c < columns; ++c) {
      // Unused entries in the middle, too: the id says what counts, not the place.
      const bool hole = c >= static_cast<int64_t>(list.size());
      t.ids.push_back(hole ? -1 : list[c]);
      t.logprobs.push_back(hole ? std::nan("") : static_cast<double>(static_cast<float>(lp[list[c]])));
    }
    std::swap(t.ids[r * columns], t.ids[(r + 1) * columns - 1]);
    std::swap(t.logprobs[r * columns], t.logprobs[(r + 1) * columns - 1]);
  }
  return t;
}

double ReferenceDistill(const Doubles& z, int64_t rows, int64_t n, const Teacher& teacher, int64_t columns,
                        DistillMode mode, const Doubles& row_weights) {
  double sum = 0.0, weight_sum = 0.0;
  for (int64_t r = 0; r < rows; ++r) {
    const double lse = LogSumExp(&z[r * n], n);
    double mass = 0.0, student = 0.0, loss = 0.0;
    bool any = false;
    for (int64_t c = 0; c < columns; ++c) {
      const int32_t id = teacher.ids[r * columns + c];
      if (id < 0) continue;
      any = true;
      const double q = std::exp(teacher.logprobs[r * columns + c]);
      mass += q;
      student += std::exp(z[r * n + id] - lse);
      loss -= q * (z[r * n + id] - lse);
    }
    if (!any) continue;
    if (mode == DistillMode::kRenormalised) loss /= mass;
    if (mode == DistillMode::kTail) loss -= (1.0 - mass) * std::log(1.0 - student);
    const double w = row_weights.empty() ? 1.0 : row_weights[r];
    sum += w * loss;
    weight_sum += w;
  }
  return weight_sum > 0.0 ? sum / weight_sum : 0.0;
}

TEST(LinearDistill, MatchesReferenceInEveryMode) {
  std::mt19937 rng = TestRng(5);
  for (DistillMode mode : {DistillMode::kRenormalised, DistillMode::kRaw, DistillMode::kTail}) {
    for (const auto& [rows, n] : {Size{1, 5}, Size{4, 37}, Size{70, 19}}) {
      for (bool weighted : {false, true}) {
        const int64_t width = 6, columns = 4;
        Tape tape(BackendForTests());
        const Context ctx = TestContext(&tape);
        Doubles x = RandomValues(rng, rows * width);
        const Doubles weight = RandomValues(rng, n * width);
        const Teacher teacher = MakeTeacher(rng, rows, columns, n);
        Doubles row_weights;
        for (int64_t r = 0; weighted && r < rows; ++r) row_weights.push_back(static_cast<double>(rng() % 3) / 2);
        if (weighted) row_weights[0] = 0.5;
        const Tensor tx = ToTensor(ctx, x, {rows, width}, true);
        tape.Watch(tx);
        PoisonNext(ctx, {rows, width});
        const Tensor loss =
            LinearDistill(ctx, tx, ToTensor(ctx, weight, {n, width}), ctx.Ints(teacher.ids, {rows, columns}),
                          ToTensor(ctx, teacher.logprobs, {rows, columns}), mode,
                          weighted ? ToTensor(ctx, row_weights, {rows}) : Tensor());
        auto reference = [&] {
          return ReferenceDistill(Project(x, weight, rows, width, n), rows, n, teacher, columns, mode, row_weights);
        };
        // Losses are differences of logits of about 10, gradients of probabilities: the same again.
        EXPECT_LE(RelativeError(ToDoubles(loss), {reference()}, 0.5), kForwardTolerance) << int(mode) << " " << rows;
        tape.Backward(loss, 0.75f);
        Doubles want = CentralDifferences(x, reference);
        for (double& g : want) g *= 0.75;
        EXPECT_LE(RelativeError(ToDoubles(tape.Grad(tx)), want, 0.05), kGradientTolerance) << int(mode) << " " << rows;
      }
    }
  }
}

TEST(LinearDistill, GradientOfLogitsSumsToZeroAndVanishesAtTheTeacher) {
  std::mt19937 rng = TestRng(6);
  // weight = identity: x is the logits, dx their gradient.
  const int64_t n = 12;
  Doubles identity(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) identity[i * n + i] = 1.0;
  Doubles z = RandomValues(rng, n, 1.0);
  const Doubles lp = LogSoftmaxOf(z, n);
  for (DistillMode mode : {DistillMode::kRenormalised, DistillMode::kRaw, DistillMode::kTail}) {
    for (int64_t k : {int64_t{3}, n}) {
      Tape tape(BackendForTests());
      const Context ctx = TestContext(&tape);
      std::vector<int32_t> ids;
      Doubles logprobs;
      for (int64_t i = 0; i < k; ++i) {
        ids.push_back(static_cast<int32_t>((i * 5) % n));
        logprobs.push_back(lp[ids.back()]);
      }
      const Tensor tx = ToTensor(ctx, z, {1, n});
      tape.Watch(tx);
      const Tensor loss = LinearDistill(ctx, tx, ToTensor(ctx, identity, {n, n}), ctx.Ints(ids, {1, k}),
                                        ToTensor(ctx, logprobs, {1, k}), mode);
      tape.Backward(loss);
      double sum = 0.0, norm = 0.0;
      for (double g : ToDoubles(tape.Grad(tx))) {
        sum += g;
        norm += std::fabs(g);
      }
      EXPECT_NEAR(sum, 0.0, 1e-6);
      // The student equals the teacher: where the whole distribution is compared, there is nothing to learn.
      if (k == n || mode == DistillMode::kTail) {
        EXPECT_NEAR(norm, 0.0, 2e-6) << int(mode);
      } else {
        EXPECT_GT(norm, 1e-2);
      }
    }
  }
}

TEST(LinearDistill, TailStaysExactWhereTheStudentsTailVanishes) {
  // The student gives its candidates all but e^-40: 1 − Σp is 0 in fp32, its logarithm is not.
  const Context ctx = TestContext();
  const Tensor x = ToTensor(ctx, {40.0, 0.0}, {1, 2}), identity = ToTensor(ctx, {1, 0, 0, 1}, {2, 2});
  const Tensor loss = LinearDistill(ctx, x, identity, ctx.Ints({0}, {1, 1}), ToTensor(ctx, {std::log(0.75)}, {1, 1}),
                                    DistillMode::kTail);
  EXPECT_NEAR(ToDoubles(loss)[0], 0.25 * 40.0, 1e-4);
}

TEST(TopLogprobs, MatchesFullSort) {
  std::mt19937 rng = TestRng(7);
  const Context ctx = TestContext();
  for (const auto& [rows, n] : {Size{1, 1}, Size{5, 40}, Size{67, 3001}}) {
    for (int64_t k : {int64_t{0}, int64_t{1}, int64_t{20}, n}) {
      if (k > n) continue;
      const int64_t width = 8;
      Doubles x = RandomValues(rng, rows * width), weight = RandomValues(rng, n * width);
      // Whole numbers: many exact ties.
      for (double& v : x) v = std::round(v);
      for (double& v : weight) v = std::round(v);
      const Doubles z = Project(x, weight, rows, width, n), lp = LogSoftmaxOf(z, n);
      std::vector<int32_t> tokens;
      for (int64_t r = 0; r < rows; ++r) tokens.push_back(static_cast<int32_t>(rng() % n));
      TopLogprobsArgs args{ToTensor(ctx, x, {rows, width}, true), ToTensor(ctx, weight, {n, width}),
                           ctx.Ints(tokens, {rows}), k};
      if (k > 0) {
        args.top_ids = ctx.Empty(DType::kI32, {rows, k});
        args.top_logprobs = PoisonedEmpty(ctx, {rows, k});
      }
      args.token_logprobs = PoisonedEmpty(ctx, {rows});
      TopLogprobs(ctx, args);
      Doubles want_token, want_top;
      std::vector<int32_t> want_ids;
      for (int64_t r = 0; r < rows; ++r) {
        want_token.push_back(lp[r * n + tokens[r]]);
        std::vector<int32_t> order(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return z[r * n + a] > z[r * n + b]; });
        for (int64_t i = 0; i < k; ++i) {
          want_ids.push_back(order[i]);
          want_top.push_back(lp[r * n + order[i]]);
        }
      }
      EXPECT_LE(RelativeError(args.token_logprobs, want_token), kForwardTolerance);
      if (k == 0) continue;
      EXPECT_EQ(ctx.ToInts(args.top_ids), want_ids) << rows << " " << n << " " << k;
      EXPECT_LE(RelativeError(args.top_logprobs, want_top), kForwardTolerance);
    }
  }
}

TEST(FusedLosses, ReadQuantisedWeights) {
  std::mt19937 rng = TestRng(8);
  const Context ctx = TestContext();
  // Q8_0 blocks made by hand: scale 2^-6 (fp16 0x2400), values in [−127, 127]; exact in fp64.
  const int64_t n = 21, width = 64, rows = 3;
  std::vector<uint8_t> blocks;
  Doubles weight;
  for (int64_t b = 0; b < n * width / 32; ++b) {
    blocks.push_back(0x00);
    blocks.push_back(0x24);
    for (int i = 0; i < 32; ++i) {
      const int value = static_cast<int>(rng() % 255) - 127;
      blocks.push_back(static_cast<uint8_t>(static_cast<int8_t>(value)));
      weight.push_back(value / 64.0);
    }
  }
  const Tensor w = PrepareWeight(ctx, Tensor::Wrap(blocks.data(), DType::kQ8_0, {n, width}));
  Doubles x = RandomValues(rng, rows * width);
  Tape tape(BackendForTests());
  const Context train = TestContext(&tape);
  const Tensor tx = ToTensor(ctx, x, {rows, width});
  tape.Watch(tx);
  const std::vector<int32_t> targets = {3, 20, 0};
  const Tensor loss = LinearCrossEntropy(train, tx, w, ctx.Ints(targets, {rows}), {});
  auto reference = [&] {
    return ReferenceCrossEntropy(Project(x, weight, rows, width, n), rows, n, targets, {}, {}, {})[0];
  };
  EXPECT_LE(RelativeError(loss, {reference()}), kForwardTolerance);
  tape.Backward(loss);
  EXPECT_LE(RelativeError(tape.Grad(tx), CentralDifferences(x, reference)), kGradientTolerance);
}

}  // namespace
}  // namespace stillhouse::testing
