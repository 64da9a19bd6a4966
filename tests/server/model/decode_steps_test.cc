// Recorded decode steps against the same steps run one launch at a time.
#include "server/model/decode_steps.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "server/load/random_weights.h"
#include "tests/server/model/loaded_model.h"

namespace stillhouse {
namespace {

using testing::LoadedModel;
using testing::TinyModelOptions;

std::vector<int32_t> RandomIds(uint32_t seed, int64_t count, int64_t vocabulary) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng() % static_cast<uint32_t>(vocabulary)));
  return ids;
}

// Sequences on shared and own memories with pages of their own, greedy.
struct Group {
  std::unique_ptr<PagePool> pages;
  std::vector<std::unique_ptr<SequenceState>> states;
  std::vector<int32_t> next;

  Group(const Context& ctx, const Weights& weights, DType dtype, int64_t sequences,
        const std::vector<std::shared_ptr<const Memory>>& memories) {
    pages = std::make_unique<PagePool>(ctx, weights.config, int64_t{1} << 30, dtype);
    for (int64_t s = 0; s < sequences; ++s) {
      // Some have both memories, some one, some none.
      std::vector<std::shared_ptr<const Memory>> own;
      for (size_t m = 0; m < memories.size(); ++m) {
        if ((s + static_cast<int64_t>(m)) % 3 != 0) own.push_back(memories[m]);
      }
      states.push_back(std::make_unique<SequenceState>(own, pages.get()));
      const auto prompt = RandomIds(static_cast<uint32_t>(s), 40 + 13 * s, weights.config.vocabulary);
      const auto last = Prefill(ctx, weights, states.back().get(), prompt);
      STILLHOUSE_CHECK(last.ok()) << last.status().ToString();
      next.push_back(Sample(ctx, Logits(ctx, weights, *last), weights.config.vocabulary, {SampleRow{}})[0].id);
    }
  }

  Batch NextBatch() {
    Batch batch;
    for (size_t s = 0; s < states.size(); ++s) {
      STILLHOUSE_CHECK(states[s]->Reserve(1).ok());
      batch.Add(states[s].get(), {&next[s], 1}, Batch::Outputs::kLast);
    }
    return batch;
  }
};

std::shared_ptr<const Memory> MakeMemory(const Context& ctx, const Weights& weights, uint32_t seed, int64_t tokens) {
  PagePool pages(ctx, weights.config, int64_t{64} << 20);
  SequenceState state({}, &pages);
  STILLHOUSE_CHECK(Prefill(ctx, weights, &state, RandomIds(seed, tokens, weights.config.vocabulary)).ok());
  return state.Freeze(ctx, weights.config);
}

// `same_bits`: the step runs as many rows as Forward does, so with the same kernels; else as near as their arithmetic
// is.
void CheckAgainstForward(const Context& ctx, const std::shared_ptr<const Weights>& weights, DType dtype,
                         int64_t sequences, int steps, bool same_bits = true) {
  const int64_t vocabulary = weights->config.vocabulary;
  const std::vector<std::shared_ptr<const Memory>> memories = {MakeMemory(ctx, *weights, 77, 90),
                                                               MakeMemory(ctx, *weights, 78, 33)};
  Group recorded(ctx, *weights, dtype, sequences, memories), plain(ctx, *weights, dtype, sequences, memories);
  DecodeSteps decode(ctx, weights, vocabulary);
  int64_t others = 0;  // other tokens than Forward's
  const double tolerance = dtype == DType::kBF16 ? 2e-2 : 1e-5;
  for (int step = 0; step < steps; ++step) {
    std::vector<SampleRow> rows(static_cast<size_t>(sequences));
    for (size_t s = 0; s < rows.size(); ++s) {
      rows[s].temperature = s % 2 ? 0.8f : 0.0f;
      rows[s].seed = s;
      rows[s].step = static_cast<uint64_t>(step);
      // Some steps need what recordings leave to the plain sampler.
      if (step % 5 == 4 && s == 0) rows[s].logprobs = 3;
    }
    const bool mass = step % 3 == 1;
    ASSERT_EQ(recorded.next, plain.next) << "step " << step;
    DecodeSteps::Result result;
    ASSERT_TRUE(decode.Run(recorded.NextBatch(), rows, mass, &result));
    ForwardOptions options;
    options.measure_stored_mass = mass;
    const ForwardResult forward = Forward(ctx, *weights, plain.NextBatch(), options);
    const std::vector<SampledToken> tokens = Sample(ctx, Logits(ctx, *weights, forward.hidden), vocabulary, rows);
    ASSERT_EQ(result.tokens.size(), tokens.size());
    ASSERT_EQ(result.stored_mass.size(), forward.stored_mass.size());
    for (size_t s = 0; s < tokens.size(); ++s) {
      if (same_bits) {
        ASSERT_EQ(result.tokens[s].id, tokens[s].id) << "step " << step << ", sequence " << s;
        ASSERT_EQ(result.tokens[s].top, tokens[s].top);
        if (mass) {
          EXPECT_EQ(result.stored_mass[s], forward.stored_mass[s]);
        }
      } else {
        others += result.tokens[s].id != tokens[s].id;
        ASSERT_EQ(result.tokens[s].top.size(), tokens[s].top.size());
        for (size_t i = 0; i < tokens[s].top.size(); ++i) {
          EXPECT_NEAR(result.tokens[s].top[i].second, tokens[s].top[i].second, 10 * tolerance);
        }
        if (mass) {
          EXPECT_NEAR(result.stored_mass[s], forward.stored_mass[s], tolerance);
        }
      }
      recorded.next[s] = plain.next[s] = tokens[s].id;
      ASSERT_EQ(recorded.states[s]->rows(), plain.states[s]->rows());
    }
  }
  EXPECT_LE(static_cast<double>(others), 0.05 * static_cast<double>(sequences * steps));
  EXPECT_EQ(decode.stats().steps, steps);
  EXPECT_LT(decode.stats().recordings, steps);
  EXPECT_EQ(decode.stats().planned_ahead, steps - 1);
  // Other work between two runs does not touch what recordings hold.
  const Tensor noise = ctx.EmptyF32({1 << 20});
  ctx.backend->Zero(noise);
}

bool HasSteps(const Context& ctx) { return ctx.backend->fused().has_steps(); }
bool HasBf16(const Context& ctx) { return ctx.backend->device() == DeviceType::kCuda; }

TEST(DecodeSteps, GiveTheTokensOfForward) {
  for (const char* architecture : {"llama", "qwen3"}) {
    TinyModelOptions options;
    options.architecture = architecture;
    const LoadedModel model = LoadedModel::Tiny(options);
    if (!HasSteps(model.ctx)) GTEST_SKIP() << "a backend without recorded steps";
    for (int64_t sequences : {1, 2, 7, 16, 20}) {
      SCOPED_TRACE(::testing::Message() << architecture << ", " << sequences << " sequences");
      // Twenty are padded; the processor's kernels do not care.
      const bool same_bits = sequences != 20 || model.ctx.backend->device() == DeviceType::kCpu;
      CheckAgainstForward(model.ctx, model.weights, DType::kF32, sequences, 80, same_bits);
      if (HasBf16(model.ctx)) CheckAgainstForward(model.ctx, model.weights, DType::kBF16, sequences, 80, same_bits);
    }
  }
}

TEST(DecodeSteps, GiveTheTokensOfForwardOnALargerShape) {
  const auto backend = testing::MakeTestBackend();
  const Context ctx{backend.get()};
  if (!HasBf16(ctx)) GTEST_SKIP() << "large, and in bf16";
  const auto weights = RandomWeights(ctx, "smollm2-135m");
  ASSERT_TRUE(weights.ok()) << weights.status();
  CheckAgainstForward(ctx, *weights, DType::kBF16, 1, 70);
  CheckAgainstForward(ctx, *weights, DType::kF32, 3, 20);
  CheckAgainstForward(ctx, *weights, DType::kBF16, 24, 20);
  CheckAgainstForward(ctx, *weights, DType::kBF16, 33, 20, /*same_bits=*/false);
}

TEST(DecodeSteps, KeepAtMostTheirLimit) {
  const LoadedModel model = LoadedModel::Tiny();
  if (!HasSteps(model.ctx)) GTEST_SKIP() << "a backend without recorded steps";
  DecodeSteps decode(model.ctx, model.weights, model.weights->config.vocabulary, /*limit=*/2);
  for (int64_t sequences : {1, 2, 3, 1, 2, 3}) {
    Group group(model.ctx, *model.weights, DType::kF32, sequences, {});
    DecodeSteps::Result result;
    ASSERT_TRUE(decode.Run(group.NextBatch(), std::vector<SampleRow>(static_cast<size_t>(sequences)), false, &result));
    EXPECT_EQ(result.tokens.size(), static_cast<size_t>(sequences));
  }
  EXPECT_EQ(decode.stats().recordings, 6);
  EXPECT_EQ(decode.stats().evictions, 4);
}

// Sequences that leave, join, forget rows or change places are planned anew.
TEST(DecodeSteps, PlansAheadAreOfTheSameSequences) {
  const LoadedModel model = LoadedModel::Tiny();
  if (!HasSteps(model.ctx)) GTEST_SKIP() << "a backend without recorded steps";
  const int64_t vocabulary = model.weights->config.vocabulary;
  Group recorded(model.ctx, *model.weights, DType::kF32, 4, {}), plain(model.ctx, *model.weights, DType::kF32, 4, {});
  DecodeSteps decode(model.ctx, model.weights, vocabulary);
  std::mt19937 rng(4);
  for (int step = 0; step < 60; ++step) {
    const int change = static_cast<int>(rng() % 6);
    for (Group* group : {&recorded, &plain}) {
      if (change == 0 && group->states.size() > 1) {
        group->states.pop_back();
        group->next.pop_back();
      } else if (change == 1) {
        group->states.push_back(
            std::make_unique<SequenceState>(std::vector<std::shared_ptr<const Memory>>{}, group->pages.get()));
        group->next.push_back(7);
      } else if (change == 2) {
        // Its last page goes back and another state takes it; then it goes on from there.
        SequenceState& state = *group->states[0];
        state.Truncate(state.rows() / 2);
        auto other = std::make_unique<SequenceState>(std::vector<std::shared_ptr<const Memory>>{}, group->pages.get());
        ASSERT_TRUE(other->Reserve(1).ok());
        ASSERT_TRUE(state.Reserve(1).ok());
      } else if (change == 3) {
        std::swap(group->states.front(), group->states.back());
        std::swap(group->next.front(), group->next.back());
      }
    }
    const std::vector<SampleRow> rows(recorded.states.size());
    DecodeSteps::Result result;
    ASSERT_TRUE(decode.Run(recorded.NextBatch(), rows, false, &result));
    const auto tokens = Sample(
        model.ctx, Logits(model.ctx, *model.weights, Forward(model.ctx, *model.weights, plain.NextBatch()).hidden),
        vocabulary, rows);
    for (size_t s = 0; s < tokens.size(); ++s) {
      ASSERT_EQ(result.tokens[s].id, tokens[s].id) << "step " << step << ", sequence " << s;
      recorded.next[s] = plain.next[s] = tokens[s].id;
    }
  }
  EXPECT_GT(decode.stats().planned_ahead, 5);
  EXPECT_LT(decode.stats().planned_ahead, 50);
}

TEST(DecodeSteps, LeaveEverythingElseToForward) {
  TinyModelOptions biased;
  biased.architecture = "qwen2";
  for (const TinyModelOptions& options : {TinyModelOptions(), biased}) {
    const LoadedModel model = LoadedModel::Tiny(options);
    DecodeSteps decode(model.ctx, model.weights, model.weights->config.vocabulary);
    DecodeSteps::Result result;
    // Two rows of one sequence; and, where there are no recorded steps or projections have biases, any step.
    PagePool pages(model.ctx, model.weights->config, int64_t{1} << 20);
    SequenceState state({}, &pages);
    ASSERT_TRUE(state.Reserve(2).ok());
    Batch batch;
    const std::vector<int32_t> ids = {1, 2};
    batch.Add(&state, ids, Batch::Outputs::kLast);
    EXPECT_FALSE(decode.Run(batch, {SampleRow{}}, false, &result));
    if (HasSteps(model.ctx) && options.architecture != "qwen2") continue;
    Group group(model.ctx, *model.weights, DType::kF32, 2, {});
    EXPECT_FALSE(decode.Run(group.NextBatch(), std::vector<SampleRow>(2), false, &result));
    EXPECT_EQ(decode.stats().recordings, 0);
  }
}

// Logits of a prompt on a memory, and of steps after it.
std::vector<float> LogitsOfSteps(const Context& ctx, const Weights& weights, DType dtype) {
  const auto memory = MakeMemory(ctx, weights, 9, 100);
  PagePool pages(ctx, weights.config, int64_t{64} << 20, dtype);
  SequenceState state({memory}, &pages);
  const auto prompt = RandomIds(10, 70, weights.config.vocabulary), next = RandomIds(11, 6, weights.config.vocabulary);
  std::vector<float> all;
  const auto add = [&](const Tensor& hidden) {
    const std::vector<float> logits = ctx.ToFloats(Logits(ctx, weights, hidden));
    all.insert(all.end(), logits.begin(), logits.end());
  };
  add(*Prefill(ctx, weights, &state, prompt, 32));
  for (int32_t token : next) {
    STILLHOUSE_CHECK(state.Reserve(1).ok());
    Batch batch;
    batch.Add(&state, {&token, 1}, Batch::Outputs::kLast);
    add(Forward(ctx, weights, batch).hidden);
  }
  return all;
}

// The fused path of the GPU against the plain one of the CPU: the same model in fp32; and in bf16, as near as that is.
TEST(DecodeSteps, TheLogitsAreTheCpus) {
  const auto gpu = testing::MakeTestBackend();
  if (gpu->device() == DeviceType::kCpu) GTEST_SKIP() << "the CPU itself";
  const auto cpu = MakeCpuBackend({});
  const Context cpu_ctx{cpu.get()};
  for (const char* shape : {"smollm2-135m"}) {
    const auto on_cpu = RandomWeights(cpu_ctx, shape);
    ASSERT_TRUE(on_cpu.ok()) << on_cpu.status();
    const std::vector<float> expected = LogitsOfSteps(cpu_ctx, **on_cpu, DType::kF32);
    for (CudaStorage storage : {CudaStorage::kF32, CudaStorage::kBf16}) {
      CudaBackendOptions options;
      options.storage = storage;
      const auto backend = MakeCudaBackend(options);
      ASSERT_TRUE(backend.ok()) << backend.status();
      const Context ctx{backend->get()};
      const auto weights = RandomWeights(ctx, shape);
      ASSERT_TRUE(weights.ok()) << weights.status();
      const bool exact = storage == CudaStorage::kF32;
      const std::vector<float> got = LogitsOfSteps(ctx, **weights, exact ? DType::kF32 : DType::kBF16);
      double difference = 0, norm = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        difference += std::pow(double{got[i]} - expected[i], 2);
        norm += std::pow(double{expected[i]}, 2);
      }
      const double error = std::sqrt(difference / norm);
      RecordProperty(exact ? "relative_error_f32" : "relative_error_bf16", std::to_string(error));
      EXPECT_LE(error, exact ? 1e-5 : 2e-2);
    }
  }
}

// A row of NaN is flagged, and the others are drawn.
TEST(DecodeSteps, FlagInvalidRows) {
  LoadedModel model = LoadedModel::Tiny();
  if (!HasSteps(model.ctx)) GTEST_SKIP() << "a backend without recorded steps";
  const Context& ctx = model.ctx;
  auto broken = std::make_shared<Memory>(*MakeMemory(ctx, *model.weights, 5, 20));
  const Tensor& v = broken->layers[0].v;
  std::vector<float> values = ctx.ToFloats(v);
  std::fill(values.begin(), values.end(), std::nanf(""));
  ctx.backend->Upload(values.data(), v);
  PagePool pages(ctx, model.weights->config, int64_t{8} << 20);
  SequenceState bad({broken}, &pages), good({}, &pages);
  Batch batch;
  const int32_t token = 300 % static_cast<int32_t>(model.weights->config.vocabulary);
  for (SequenceState* state : {&bad, &good}) {
    ASSERT_TRUE(state->Reserve(1).ok());
    batch.Add(state, {&token, 1}, Batch::Outputs::kLast);
  }
  DecodeSteps decode(ctx, model.weights, model.weights->config.vocabulary);
  DecodeSteps::Result result;
  ASSERT_TRUE(decode.Run(batch, std::vector<SampleRow>(2), false, &result));
  EXPECT_TRUE(result.tokens[0].invalid);
  EXPECT_EQ(result.tokens[0].id, -1);
  EXPECT_FALSE(result.tokens[1].invalid);
}

}  // namespace
}  // namespace stillhouse
