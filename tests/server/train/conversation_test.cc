#include "server/train/conversation.h"

#include <gtest/gtest.h>

#include "server/train/distill_batch.h"

namespace stillhouse {
namespace {

Conversation Sample() {
  Conversation c;
  c.window = 3;
  c.prompt = {5, 6, 7};
  c.answer = {8, 2};
  c.answer_teacher = {2, {8, 9, 2, -1}, {-0.1f, -2.5f, -0.01f, 0.0f}};
  return c;
}

TEST(Conversation, SurvivesItsBytes) {
  ByteWriter out;
  AppendConversation(Sample(), &out);
  AppendConversation(Sample(), &out);
  ByteReader in(out.bytes());
  for (int i = 0; i < 2; ++i) {
    Conversation c;
    ASSERT_TRUE(ReadConversation(&in, &c).ok());
    EXPECT_EQ(c.window, 3);
    EXPECT_EQ(c.prompt, Sample().prompt);
    EXPECT_EQ(c.answer, Sample().answer);
    EXPECT_EQ(c.answer_teacher.ids, Sample().answer_teacher.ids);
    EXPECT_EQ(c.answer_teacher.logprobs, Sample().answer_teacher.logprobs);
    EXPECT_EQ(c.prompt_teacher.width, 0);
  }
  EXPECT_TRUE(in.empty());
}

TEST(Conversation, RefusesCutAndForeignBytes) {
  ByteWriter out;
  AppendConversation(Sample(), &out);
  const std::string bytes = out.bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    ByteReader in(std::string_view(bytes).substr(0, size));
    Conversation c;
    EXPECT_EQ(ReadConversation(&in, &c).code(), absl::StatusCode::kDataLoss) << size;
  }
  std::string huge = bytes;
  huge[15] = '\x7f';  // the prompt's length
  ByteReader in(huge);
  Conversation c;
  EXPECT_FALSE(ReadConversation(&in, &c).ok());
}

TEST(DistillBatch, OutputsAreTheRowsThatPredictAnswers) {
  const Conversation a = Sample();
  Conversation b = Sample();
  b.prompt = {4};
  const DistillBatch batch = MakeDistillBatch({&a, &b}, nullptr);
  EXPECT_EQ(batch.batch.tokens, (std::vector<int32_t>{5, 6, 7, 8, 4, 8}));
  EXPECT_EQ(batch.batch.positions, (std::vector<int32_t>{0, 1, 2, 3, 0, 1}));
  EXPECT_EQ(batch.batch.output_rows, (std::vector<int32_t>{2, 3, 4, 5}));
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{8, 2, 8, 2}));
  EXPECT_EQ(batch.sequence_of, (std::vector<int32_t>{0, 0, 1, 1}));
  EXPECT_EQ(batch.width, 2);
  EXPECT_EQ(batch.ids, (std::vector<int32_t>{8, 9, 2, -1, 8, 9, 2, -1}));
}

TEST(DistillBatch, QuestionsToo) {
  Conversation a = Sample();
  a.prompt_teacher = {1, {6, 1}, {-0.5f, -0.7f}};
  const DistillBatch batch = MakeDistillBatch({&a}, nullptr, Supervise::kAnswerAndQuestion);
  EXPECT_EQ(batch.batch.output_rows, (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{6, 7, 8, 2}));
  EXPECT_EQ(batch.ids, (std::vector<int32_t>{6, -1, 1, -1, 8, 9, 2, -1}));
}

TEST(DistillBatch, GroupsByRows) {
  const Conversation a = Sample();  // 4 rows
  const auto groups = GroupByRows({&a, &a, &a, &a, &a}, 9);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].size(), 2u);
  EXPECT_EQ(groups[2].size(), 1u);
  EXPECT_EQ(GroupByRows({&a, &a}, 1).size(), 2u);
  EXPECT_TRUE(GroupByRows({}, 8).empty());
}

}  // namespace
}  // namespace stillhouse
