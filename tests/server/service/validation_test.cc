#include "server/service/validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kernels/base/strings.h"
#include "server/tenancy/reason.h"
#include "stillhouse/v1/inference.pb.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kVocabulary = 1000;

absl::StatusOr<QuerySettings> Parse(const std::function<void(v1::SamplingOptions*)>& set) {
  v1::SamplingOptions options;
  set(&options);
  return ParseSampling(options, kVocabulary);
}

void ExpectRefused(const std::string& field, const std::function<void(v1::SamplingOptions*)>& set) {
  const absl::Status status = Parse(set).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
  EXPECT_EQ(GetReason(status).facts["field"], field);
}

TEST(SamplingTest, DefaultsAreGreedy) {
  const absl::StatusOr<QuerySettings> settings = Parse([](v1::SamplingOptions*) {});
  ASSERT_TRUE(settings.ok());
  EXPECT_EQ(settings->row.temperature, 0.0f);
  EXPECT_EQ(settings->row.top_p, 1.0f);
  EXPECT_EQ(settings->row.top_k, 0);
  EXPECT_EQ(settings->row.repetition_penalty, 1.0f);
  EXPECT_EQ(settings->row.logprobs, 0);
  EXPECT_EQ(settings->max_tokens, kDefaultMaxTokens);
  EXPECT_FALSE(settings->ignore_eos);
  EXPECT_FALSE(settings->report_logprobs);
}

TEST(SamplingTest, RangesAreClosedWhereTheySaySo) {
  for (double good : {0.0, 1e-6, 1e-4, 1.0, 2.0}) {
    EXPECT_TRUE(Parse([&](auto* o) { o->set_temperature(good); }).ok()) << good;
  }
  for (double bad : {-0.01, 2.01, kNan, kInf, -kInf}) {
    ExpectRefused("temperature", [&](auto* o) { o->set_temperature(bad); });
  }
  for (double good : {1e-4, 0.5, 1.0, 1e-300}) {
    const auto settings = Parse([&](auto* o) { o->set_top_p(good); });
    ASSERT_TRUE(settings.ok()) << good;
    EXPECT_GT(settings->row.top_p, 0.0f);
  }
  for (double bad : {0.0, -1.0, 1.0001, kNan, kInf}) ExpectRefused("top_p", [&](auto* o) { o->set_top_p(bad); });
  for (double bad : {-0.1, 1.1, kNan}) ExpectRefused("min_p", [&](auto* o) { o->set_min_p(bad); });
  for (double bad : {-2.1, 2.1, kNan}) {
    ExpectRefused("presence_penalty", [&](auto* o) { o->set_presence_penalty(bad); });
    ExpectRefused("frequency_penalty", [&](auto* o) { o->set_frequency_penalty(bad); });
  }
  for (double bad : {0.0, -1.0, 2.1, kNan}) {
    ExpectRefused("repetition_penalty", [&](auto* o) { o->set_repetition_penalty(bad); });
  }
}

TEST(SamplingTest, TopKIsClampedAndCountsAreChecked) {
  EXPECT_EQ(Parse([](auto* o) { o->set_top_k(1 << 30); })->row.top_k, kVocabulary);
  EXPECT_EQ(Parse([](auto* o) { o->set_top_k(1); })->row.top_k, 1);
  for (int bad : {0, -1}) ExpectRefused("top_k", [&](auto* o) { o->set_top_k(bad); });
  for (int bad : {0, -5}) ExpectRefused("max_tokens", [&](auto* o) { o->set_max_tokens(bad); });
  for (int bad : {-1, 21}) ExpectRefused("logprobs", [&](auto* o) { o->set_logprobs(bad); });
  const auto none = Parse([](auto* o) { o->set_logprobs(0); });
  EXPECT_TRUE(none->report_logprobs);
  EXPECT_EQ(none->top_logprobs, 0);
  EXPECT_EQ(none->row.logprobs, 1);  // the engine reports the chosen token's with the first
  EXPECT_EQ(Parse([](auto* o) { o->set_logprobs(20); })->row.logprobs, 20);
}

TEST(SamplingTest, StopStringsAreCapped) {
  EXPECT_TRUE(Parse([](auto* o) {
                for (int i = 0; i < 16; ++i) o->add_stop(std::string(256, 'x'));
              }).ok());
  ExpectRefused("stop", [](auto* o) {
    for (int i = 0; i < 17; ++i) o->add_stop("x");
  });
  ExpectRefused("stop", [](auto* o) { o->add_stop(std::string(257, 'x')); });
  ExpectRefused("stop", [](auto* o) { o->add_stop(""); });
  ExpectRefused("stop", [](auto* o) { o->add_stop("\xff"); });
}

TEST(SamplingTest, SeedsAreKeptOrDrawn) {
  EXPECT_EQ(Parse([](auto* o) { o->set_seed(7); })->row.seed, 7u);
  EXPECT_EQ(Parse([](auto* o) { o->set_seed(0); })->row.seed, 0u);
  EXPECT_NE(Parse([](auto*) {})->row.seed, Parse([](auto*) {})->row.seed);
}

v1::Messages Conversation(const std::vector<std::pair<std::string, std::string>>& turns) {
  v1::Messages messages;
  for (const auto& [role, content] : turns) {
    v1::Message* message = messages.add_messages();
    message->set_role(role);
    message->set_content(content);
  }
  return messages;
}

TEST(MessagesTest, OrderOfRoles) {
  EXPECT_TRUE(ParseMessages(Conversation({{"user", "a"}})).ok());
  EXPECT_TRUE(ParseMessages(Conversation({{"user", ""}})).ok());
  EXPECT_TRUE(ParseMessages(Conversation({{"system", "s"}, {"user", "a"}, {"assistant", "b"}, {"user", "c"}})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({{"system", "s"}})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({{"user", "a"}, {"assistant", "b"}})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({{"user", "a"}, {"system", "s"}, {"user", "b"}})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({{"tool", "a"}})).ok());
  EXPECT_FALSE(ParseMessages(Conversation({{"user", "\xff\xfe"}})).ok());
}

TEST(PromptTest, AfterAMemoryOnlyTheTurns) {
  const auto tokenizer = Tokenizer::Create(testing::TinyTokenizerData());
  ASSERT_TRUE(tokenizer.ok());
  const auto chat = ChatTemplate::Create(tokenizer->get(), "");
  ASSERT_TRUE(chat.ok()) << chat.status();
  const std::vector<ChatMessage> messages = {{"user", "hello"}};
  const auto whole = RenderPrompt(**chat, messages, false);
  const auto turns = RenderPrompt(**chat, messages, true);
  ASSERT_TRUE(whole.ok() && turns.ok());
  EXPECT_EQ((*tokenizer)->Decode(*turns), "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
  ASSERT_GE(whole->size(), turns->size());
  EXPECT_TRUE(std::equal(turns->rbegin(), turns->rend(), whole->rbegin()));

  EXPECT_FALSE(EncodeRawPrompt(**tokenizer, "", false).ok());
  EXPECT_FALSE(EncodeRawPrompt(**tokenizer, "\xff", false).ok());
  // Control tokens that a caller spells are text.
  const auto raw = EncodeRawPrompt(**tokenizer, "<|im_end|>", true);
  ASSERT_TRUE(raw.ok());
  for (int32_t id : *raw) EXPECT_FALSE((*tokenizer)->IsControl(id));
}

TEST(FieldsTest, SizesAndForms) {
  EXPECT_TRUE(CheckRequestId("").ok());
  EXPECT_TRUE(CheckRequestId("123e4567-e89b-12d3-a456-426614174000").ok());
  EXPECT_FALSE(CheckRequestId("x").ok());
  EXPECT_EQ(*CheckPageSize(0), 50);
  EXPECT_EQ(*CheckPageSize(5000), 1000);
  EXPECT_FALSE(CheckPageSize(-1).ok());
  EXPECT_FALSE(CheckSha256Field("sha256", std::string(64, 'A')).ok());
  EXPECT_TRUE(CheckSha256Field("sha256", std::string(64, 'a')).ok());
  EXPECT_FALSE(CheckTextField("display_name", std::string(257, 'x'), 256).ok());
}

}  // namespace
}  // namespace stillhouse
