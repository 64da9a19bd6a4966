#include "server/corpus/build_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

namespace stillhouse {
namespace {

using testing::HasSubstr;

BuildSpec Valid(BuildMethod method = BuildMethod::kCartridge, BuildProfile profile = BuildProfile::kQuick) {
  BuildSpec spec = DefaultBuildSpec(method, profile);
  spec.tenant = "acme";
  spec.corpus_id = "handbook";
  spec.cache_id = "quick";
  return spec;
}

TEST(BuildSpec, DefaultsAreValid) {
  for (BuildMethod method : {BuildMethod::kCartridge, BuildMethod::kAttentionMatching, BuildMethod::kFull}) {
    for (BuildProfile profile : {BuildProfile::kQuick, BuildProfile::kStandard, BuildProfile::kThorough}) {
      const absl::Status status = ValidateBuildSpec(Valid(method, profile));
      EXPECT_TRUE(status.ok()) << BuildMethodName(method) << ": " << status;
    }
  }
}

TEST(BuildSpec, ProfilesKeepTheirBudgets) {
  const BuildSpec quick = Valid(), standard = Valid(BuildMethod::kCartridge, BuildProfile::kStandard);
  EXPECT_LE(quick.self_study.conversations, 150);
  EXPECT_LE(quick.training.max_training_tokens, 30000);
  EXPECT_LE(standard.training.max_training_tokens, 60000);
  EXPECT_DOUBLE_EQ(quick.compression_ratio, 10.0);
}

TEST(BuildSpec, SurvivesJson) {
  BuildSpec spec = Valid(BuildMethod::kCartridge, BuildProfile::kThorough);
  spec.display_name = "Ein \"Name\" mit ümlaut\n";
  spec.slots = 77;
  spec.compression_ratio = 0.0;
  spec.replace = true;
  spec.expected_etag = "e1";
  spec.seed = std::numeric_limits<uint64_t>::max();
  spec.self_study.seed_kinds = {SeedKind::kCreative, SeedKind::kUseCase};
  spec.self_study.questions = {"One?", "Two?"};
  spec.training.start = StartMethod::kPrefix;
  spec.training.loss = LossKind::kTail;
  spec.training.learning_rate = 0.1;
  spec.training.train_beta = true;
  spec.matching.fit_beta = false;
  spec.evaluation.questions = {"Three?"};
  spec.evaluation.answers = {"Four."};
  spec.evaluation.skip = true;
  const std::string json = BuildSpecToJson(spec);
  const absl::StatusOr<BuildSpec> back = BuildSpecFromJson(json);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(BuildSpecToJson(*back), json);
  EXPECT_EQ(back->seed, spec.seed);
  EXPECT_EQ(back->display_name, spec.display_name);
  EXPECT_EQ(back->self_study.seed_kinds, spec.self_study.seed_kinds);
  EXPECT_EQ(back->training.learning_rate, 0.1);
  EXPECT_EQ(back->training.loss, LossKind::kTail);
}

TEST(BuildSpec, RefusesForeignJson) {
  const std::string json = BuildSpecToJson(Valid());
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"seed\":0", "\"seed\":-1"},
           {"\"seed\":0", "\"seed\":0.5"},
           {"\"seed\":0", "\"seed\":\"0\""},
           {"\"seed\":0", "\"seed\":0,\"colour\":1"},
           {"\"seed\":0,", ""},
           {"\"method\":\"CARTRIDGE\"", "\"method\":\"PICKLE\""},
           {"\"steps\":90", "\"steps\":1e400"},
           {"\"steps\":90", "\"steps\":90,\"steps\":91"},
           {"\"self_study\":{", "\"self_studies\":{"},
       }) {
    std::string broken = json;
    const size_t at = broken.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    broken.replace(at, from.size(), to);
    EXPECT_EQ(BuildSpecFromJson(broken).status().code(), absl::StatusCode::kInvalidArgument) << to;
  }
  for (const char* text : {"", "null", "[]", "{", "{}", "3"}) EXPECT_FALSE(BuildSpecFromJson(text).ok()) << text;
}

TEST(BuildSpec, NamesTheFieldThatIsWrong) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    const char* field;
    std::function<void(BuildSpec&)> change;
  };
  const Case cases[] = {
      {"tenant", [](BuildSpec& s) { s.tenant = "Acme"; }},
      {"corpus_id", [](BuildSpec& s) { s.corpus_id = ""; }},
      {"cache_id", [](BuildSpec& s) { s.cache_id = "a/b"; }},
      {"slots", [](BuildSpec& s) { s.slots = 5; }},
      {"slots", [](BuildSpec& s) { s.compression_ratio = 0.0; }},
      {"slots", [](BuildSpec& s) { s.compression_ratio = 0.0, s.slots = -1; }},
      {"compression_ratio", [](BuildSpec& s) { s.compression_ratio = 0.5; }},
      {"compression_ratio", [&](BuildSpec& s) { s.compression_ratio = nan; }},
      {"expected_etag", [](BuildSpec& s) { s.expected_etag = "x"; }},
      {"self_study.conversations", [](BuildSpec& s) { s.self_study.conversations = 0; }},
      {"self_study.max_question_tokens", [](BuildSpec& s) { s.self_study.max_question_tokens = 2049; }},
      {"self_study.max_answer_tokens", [](BuildSpec& s) { s.self_study.max_answer_tokens = 0; }},
      {"self_study.temperature", [&](BuildSpec& s) { s.self_study.temperature = nan; }},
      {"self_study.seed_kinds", [](BuildSpec& s) { s.self_study.seed_kinds.clear(); }},
      {"self_study.max_chunk_tokens", [](BuildSpec& s) { s.self_study.max_chunk_tokens = 5; }},
      {"self_study.top_logprobs", [](BuildSpec& s) { s.self_study.top_logprobs = 21; }},
      {"self_study.questions[1]",
       [](BuildSpec& s) {
         s.self_study.questions = {"a", ""};
       }},
      {"self_study.questions[0]", [](BuildSpec& s) { s.self_study.questions = {std::string(4097, 'x')}; }},
      {"training.learning_rate", [](BuildSpec& s) { s.training.learning_rate = 0.0; }},
      {"training.learning_rate", [&](BuildSpec& s) { s.training.learning_rate = nan; }},
      {"training.warmup_fraction", [](BuildSpec& s) { s.training.warmup_fraction = 1.0; }},
      {"training.rows_per_step", [](BuildSpec& s) { s.training.rows_per_step = 257; }},
      {"training.steps", [](BuildSpec& s) { s.training.steps = 0; }},
      {"training.max_training_tokens", [](BuildSpec& s) { s.training.max_training_tokens = 0; }},
      {"training.frozen_slots", [](BuildSpec& s) { s.training.frozen_slots = 0; }},
      {"training.frozen_slots",
       [](BuildSpec& s) { s.compression_ratio = 0.0, s.slots = 4, s.training.frozen_slots = 4; }},
      {"training.clip_norm", [](BuildSpec& s) { s.training.clip_norm = -1.0; }},
      {"training.validation_fraction", [](BuildSpec& s) { s.training.validation_fraction = 0.6; }},
      {"training.evaluate_every", [](BuildSpec& s) { s.training.evaluate_every = 0; }},
      {"training.weight_decay", [&](BuildSpec& s) { s.training.weight_decay = nan; }},
      {"training.beta2", [](BuildSpec& s) { s.training.beta2 = 1.0; }},
      {"attention_matching.queries", [](BuildSpec& s) { s.matching.queries = 15; }},
      {"attention_matching.ridge", [](BuildSpec& s) { s.matching.ridge = 0.0; }},
      {"evaluation.answers",
       [](BuildSpec& s) {
         s.evaluation.questions = {"a"}, s.evaluation.answers = {"b", "c"};
       }},
      {"evaluation.max_answer_tokens", [](BuildSpec& s) { s.evaluation.max_answer_tokens = 1025; }},
  };
  for (const Case& c : cases) {
    BuildSpec spec = Valid();
    c.change(spec);
    const absl::Status status = ValidateBuildSpec(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

}  // namespace
}  // namespace stillhouse
