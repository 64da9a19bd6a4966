#include "server/engine/scheduler.h"

#include <algorithm>
#include <limits>

namespace stillhouse {

void FairShares::Activate(const std::string& tenant, absl::Span<const std::string> active) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const std::string& other : active) {
    if (other != tenant) least = std::min(least, counter(other));
  }
  if (least != std::numeric_limits<int64_t>::max()) counters_[tenant] = std::max(counters_[tenant], least);
}

int64_t FairShares::counter(const std::string& tenant) const {
  auto found = counters_.find(tenant);
  return found == counters_.end() ? 0 : found->second;
}

int64_t PickNext(absl::Span<const WaitingView> waiting, const FairShares& shares, int64_t free_pages) {
  int64_t best = -1;
  int64_t best_counter = 0;
  for (size_t i = 0; i < waiting.size(); ++i) {
    const int64_t counter = shares.counter(waiting[i].tenant);
    if (best < 0 || counter < best_counter) {
      best = static_cast<int64_t>(i);
      best_counter = counter;
    }
  }
  return best >= 0 && waiting[static_cast<size_t>(best)].pages <= free_pages ? best : -1;
}

bool RoomForGroup(absl::Span<const WaitingView> waiting, int64_t running, int64_t most_running, int64_t free_pages) {
  if (running == 0) return true;
  const int64_t count = static_cast<int64_t>(waiting.size());
  const int64_t group = std::max<int64_t>(1, std::min({most_running / 8, (running + 7) / 8, count}));
  int64_t fitting = 0;
  while (fitting < std::min(group, count) && waiting[static_cast<size_t>(fitting)].pages <= free_pages) {
    free_pages -= waiting[static_cast<size_t>(fitting++)].pages;
  }
  return std::min(fitting, most_running - running) >= group;
}

std::vector<PlannedRows> PlanStep(absl::Span<const RunningView> running, int64_t prefill_chunk) {
  std::vector<PlannedRows> plan;
  for (size_t i = 0; i < running.size(); ++i) {
    if (running[i].prompt_left == 0) plan.push_back({static_cast<int64_t>(i), 1});
  }
  int64_t budget = plan.empty() ? 4 * prefill_chunk : prefill_chunk;
  for (size_t i = 0; i < running.size() && budget > 0; ++i) {
    if (running[i].prompt_left == 0) continue;
    const int64_t rows = std::min(running[i].prompt_left, budget);
    plan.push_back({static_cast<int64_t>(i), rows});
    budget -= rows;
  }
  return plan;
}

void TurnKeeper::RanBackground(absl::Duration t, bool interactive_waiting) {
  // Work that came while the device was idle for others owes nothing.
  if (interactive_waiting) debt_ += t * (1.0 / share_ - 1.0);
}

void TurnKeeper::RanInteractive(absl::Duration t) {
  debt_ -= t;
  // Unused credit does not pile up into one long pause of queries.
  debt_ = std::max(debt_, absl::ZeroDuration());
}

}  // namespace stillhouse
