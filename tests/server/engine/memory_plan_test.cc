#include "server/engine/memory_plan.h"

#include <gmock/gmock.h>

#include "server/load/random_weights.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

ModelConfig Shape(const char* name) {
  const absl::StatusOr<ModelConfig> config = RandomWeightConfig(name);
  STILLHOUSE_CHECK(config.ok());
  return *config;
}

MemoryRequest RequestFor(const ModelConfig& config, int64_t device, int64_t element_bytes) {
  MemoryRequest request;
  request.device = device;
  request.weights = WeightBytes(config, element_bytes);
  request.page_bytes = config.kv_bytes_per_slot(element_bytes) * 64;
  request.prefill_rows = 8192;
  request.output_rows = 256;
  return request;
}

int64_t Sum(const MemoryPlan& p) { return p.weights + p.work + p.builds + p.sequences + p.memories; }

TEST(MemoryPlan, WeightsAreThoseOfTheShapes) {
  // Parameters as published.
  EXPECT_EQ(WeightBytes(Shape("smollm2-135m"), 1) - 3 * 576 * 61, 134515008);
  EXPECT_NEAR(static_cast<double>(WeightBytes(Shape("llama-3.1-8b"), 2)), 2 * 8.03e9, 2e7);
  EXPECT_NEAR(static_cast<double>(WeightBytes(Shape("qwen3-4b"), 2)), 2 * 4.02e9, 2e7);
}

TEST(MemoryPlan, TheWholeIsSharedOutOnce) {
  for (const char* name : {"smollm2-135m", "llama-3.1-8b", "qwen3-4b"}) {
    const ModelConfig config = Shape(name);
    for (int64_t device : {40 * kGiB, 80 * kGiB, 126 * kGiB}) {
      const absl::StatusOr<MemoryPlan> plan = PlanMemory(config, RequestFor(config, device, 2));
      ASSERT_TRUE(plan.ok()) << name << " " << device << ": " << plan.status();
      EXPECT_EQ(Sum(*plan), device);
      EXPECT_GT(plan->work, 0);
      EXPECT_GT(plan->builds, 0);
      EXPECT_GT(plan->memories, plan->sequences);
      EXPECT_GT(plan->sequences, kGiB);
    }
  }
}

TEST(MemoryPlan, FlagsAreTakenAsGiven) {
  const ModelConfig config = Shape("smollm2-135m");
  MemoryRequest request = RequestFor(config, 20 * kGiB, 4);
  request.sequences = 3 * kGiB;
  absl::StatusOr<MemoryPlan> plan = PlanMemory(config, request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->sequences, 3 * kGiB);
  EXPECT_EQ(Sum(*plan), 20 * kGiB);
  request.memories = 5 * kGiB;
  plan = PlanMemory(config, request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->sequences, 3 * kGiB);
  EXPECT_EQ(plan->memories, 5 * kGiB);
  EXPECT_LE(Sum(*plan), 20 * kGiB);
  request.sequences.reset();
  plan = PlanMemory(config, request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->memories, 5 * kGiB);
  EXPECT_EQ(Sum(*plan), 20 * kGiB);
}

TEST(MemoryPlan, WhatDoesNotFitIsRefusedWithTheBytesThatWould) {
  const ModelConfig config = Shape("llama-3.1-8b");
  MemoryRequest request = RequestFor(config, 16 * kGiB, 2);
  const absl::Status status = PlanMemory(config, request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("weights, 15.0 GiB"));
  const std::string before = "give --device-memory at least ";
  ASSERT_THAT(message, HasSubstr(before));
  request.device = std::stoll(message.substr(message.find(before) + before.size()));
  EXPECT_TRUE(PlanMemory(config, request).ok());
  EXPECT_EQ(Sum(*PlanMemory(config, request)), request.device);
  --request.device;
  EXPECT_FALSE(PlanMemory(config, request).ok());
  // Flags that ask for too much are named.
  request.device = 80 * kGiB;
  request.memories = 70 * kGiB;
  EXPECT_THAT(std::string(PlanMemory(config, request).status().message()), HasSubstr("--resident-memory of 70.0 GiB"));
}

TEST(MemoryPlan, BuildsStayWithinTheirPart) {
  const ModelConfig large = Shape("llama-3.1-8b"), small = Shape("smollm2-135m");
  const BuildLimits plenty = LimitsOfBuilds(small, 100 * kGiB);
  EXPECT_EQ(plenty.teacher_bytes, BuildLimits().teacher_bytes);
  EXPECT_EQ(plenty.checkpoint_rows, BuildLimits().checkpoint_rows);
  EXPECT_EQ(plenty.task_rows, 16384);
  const BuildLimits tight = LimitsOfBuilds(large, 8 * kGiB);
  EXPECT_EQ(tight.teacher_bytes, 2 * kGiB);
  EXPECT_LT(tight.task_rows, 16384);
  EXPECT_GE(tight.task_rows, 256);
  EXPECT_LT(tight.checkpoint_rows, 2048);
  // A memory that is trained takes its room from the rows.
  EXPECT_EQ(tight.trained_bytes, 4 * kGiB);
  const BuildLimits trains = LimitsOfBuilds(large, 8 * kGiB, 2 * kGiB);
  EXPECT_LT(trains.task_rows, tight.task_rows);
  EXPECT_GT(trains.task_rows, 256);
  EXPECT_LT(trains.checkpoint_rows, tight.checkpoint_rows);
}

TEST(MemoryPlan, BytesAreWrittenForPeople) {
  EXPECT_EQ(BytesForPeople(3435973836), "3.2 GiB (3435973836 bytes)");
  EXPECT_EQ(BytesForPeople(1 << 20), "0.001 GiB (1048576 bytes)");
}

}  // namespace
}  // namespace stillhouse
