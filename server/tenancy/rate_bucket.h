// How much of something a tenant may take a minute.
#ifndef STILLHOUSE_SERVER_TENANCY_RATE_BUCKET_H_
#define STILLHOUSE_SERVER_TENANCY_RATE_BUCKET_H_

#include <algorithm>

#include "absl/time/time.h"

namespace stillhouse {

// Begins full with a minute's worth, fills evenly, never holds more than that. What is taken beyond its content is a
// debt, which fills up first. Time is the caller's; a clock that goes back fills nothing.
class RateBucket {
 public:
  RateBucket(double per_minute, absl::Time now) : per_minute_(per_minute), content_(per_minute), filled_(now) {}

  // How long until one is there; zero: now.
  absl::Duration UntilOne(absl::Time now) {
    Fill(now);
    const absl::Duration wait = absl::Minutes((1.0 - content_) / per_minute_);
    if (wait <= kRounding) return absl::ZeroDuration();
    // Whole milliseconds, rounded up, as hints are sent: who waits that long finds it there.
    return absl::Ceil(wait - kRounding, absl::Milliseconds(1));
  }

  void Take(double amount, absl::Time now) {
    Fill(now);
    content_ -= amount;
  }

 private:
  static constexpr absl::Duration kRounding = absl::Microseconds(1);  // of sums, not of limits

  void Fill(absl::Time now) {
    const double minutes = absl::FDivDuration(now - filled_, absl::Minutes(1));
    content_ = std::min(per_minute_, content_ + per_minute_ * std::max(0.0, minutes));
    filled_ = now;
  }

  double per_minute_;
  double content_;  // below zero: a debt
  absl::Time filled_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_RATE_BUCKET_H_
