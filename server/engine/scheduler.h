// Planning, pure: which requests start, whose turn it is, and which rows the next step computes. No clocks, no locks,
// no device: everything that decides comes in as an argument.
#ifndef STILLHOUSE_SERVER_ENGINE_SCHEDULER_H_
#define STILLHOUSE_SERVER_ENGINE_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace stillhouse {

// Virtual token counters (Sheng et al. 2024): the tenant that was given the least computation goes next. A tenant that
// returns after idling is lifted to the least of the active ones, so that absence earns no credit.
class FairShares {
 public:
  void Charge(const std::string& tenant, int64_t tokens) { counters_[tenant] += tokens; }
  // Called when a tenant goes from nothing queued or running to something; `active` are those that have work.
  void Activate(const std::string& tenant, absl::Span<const std::string> active);
  int64_t counter(const std::string& tenant) const;

 private:
  std::map<std::string, int64_t> counters_;
};

struct WaitingView {
  std::string tenant;
  int64_t pages = 0;  // for the whole life of the sequence
};

// Index of the waiting request (in order of arrival) that starts next, or −1: the first of the tenant with the smallest
// counter, if its pages are there. The chosen one is never overtaken by a smaller one behind it: no starvation.
int64_t PickNext(absl::Span<const WaitingView> waiting, const FairShares& shares, int64_t free_pages);

// Whether background sequences are to be admitted now: they come in groups, an eighth of those that run or may run, so
// that their prompts share a step, and the steps between are of decoding rows alone, which may be recorded. True where
// nothing runs.
bool RoomForGroup(absl::Span<const WaitingView> waiting, int64_t running, int64_t most_running, int64_t free_pages);

struct RunningView {
  int64_t prompt_left = 0;  // rows of the prompt still to compute; 0: decoding
};

struct PlannedRows {
  int64_t sequence = 0;  // index into the running ones
  int64_t rows = 0;
};

// One row for each decoding sequence, then prompt rows in order of arrival, `prefill_chunk` in all while others decode
// and four times as many when nothing waits for its next token.
std::vector<PlannedRows> PlanStep(absl::Span<const RunningView> running, int64_t prefill_chunk);

// Divides time between interactive and background work. While interactive work is there, background turns take `share`
// of the time: after one that took t, interactive work has the device to itself for t·(1/share − 1).
class TurnKeeper {
 public:
  explicit TurnKeeper(double share) : share_(share) {}
  // Whether the next turn is background work.
  bool BackgroundTurn(bool interactive, bool background) const {
    return background && (!interactive || debt_ <= absl::ZeroDuration());
  }
  void RanBackground(absl::Duration t, bool interactive_waiting);
  void RanInteractive(absl::Duration t);
  void Idle() { debt_ = absl::ZeroDuration(); }

 private:
  double share_;
  absl::Duration debt_;  // what interactive work is owed
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_ENGINE_SCHEDULER_H_
