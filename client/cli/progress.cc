#include "client/cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"

namespace stillhouse::client {
namespace {

constexpr size_t kLabel = 12;
constexpr int64_t kSmallTransfer = 8 << 20;

double Sane(double fraction) { return fraction >= 0 ? std::min(fraction, 1.0) : 0.0; }

}  // namespace

std::string BarLine(absl::string_view label, double fraction, std::optional<double> seconds_left,
                    absl::string_view detail, size_t width) {
  fraction = Sane(fraction);
  std::string head(label);
  if (DisplayWidth(head) < kLabel) head.append(kLabel - DisplayWidth(head), ' ');
  std::string tail = absl::StrFormat(" %3.0f %%", std::floor(fraction * 100));
  if (seconds_left && *seconds_left >= 0 && std::isfinite(*seconds_left)) {
    absl::StrAppend(&tail, "  ", Seconds(std::max(1.0, std::round(*seconds_left))), " left");
  }
  if (!detail.empty()) absl::StrAppend(&tail, "  ", detail);
  const size_t fixed = DisplayWidth(head) + 3;
  const size_t wanted = fixed + 30 + DisplayWidth(tail);
  const size_t cells =
      wanted <= width ? 30 : (fixed + 10 + DisplayWidth(tail) <= width ? width - fixed - DisplayWidth(tail) : 10);
  const size_t full = static_cast<size_t>(fraction * static_cast<double>(cells));
  const std::string line = absl::StrCat(head, " [", std::string(full, '#'), std::string(cells - full, '.'), "]", tail);
  return Ellipsis(line, width);
}

std::optional<double> EstimateLeft(double fraction, absl::Duration elapsed) {
  const double seconds = absl::ToDoubleSeconds(elapsed);
  if (!(fraction > 0.01) || seconds < 0.5) return std::nullopt;
  return seconds * (1 - std::min(fraction, 1.0)) / fraction;
}

Progress::Progress(FILE* out, bool silent)
    : out_(out), silent_(silent), terminal_(IsTerminal(out)), start_(absl::InfinitePast()) {}

Progress::~Progress() { Clear(); }

void Progress::Show(absl::string_view label, double fraction, std::optional<double> seconds_left,
                    absl::string_view detail) {
  if (silent_) return;
  fraction = Sane(fraction);
  const int tenth = static_cast<int>(fraction * 10);
  const bool moved = label != last_label_ || tenth != last_tenth_;
  if (terminal_) {
    const absl::Time now = absl::Now();
    if (!moved && now - last_draw_ < absl::Milliseconds(100)) return;
    last_draw_ = now;
    fprintf(out_, "\r\033[K%s", BarLine(label, fraction, seconds_left, detail, TerminalWidth(out_) - 1).c_str());
    drawn_ = true;
  } else if (moved) {
    std::string line = absl::StrFormat("%s %.0f %%", label, std::floor(fraction * 100));
    if (seconds_left && *seconds_left >= 0 && std::isfinite(*seconds_left)) {
      absl::StrAppend(&line, ", ", Seconds(std::max(1.0, std::round(*seconds_left))), " left");
    }
    if (!detail.empty()) absl::StrAppend(&line, ", ", detail);
    fprintf(out_, "%s\n", line.c_str());
  }
  last_label_ = std::string(label);
  last_tenth_ = tenth;
  fflush(out_);
}

void Progress::ShowBytes(absl::string_view label, int64_t done, int64_t total) {
  // A log needs no line about what is over in a moment.
  if (!terminal_ && total < kSmallTransfer) return;
  if (start_ == absl::InfinitePast()) start_ = absl::Now();
  const double fraction = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1;
  Show(label, fraction, done < total ? EstimateLeft(fraction, absl::Now() - start_) : std::nullopt,
       absl::StrCat(Bytes(done), " of ", Bytes(total)));
}

void Progress::Clear() {
  if (drawn_) {
    fprintf(out_, "\r\033[K");
    fflush(out_);
  }
  drawn_ = false;
}

size_t TerminalWidth(FILE* out) {
  winsize size{};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col >= 20) return size.ws_col;
  return 80;
}

bool IsTerminal(FILE* out) { return isatty(fileno(out)) == 1; }

}  // namespace stillhouse::client
