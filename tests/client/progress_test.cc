#include "client/cli/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "client/cli/format.h"

namespace stillhouse::client {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(BarLine, ShowsHowFarAndHowLong) {
  EXPECT_EQ(BarLine("training", 0.42, 65.0, "step 71 of 170", 100),
            "training     [############..................]  42 %  1m05s left  step 71 of 170");
  EXPECT_EQ(BarLine("training", 0, std::nullopt, "", 100), "training     [..............................]   0 %");
  EXPECT_EQ(BarLine("done", 1, std::nullopt, "", 100), "done         [##############################] 100 %");
}

TEST(BarLine, NeverWiderThanTheTerminal) {
  for (size_t width = 1; width < 120; ++width) {
    EXPECT_LE(DisplayWidth(BarLine("self-study", 0.5, 3700.0, "conversation 10 of 150, ö", width)), width);
  }
}

TEST(BarLine, SurvivesNonsense) {
  EXPECT_THAT(BarLine("x", std::nan(""), std::nan(""), "", 80), HasSubstr("  0 %"));
  EXPECT_THAT(BarLine("x", 7, -1.0, "", 80), HasSubstr("100 %"));
  EXPECT_THAT(BarLine("x", 0.999, 0.2, "", 80), HasSubstr(" 99 %  1.0 s left"));
}

TEST(EstimateLeft, NeedsSomethingToGoBy) {
  EXPECT_EQ(EstimateLeft(0, absl::Seconds(10)), std::nullopt);
  EXPECT_EQ(EstimateLeft(0.5, absl::Milliseconds(10)), std::nullopt);
  EXPECT_NEAR(*EstimateLeft(0.25, absl::Seconds(10)), 30, 1e-9);
  EXPECT_NEAR(*EstimateLeft(1, absl::Seconds(10)), 0, 1e-9);
}

std::string Captured(const std::function<void(Progress&)>& use, bool silent = false) {
  FILE* file = tmpfile();
  {
    Progress progress(file, silent);
    use(progress);
  }
  std::string text(static_cast<size_t>(ftell(file)), '\0');
  rewind(file);
  const size_t n = fread(text.data(), 1, text.size(), file);
  text.resize(n);
  fclose(file);
  return text;
}

TEST(Progress, PlainLinesWhereThereIsNoTerminal) {
  const std::string text = Captured([](Progress& progress) {
    for (int i = 0; i <= 1000; ++i) progress.Show("training", i / 1000.0, std::nullopt);
    progress.Show("evaluating", 1, 2.0, "12 of 30");
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 12);
  EXPECT_THAT(text, HasSubstr("training 50 %\n"));
  EXPECT_THAT(text, HasSubstr("evaluating 100 %, 2.0 s left, 12 of 30\n"));
  EXPECT_THAT(text, Not(HasSubstr("\r")));
}

TEST(Progress, SilentShowsNothing) {
  EXPECT_EQ(Captured([](Progress& progress) { progress.ShowBytes("uploading", 1, 2); }, true), "");
}

TEST(Progress, SmallTransfersLeaveNoLines) {
  EXPECT_EQ(Captured([](Progress& progress) { progress.ShowBytes("uploading", 0, 0); }), "");
  EXPECT_THAT(Captured([](Progress& progress) { progress.ShowBytes("uploading", 16 << 20, 16 << 20); }),
              HasSubstr("uploading 100 %, 16.0 MiB of 16.0 MiB\n"));
}

}  // namespace
}  // namespace stillhouse::client
