#include "kernels/plan/plan_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "kernels/plan/plans_in_use.h"
#include "kernels/plan/tune.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;

constexpr char kLine[] =
    "decompose_k gpu=\"NVIDIA H200\" dtype=bf16 m=2-8 n=256 k=7168 layout=b-rows epilogue=element way=slices "
    "tile=16x32 "
    "splits=16 us=2.41\n";
const DecomposeKKey kKey{"NVIDIA H200", PlanDType::kBf16,   RowBucket::k2,         256,
                         7168,          PlanLayout::kBRows, PlanEpilogue::kElement};
const DecomposeKPlan kPlan{DecomposeKWay::kSlices, 16, 32, 16};

std::string File(const std::string& lines) { return "stillhouse-plans 1\n" + lines; }

// kLine with one piece of it replaced.
std::string With(const std::string& piece, const std::string& by) {
  std::string line = kLine;
  const size_t at = line.find(piece);
  EXPECT_NE(at, std::string::npos) << piece;
  return File(line.replace(at, piece.size(), by));
}

void ExpectRefused(const std::string& text, const std::string& why) {
  const auto book = PlanBook::Parse(text);
  ASSERT_FALSE(book.ok()) << text.substr(0, 200);
  EXPECT_EQ(book.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(book.status().message()), HasSubstr(why));
}

TEST(PlanBook, ReadsWhatItPrints) {
  PlanBook book;
  book.Add(kKey, {kPlan, 2.41});
  DecomposeKKey other = kKey;
  other.m = RowBucket::k513;
  other.layout = PlanLayout::kBColumns;
  other.epilogue = PlanEpilogue::kRow;
  other.dtype = PlanDType::kF32;
  book.Add(other, {{DecomposeKWay::kFragments, 64, 32, 3}, 0.0});
  const auto again = PlanBook::Parse(book.Print());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->Print(), book.Print());
  EXPECT_EQ(again->Find(kKey), kPlan);
  // Every way and every epilogue has a name.
  for (const DecomposeKWay way :
       {DecomposeKWay::kSlices, DecomposeKWay::kFragments, DecomposeKWay::kCluster, DecomposeKWay::kExchange,
        DecomposeKWay::kWarpgroups, DecomposeKWay::kLibrary, DecomposeKWay::kSkinny, DecomposeKWay::kWide}) {
    for (const PlanEpilogue epilogue :
         {PlanEpilogue::kElement, PlanEpilogue::kRow, PlanEpilogue::kNone, PlanEpilogue::kNormed,
          PlanEpilogue::kScaledRows, PlanEpilogue::kGlu, PlanEpilogue::kTurn}) {
      PlanBook one;
      other.epilogue = epilogue;
      one.Add(other, {{way, 16, 16, 2}, 1.0});
      const auto read = PlanBook::Parse(one.Print());
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->Find(other), (DecomposeKPlan{way, 16, 16, 2}));
    }
  }
  EXPECT_THAT(book.Print(), HasSubstr(kLine));
}

TEST(PlanBook, TakesCommentsBlankLinesAndForeignLineEnds) {
  const auto book = PlanBook::Parse("# made by hand\r\n\r\nstillhouse-plans 1 # the title\r\n  " +
                                    std::string(kLine, sizeof(kLine) - 2) + " # fast\r\n\t\r\n# end");
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_EQ(book->Find(kKey), kPlan);
  EXPECT_EQ(book->decompose_k().size(), 1u);
}

TEST(PlanBook, FindsByEveryPartOfTheKey) {
  const auto book = PlanBook::Parse(File(kLine));
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_EQ(book->Find(kKey), kPlan);
  std::vector<DecomposeKKey> others(7, kKey);
  others[0].gpu = "NVIDIA H100";
  others[1].dtype = PlanDType::kF32;
  others[2].m = RowBucket::k1;
  others[3].n = 255;
  others[4].k = 7169;
  others[5].layout = PlanLayout::kBColumns;
  others[6].epilogue = PlanEpilogue::kRow;
  for (const DecomposeKKey& key : others) EXPECT_FALSE(book->Find(key)) << PlanBook::PrintLine(key, {});
  // A GPU's table has its own plans alone, and finds them by everything else.
  const PlanTable table = book->TableFor("NVIDIA H200");
  ASSERT_NE(table.Find(kKey), nullptr);
  EXPECT_EQ(*table.Find(kKey), kPlan);
  for (size_t i = 1; i < others.size(); ++i) EXPECT_EQ(table.Find(others[i]), nullptr) << i;
  EXPECT_EQ(book->TableFor("NVIDIA H100").Find(kKey), nullptr);
}

TEST(PlanBook, CountsThePlansOfAGpu) {
  const auto book = PlanBook::Parse(File(kLine));
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_EQ(book->CountFor("NVIDIA H200"), 1);
  EXPECT_EQ(book->CountFor("NVIDIA H200 bf16"), 1);
  EXPECT_EQ(book->CountFor("NVIDIA H200X"), 0);
  EXPECT_EQ(book->CountFor("NVIDIA"), 0);
  EXPECT_EQ(book->CountFor(""), 0);
}

// A program on an H200 runs by plans from the first day.
TEST(PlanBook, ShipsPlansForTheH200) {
  EXPECT_GT(PlanBook::Shipped().CountFor("NVIDIA H200"), 100);
  const auto plan = PlanBook::Shipped().Find(kKey);
  ASSERT_TRUE(plan);
  EXPECT_GE(plan->splits, 1);
  // Also for the products of the models that are served, as many rows as a decode step has.
  constexpr std::pair<int64_t, int64_t> kProducts[] = {{960, 576},    {576, 576},     {3072, 576},   {576, 1536},
                                                       {49152, 576},  {6144, 4096},   {4096, 4096},  {28672, 4096},
                                                       {4096, 14336}, {128256, 4096}, {6144, 2560},  {2560, 4096},
                                                       {19456, 2560}, {2560, 9728},   {151936, 2560}};
  for (const auto& [n, k] : kProducts) {
    for (const RowBucket m : {RowBucket::k1, RowBucket::k2, RowBucket::k9, RowBucket::k33, RowBucket::k129}) {
      const DecomposeKKey key{"NVIDIA H200", PlanDType::kBf16, m, n, k, PlanLayout::kBColumns, PlanEpilogue::kNone};
      EXPECT_TRUE(PlanBook::Shipped().Find(key)) << PlanBook::PrintLine(key, {});
    }
  }
}

TEST(PlanBook, BucketsMeetWithoutGaps) {
  const std::pair<int64_t, RowBucket> kEdges[] = {
      {1, RowBucket::k1},     {2, RowBucket::k2},     {8, RowBucket::k2},        {9, RowBucket::k9},
      {32, RowBucket::k9},    {33, RowBucket::k33},   {128, RowBucket::k33},     {129, RowBucket::k129},
      {512, RowBucket::k129}, {513, RowBucket::k513}, {1 << 20, RowBucket::k513}};
  for (const auto& [m, bucket] : kEdges) EXPECT_EQ(BucketOf(m), bucket) << m;
  for (int i = 0; i < kRowBuckets; ++i) {
    EXPECT_EQ(BucketOf(RowsOf(static_cast<RowBucket>(i))), static_cast<RowBucket>(i));
  }
}

TEST(PlanBook, RefusesHostileFiles) {
  ExpectRefused("", "empty");
  ExpectRefused("\n\n# nothing\n", "empty");
  ExpectRefused(kLine, "line 1: the first line");
  ExpectRefused("stillhouse-plans\n", "the first line");
  ExpectRefused("stillhouse-plans 2\n", "newer");
  ExpectRefused(File("attention x=1\n"), "line 2: unknown op 'attention'");
  ExpectRefused(File("decompose_k\n"), "gpu is missing");
  ExpectRefused(With("splits=16", ""), "splits is missing");
  ExpectRefused(With("splits=16", "splits=16 splits=16"), "splits is said twice");
  ExpectRefused(With("splits=16", "slices=16"), "unknown word 'slices=16'");
  ExpectRefused(With("splits=16", "splits"), "unknown word 'splits'");
  for (const char* number : {"0", "-1", "65536", "99999999999999999999", "1e3", "0x10", "+1", "", "16,"}) {
    ExpectRefused(With("splits=16", std::string("splits=") + number), "is no splits");
  }
  for (const char* number : {"0", "-256", "2147483649", "256.0"}) {
    ExpectRefused(With("n=256", std::string("n=") + number), "is no n");
  }
  for (const char* tile : {"16", "x", "16x", "x32", "0x32", "16x32x64", "2000x16", "16X32"}) {
    ExpectRefused(With("tile=16x32", std::string("tile=") + tile), "is no tile");
  }
  for (const char* time : {"nan", "inf", "-1", "fast", ""}) {
    ExpectRefused(With("us=2.41", std::string("us=") + time), "is no us");
  }
  ExpectRefused(With("m=2-8", "m=3"), "is no m");
  ExpectRefused(With("dtype=bf16", "dtype=fp8"), "is no dtype");
  ExpectRefused(With("layout=b-rows", "layout=rows"), "is no layout");
  ExpectRefused(With("epilogue=element", "epilogue=relu"), "is no epilogue");
  ExpectRefused(With("way=slices", "way=magic"), "is no way");
  ExpectRefused(With("\"NVIDIA H200\"", "NVIDIA"), "is no gpu");
  ExpectRefused(With("\"NVIDIA H200\"", "\"\""), "is no gpu");
  ExpectRefused(With("\"NVIDIA H200\"",
                     "\"a\x01"
                     "b\""),
                "is no gpu");
  ExpectRefused(With("\"NVIDIA H200\"", "\"" + std::string(200, 'a') + "\""), "is no gpu");
  ExpectRefused(With("\"NVIDIA H200\"", "\"NVIDIA H200"), "a quote does not end");
  ExpectRefused(File(std::string(kLine) + kLine), "line 3: a second plan");
  ExpectRefused(File(std::string(PlanBook::kMaxBytes, '#')), "bytes; at most");
  ExpectRefused(std::string("stillhouse-plans 1\n\0decompose_k", 31), "unknown op");
  std::string many = "stillhouse-plans 1\n";
  for (int i = 0; i <= PlanBook::kMaxPlans; ++i) {
    many += "decompose_k gpu=\"G\" dtype=bf16 m=1 n=" + std::to_string(i + 1) +
            " k=1 layout=other epilogue=row way=slices tile=1x1 splits=1\n";
  }
  ExpectRefused(many, "more than 10000 plans");
}

TEST(PlanBook, LoadsFiles) {
  const std::string path = ::testing::TempDir() + "/plan_book_test.plans";
  std::ofstream(path) << File(kLine);
  const auto book = PlanBook::Load(path);
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_EQ(book->Find(kKey), kPlan);
  std::ofstream(path) << "junk";
  EXPECT_THAT(std::string(PlanBook::Load(path).status().message()), HasSubstr(path + ": plan file, line 1"));
  std::remove(path.c_str());
  EXPECT_EQ(PlanBook::Load(path).status().code(), absl::StatusCode::kNotFound);
}

TEST(PlanBook, ShippedPlansAreThoseInUseUntilOthersAreGiven) {
  EXPECT_EQ(PlansInUse().Print(), PlanBook::Shipped().Print());
  PlanBook own;
  DecomposeKKey key = kKey;
  key.gpu = "a GPU of one's own";
  own.Add(key, {kPlan, 1.0});
  UsePlans(own);
  EXPECT_EQ(PlansInUse().Find(key), kPlan);
  EXPECT_EQ(PlansInUse().decompose_k().size(), PlanBook::Shipped().decompose_k().size() + 1);
}

}  // namespace
}  // namespace stillhouse
