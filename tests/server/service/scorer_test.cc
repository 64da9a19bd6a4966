// Scoring on a real engine with a tiny model: when it ends early. What the numbers are, tests/e2e/query_test.py
// compares with what sampling reports.
#include "server/service/scorer.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "tests/server/model/loaded_model.h"

namespace stillhouse {
namespace {

class ScorerTest : public ::testing::Test {
 protected:
  ScorerTest() : model_(testing::LoadedModel::Tiny()) {
    EngineOptions options;
    options.page_budget_bytes = 64 * model_.weights->config.kv_bytes_per_slot() * PagePool::kPageSlots;
    engine_ = std::make_unique<Engine>(model_.ctx, model_.weights, options);
    scorer_ = std::make_unique<Scorer>(model_.ctx, engine_.get());
    request_.prompt = model_.tokenizer->Encode("a question");
  }

  testing::LoadedModel model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Scorer> scorer_;
  ScoreRequest request_;
};

TEST_F(ScorerTest, EveryTokenOfTheContinuationIsScored) {
  request_.continuation = model_.tokenizer->Encode("and what was answered");
  const absl::StatusOr<ScoreResult> result = scorer_->Score(request_);
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->tokens.size(), request_.continuation.size());
  for (size_t i = 0; i < result->tokens.size(); ++i) EXPECT_EQ(result->tokens[i].id, request_.continuation[i]);
}

TEST_F(ScorerTest, EndsWhenNobodyWaits) {
  request_.continuation.assign(400, request_.prompt[0]);
  int asked = 0;
  int64_t computed = 0;
  request_.computed = [&computed](int64_t tokens) { computed += tokens; };
  request_.cancelled = [&asked] { return ++asked > 1; };  // between the first chunk and the second
  EXPECT_EQ(scorer_->Score(request_).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(computed, 256);  // the first chunk, and no more
}

TEST_F(ScorerTest, EndsAtTheDeadline) {
  request_.continuation = {request_.prompt[0]};
  request_.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_EQ(scorer_->Score(request_).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ScorerTest, WhatTheContextCannotHoldIsRefused) {
  request_.continuation.assign(static_cast<size_t>(engine_->context_limit()), request_.prompt[0]);
  EXPECT_EQ(scorer_->Score(request_).status().code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace stillhouse
