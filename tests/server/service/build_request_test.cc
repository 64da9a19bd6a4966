#include "server/service/build_request.h"

#include <gtest/gtest.h>

#include <functional>

#include <limits>

#include "server/tenancy/reason.h"
#include "stillhouse/v1/caches.pb.h"

namespace stillhouse {
namespace {

absl::StatusOr<BuildSpec> Parse(const v1::BuildCacheRequest& request) {
  return ParseBuildRequest(request, "acme", "book", "quick");
}

TEST(BuildRequestTest, AnEmptyRequestIsTheQuickCartridge) {
  const absl::StatusOr<BuildSpec> spec = Parse({});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tenant, "acme");
  EXPECT_EQ(spec->corpus_id, "book");
  EXPECT_EQ(spec->cache_id, "quick");
  EXPECT_EQ(spec->method, BuildMethod::kCartridge);
  EXPECT_EQ(spec->profile, BuildProfile::kQuick);
  EXPECT_EQ(BuildSpecToJson(*spec).empty(), false);
}

TEST(BuildRequestTest, EveryFieldOfTheRequestWins) {
  v1::BuildCacheRequest request;
  request.set_profile(v1::STANDARD);
  request.set_slots(77);
  request.set_seed(5);
  request.set_replace(true);
  request.set_etag("e1");
  v1::SelfStudyOptions* study = request.mutable_self_study();
  study->set_conversations(11);
  study->set_temperature(0.0);
  study->add_seed_kinds(v1::USE_CASE);
  study->add_questions("What?");
  v1::TrainingOptions* training = request.mutable_training();
  training->set_start(v1::PREFIX_START);
  training->set_learning_rate(0.005);
  training->set_steps(9);
  training->set_frozen_slots(2);
  training->set_train_beta(true);
  training->set_loss_mode(v1::TAIL);
  training->set_early_stop_patience(0);
  training->set_adam_beta2(0.95);
  request.mutable_attention_matching()->set_queries(64);
  request.mutable_attention_matching()->set_fit_beta(false);
  request.mutable_evaluation()->add_questions("Who?");
  request.mutable_evaluation()->add_answers("He.");
  const absl::StatusOr<BuildSpec> spec = Parse(request);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->profile, BuildProfile::kStandard);
  EXPECT_EQ(spec->slots, 77);
  EXPECT_EQ(spec->compression_ratio, 0.0);
  EXPECT_EQ(spec->seed, 5u);
  EXPECT_TRUE(spec->replace);
  EXPECT_EQ(spec->expected_etag, "e1");
  EXPECT_EQ(spec->self_study.conversations, 11);
  EXPECT_EQ(spec->self_study.temperature, 0.0);
  EXPECT_EQ(spec->self_study.seed_kinds, std::vector<SeedKind>{SeedKind::kUseCase});
  EXPECT_EQ(spec->self_study.questions, std::vector<std::string>{"What?"});
  EXPECT_EQ(spec->training.start, StartMethod::kPrefix);
  EXPECT_EQ(spec->training.learning_rate, 0.005);
  EXPECT_EQ(spec->training.steps, 9);
  EXPECT_EQ(spec->training.frozen_slots, 2);
  EXPECT_TRUE(spec->training.train_beta);
  EXPECT_EQ(spec->training.loss, LossKind::kTail);
  EXPECT_EQ(spec->training.early_stop_patience, 0);
  EXPECT_EQ(spec->training.beta2, 0.95);
  EXPECT_EQ(spec->matching.queries, 64);
  EXPECT_FALSE(spec->matching.fit_beta);
  EXPECT_EQ(spec->evaluation.answers, std::vector<std::string>{"He."});
}

TEST(BuildRequestTest, MethodsThatCannotBeBuiltSaySo) {
  for (v1::Method method : {v1::STILL, v1::SINK_WINDOW, v1::L2, v1::SNAPKV, v1::H2O}) {
    v1::BuildCacheRequest request;
    request.set_method(method);
    const absl::Status status = Parse(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_EQ(GetReason(status).reason, "METHOD_NOT_SUPPORTED");
  }
}

TEST(BuildRequestTest, NonsenseIsRefused) {
  const auto refused = [](const std::function<void(v1::BuildCacheRequest*)>& set) {
    v1::BuildCacheRequest request;
    set(&request);
    return Parse(request).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](auto* r) { r->set_slots(0); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_slots(-1); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_compression_ratio(0.5); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_compression_ratio(std::numeric_limits<double>::quiet_NaN()); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_compression_ratio(std::numeric_limits<double>::infinity()); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_profile(static_cast<v1::Profile>(99)); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_method(static_cast<v1::Method>(99)); }));
  EXPECT_TRUE(refused([](auto* r) { r->set_etag("x"); }));
  EXPECT_TRUE(refused([](auto* r) { r->mutable_self_study()->add_seed_kinds(static_cast<v1::SeedKind>(9)); }));
  EXPECT_TRUE(refused([](auto* r) {
    for (int i = 0; i < 1001; ++i) r->mutable_self_study()->add_seed_kinds(v1::QUESTION);
  }));
  EXPECT_TRUE(refused([](auto* r) { r->mutable_evaluation()->add_questions(""); }));
  EXPECT_TRUE(refused([](auto* r) { r->mutable_evaluation()->add_questions(std::string(4097, 'x')); }));
  EXPECT_TRUE(refused([](auto* r) {
    r->mutable_evaluation()->add_questions("a");
    r->mutable_evaluation()->add_questions("b");
    r->mutable_evaluation()->add_answers("a");
  }));
  EXPECT_TRUE(
      refused([](auto* r) { r->mutable_training()->set_learning_rate(std::numeric_limits<double>::quiet_NaN()); }));
  EXPECT_TRUE(refused([](auto* r) { r->mutable_training()->set_steps(0); }));
}

}  // namespace
}  // namespace stillhouse
