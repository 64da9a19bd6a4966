#ifndef STILLHOUSE_CLIENT_CLI_PROGRESS_H_
#define STILLHOUSE_CLIENT_CLI_PROGRESS_H_

#include <cstdio>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace stillhouse::client {

// One line of a bar, at most `width` cells: "training   [#####.....]  42 %  1m05s left  step 71 of 170". Pure.
std::string BarLine(absl::string_view label, double fraction, std::optional<double> seconds_left,
                    absl::string_view detail, size_t width);

// Seconds left of work that did `fraction` in `elapsed`; absent while nothing can be said.
std::optional<double> EstimateLeft(double fraction, absl::Duration elapsed);

// A progress display on a stream: a bar that redraws itself on a terminal; elsewhere one plain line per label and per
// tenth of the way, so that logs stay short. One thread.
class Progress {
 public:
  // `silent`: shows nothing.
  Progress(FILE* out, bool silent);
  // Ends the line where one is open.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(absl::string_view label, double fraction, std::optional<double> seconds_left,
            absl::string_view detail = "");
  // As Show, the time left estimated from the time since the first call. Small transfers are shown on terminals only.
  void ShowBytes(absl::string_view label, int64_t done, int64_t total);
  // Clears the bar (a terminal) so that other output can follow.
  void Clear();

 private:
  FILE* out_;
  bool silent_;
  bool terminal_;
  bool drawn_ = false;
  std::string last_label_;
  int last_tenth_ = -1;
  absl::Time start_;
  absl::Time last_draw_;
};

// Cells of the terminal behind `out`, 80 where that cannot be known.
size_t TerminalWidth(FILE* out);
bool IsTerminal(FILE* out);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_PROGRESS_H_
