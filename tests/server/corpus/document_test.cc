#include "server/corpus/document.h"

#include <gtest/gtest.h>

#include "server/corpus/seeds.h"
#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {
namespace {

TEST(PlanWindows, OneWindowWhileItFits) {
  const auto windows = PlanWindows(900, 10, 1024, 114);
  ASSERT_TRUE(windows.ok());
  ASSERT_EQ(windows->size(), 1u);
  EXPECT_EQ((*windows)[0].size(), 900);
}

TEST(PlanWindows, LongerOnesOverlapAreEqualAndCoverAll) {
  for (int64_t tokens : {901, 1000, 1025, 5000, 12345}) {
    const auto windows = PlanWindows(tokens, 10, 1024, 114);
    ASSERT_TRUE(windows.ok());
    ASSERT_GE(windows->size(), 2u);
    EXPECT_EQ(windows->front().begin, 0);
    EXPECT_EQ(windows->back().end, tokens);
    for (size_t i = 0; i < windows->size(); ++i) {
      EXPECT_EQ((*windows)[i].size(), windows->front().size());
      EXPECT_LE((*windows)[i].size() + 10, 512);
      if (i > 0) {
        EXPECT_GT((*windows)[i].begin, (*windows)[i - 1].begin);
        EXPECT_LT((*windows)[i].begin, (*windows)[i - 1].end);
      }
    }
  }
}

TEST(PlanWindows, RefusesAContextWithoutRoom) {
  EXPECT_EQ(PlanWindows(900, 10, 512, 500).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WindowOf, TakesTheLargestOverlap) {
  const std::vector<TokenRange> windows = {{0, 100}, {80, 180}, {160, 260}};
  EXPECT_EQ(WindowOf(windows, {10, 20}), 0);
  EXPECT_EQ(WindowOf(windows, {85, 95}), 0);
  EXPECT_EQ(WindowOf(windows, {90, 120}), 1);
  EXPECT_EQ(WindowOf(windows, {200, 260}), 2);
}

class ChunkTest : public CorpusTest {};

TEST_F(ChunkTest, CoverTheTextWithinBounds) {
  const Tokenizer& tokenizer = *rig_->model.tokenizer;
  for (int words : {1, 3, 50, 400}) {
    const std::vector<int32_t> tokens = tokenizer.Encode(StoryOf(words));
    for (uint64_t seed : {0, 1, 2}) {
      const std::vector<TokenRange> chunks = CutChunks(tokenizer, tokens, 40, 90, seed);
      int64_t at = 0;
      for (const TokenRange& chunk : chunks) {
        EXPECT_EQ(chunk.begin, at);
        EXPECT_GT(chunk.end, chunk.begin);
        EXPECT_LE(chunk.size(), 90 * 5 / 4);
        at = chunk.end;
      }
      EXPECT_EQ(at, static_cast<int64_t>(tokens.size()));
    }
  }
}

TEST_F(ChunkTest, CutsWhereParagraphsEnd) {
  const Tokenizer& tokenizer = *rig_->model.tokenizer;
  const std::vector<int32_t> tokens = tokenizer.Encode(StoryOf(400));
  const std::vector<TokenRange> chunks = CutChunks(tokenizer, tokens, 100, 200, 7);
  ASSERT_GE(chunks.size(), 4u);
  int good = 0;
  for (size_t i = 0; i + 1 < chunks.size(); ++i) {
    const std::string before = tokenizer.Decode(absl::MakeConstSpan(tokens).subspan(
        static_cast<size_t>(chunks[i].begin), static_cast<size_t>(chunks[i].size())));
    good += before.ends_with("\n\n") || before.ends_with(".") ? 1 : 0;
  }
  EXPECT_GE(good, static_cast<int>(chunks.size()) - 2);
}

TEST_F(ChunkTest, SeedsDiffer) {
  const std::vector<int32_t> tokens = rig_->model.tokenizer->Encode(StoryOf(400));
  auto ends = [&](uint64_t seed) {
    std::vector<int64_t> out;
    for (const TokenRange& c : CutChunks(*rig_->model.tokenizer, tokens, 40, 90, seed)) out.push_back(c.end);
    return out;
  };
  EXPECT_EQ(ends(5), ends(5));
  EXPECT_NE(ends(5), ends(6));
}

TEST_F(ChunkTest, TheFrameIsTheTemplates) {
  const Document document = TokeniseDocument(*rig_->model.tokenizer, *rig_->model.chat, "the mill");
  std::vector<int32_t> expected = rig_->model.chat->Opening();
  for (int32_t id : rig_->model.chat->EncodeSystem("the mill")) expected.push_back(id);
  EXPECT_EQ(document.Framed({0, static_cast<int64_t>(document.tokens.size())}), expected);
  EXPECT_TRUE(document.valid_utf8);
  EXPECT_FALSE(TokeniseDocument(*rig_->model.tokenizer, *rig_->model.chat, "\xff\xfe mill").valid_utf8);
}

TEST(Seeds, EveryKindHasLeadsOfItsOwn) {
  std::set<std::string_view> leads;
  for (SeedKind kind : {SeedKind::kStructuring, SeedKind::kSummarisation, SeedKind::kQuestion, SeedKind::kUseCase,
                        SeedKind::kCreative}) {
    std::set<std::string_view> own;
    for (uint64_t draw = 0; draw < 500; ++draw) {
      const Seed seed = DrawSeed({kind}, draw);
      EXPECT_EQ(seed.kind, kind);
      own.insert(seed.lead);
    }
    EXPECT_GE(own.size(), 8u);
    leads.insert(own.begin(), own.end());
  }
  EXPECT_GE(leads.size(), 40u);
  EXPECT_FALSE(DrawSeed({SeedKind::kSummarisation}, 0).lead.empty());
}

TEST(Seeds, DrawsAreUniformOverTheGivenKinds) {
  int questions = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    const Seed seed =
        DrawSeed({SeedKind::kQuestion, SeedKind::kQuestion, SeedKind::kQuestion, SeedKind::kCreative}, MixDraw(9, i));
    questions += seed.kind == SeedKind::kQuestion ? 1 : 0;
  }
  EXPECT_NEAR(questions, 3000, 150);
}

}  // namespace
}  // namespace stillhouse
