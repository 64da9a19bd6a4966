#include "server/engine/scheduler.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stillhouse {
namespace {

TEST(PlanStep, DecodersFirstThenPromptRowsInOrderWithinTheChunk) {
  const std::vector<RunningView> running = {{100}, {0}, {300}, {0}};
  const auto plan = PlanStep(running, 128);
  ASSERT_EQ(plan.size(), 4u);
  EXPECT_EQ(plan[0].sequence, 1);
  EXPECT_EQ(plan[0].rows, 1);
  EXPECT_EQ(plan[1].sequence, 3);
  EXPECT_EQ(plan[2].sequence, 0);
  EXPECT_EQ(plan[2].rows, 100);
  EXPECT_EQ(plan[3].sequence, 2);
  EXPECT_EQ(plan[3].rows, 28);
}

TEST(PlanStep, LargerChunksWhenNobodyDecodes) {
  const auto plan = PlanStep(std::vector<RunningView>{{1000}}, 128);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].rows, 512);
}

TEST(PlanStep, NothingRunning) { EXPECT_TRUE(PlanStep({}, 128).empty()); }

TEST(PickNext, LeastServedTenantThenOrderOfArrival) {
  FairShares shares;
  shares.Charge("a", 1000);
  shares.Charge("b", 10);
  const std::vector<WaitingView> waiting = {{"a", 1}, {"b", 1}, {"b", 1}};
  EXPECT_EQ(PickNext(waiting, shares, 10), 1);
}

TEST(PickNext, ALargeRequestIsNotOvertaken) {
  FairShares shares;
  const std::vector<WaitingView> waiting = {{"a", 8}, {"a", 1}};
  EXPECT_EQ(PickNext(waiting, shares, 4), -1);
  EXPECT_EQ(PickNext(waiting, shares, 8), 0);
}

TEST(RoomForGroup, WaitsForAnEighthOfWhatRuns) {
  const std::vector<WaitingView> waiting(100, {"a", 2});
  EXPECT_TRUE(RoomForGroup(waiting, 0, 256, 0));  // nothing runs that could make room
  EXPECT_TRUE(RoomForGroup(waiting, 224, 256, 1000));
  EXPECT_FALSE(RoomForGroup(waiting, 230, 256, 1000));  // 26 places, 29 wanted
  EXPECT_TRUE(RoomForGroup(waiting, 80, 256, 20));
  EXPECT_FALSE(RoomForGroup(waiting, 80, 256, 19));  // pages for nine of ten
  EXPECT_TRUE(RoomForGroup(waiting, 1, 256, 2));
  EXPECT_FALSE(RoomForGroup(waiting, 4, 4, 1000));
}

TEST(RoomForGroup, TheLastOnesDoNotWaitForMore) {
  const std::vector<WaitingView> waiting(3, {"a", 1});
  EXPECT_TRUE(RoomForGroup(waiting, 253, 256, 3));
  EXPECT_FALSE(RoomForGroup(waiting, 254, 256, 3));
}

TEST(FairShares, AbsenceEarnsNoCredit) {
  FairShares shares;
  shares.Charge("busy", 5000);
  const std::vector<std::string> active = {"busy"};
  shares.Activate("late", active);
  EXPECT_EQ(shares.counter("late"), 5000);
  shares.Charge("late", 100);
  shares.Activate("late", active);
  EXPECT_EQ(shares.counter("late"), 5100);  // and never falls
}

TEST(TurnKeeper, BackgroundTakesItsShareOfBusyTime) {
  TurnKeeper turns(0.1);
  absl::Duration background, interactive;
  for (int i = 0; i < 100000; ++i) {
    if (turns.BackgroundTurn(true, true)) {
      turns.RanBackground(absl::Seconds(1), true);
      background += absl::Seconds(1);
    } else {
      turns.RanInteractive(absl::Milliseconds(5));
      interactive += absl::Milliseconds(5);
    }
  }
  EXPECT_NEAR(absl::FDivDuration(background, background + interactive), 0.1, 0.02);
}

TEST(TurnKeeper, IdleTimeIsAllBackground) {
  TurnKeeper turns(0.1);
  EXPECT_TRUE(turns.BackgroundTurn(false, true));
  turns.RanBackground(absl::Seconds(1), false);
  EXPECT_TRUE(turns.BackgroundTurn(false, true));
  EXPECT_FALSE(turns.BackgroundTurn(true, false));
}

}  // namespace
}  // namespace stillhouse
