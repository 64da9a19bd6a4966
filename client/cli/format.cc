#include "client/cli/format.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"

namespace stillhouse::client {

namespace {

std::string EnumKey(absl::string_view word) {
  std::string key = absl::AsciiStrToUpper(word);
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}

std::string EnumWord(absl::string_view name) {
  std::string word = absl::AsciiStrToLower(name);
  std::replace(word.begin(), word.end(), '_', '-');
  return word;
}

}  // namespace

std::string Bytes(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  // 1023.96 would print as 1024.0.
  while (value >= 1023.95 && unit < 5) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string Seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 0.001) return absl::StrFormat("%.0f µs", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  if (seconds < 59.95) return absl::StrFormat("%.1f s", seconds);
  if (seconds >= 1e9) return "-";
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh%02dm", whole / 3600, whole % 3600 / 60);
}

std::string Count(int64_t n) {
  std::string digits = absl::StrCat(n);
  const size_t first = n < 0 ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

std::string Number(double value, int decimals) {
  if (!std::isfinite(value)) return "-";
  return absl::StrFormat("%.*f", decimals, value);
}

std::string When(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  return absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixSeconds(time.seconds()), absl::LocalTimeZone());
}

std::string MethodWord(v1::Method method) {
  return method == v1::METHOD_UNSPECIFIED ? "-" : EnumWord(v1::Method_Name(method));
}

absl::StatusOr<v1::Method> ParseMethod(absl::string_view word) {
  const std::string key = EnumKey(word);
  if (key == "AM") return v1::ATTENTION_MATCHING;
  v1::Method method;
  if (v1::Method_Parse(key, &method) && method != v1::METHOD_UNSPECIFIED) return method;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", word, "\" is no method: cartridge, attention-matching, full, still, sink-window, l2, snapkv or h2o."));
}

absl::StatusOr<v1::Profile> ParseProfile(absl::string_view word) {
  v1::Profile profile;
  if (v1::Profile_Parse(EnumKey(word), &profile) && profile != v1::PROFILE_UNSPECIFIED) return profile;
  return absl::InvalidArgumentError(absl::StrCat("\"", word, "\" is no profile: quick, standard or thorough."));
}

std::string StateWord(v1::Cache::State state) {
  return state == v1::Cache::STATE_UNSPECIFIED ? "-" : EnumWord(v1::Cache::State_Name(state));
}

std::string StageWord(v1::OperationMetadata::Stage stage) {
  return stage == v1::OperationMetadata::STAGE_UNSPECIFIED ? "-" : EnumWord(v1::OperationMetadata::Stage_Name(stage));
}

std::string OperationWord(const v1::Operation& operation) {
  if (operation.done() && operation.has_error()) return absl::StrCat("failed: ", operation.error().message());
  if (operation.done()) return "done";
  const v1::OperationMetadata& metadata = operation.metadata();
  if (metadata.stage() == v1::OperationMetadata::QUEUED) {
    return metadata.queue_position() > 0 ? absl::StrCat("queued behind ", metadata.queue_position()) : "queued";
  }
  return absl::StrFormat("%s %.0f %%", StageWord(metadata.stage()), std::clamp(metadata.fraction(), 0.0, 1.0) * 100);
}

size_t DisplayWidth(absl::string_view utf8) {
  return std::count_if(utf8.begin(), utf8.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::string Ellipsis(absl::string_view utf8, size_t width) {
  std::string line = absl::StrReplaceAll(utf8, {{"\n", " "}, {"\r", " "}, {"\t", " "}});
  if (DisplayWidth(line) <= width) return line;
  size_t cells = 0;
  size_t end = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if ((static_cast<unsigned char>(line[i]) & 0xC0) == 0x80) continue;
    if (cells + 1 >= width) {
      end = i;
      break;
    }
    ++cells;
  }
  line.resize(end);
  return width == 0 ? "" : line + "…";
}

Table::Table(std::vector<std::string> headers) : headers_(std::move(headers)) {
  for (std::string& header : headers_) {
    right_.push_back(!header.empty() && header.back() == '>');
    if (right_.back()) header.pop_back();
  }
}

void Table::Row(std::vector<std::string> cells) {
  cells.resize(headers_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::Text() const {
  std::vector<size_t> widths;
  for (size_t i = 0; i < headers_.size(); ++i) {
    widths.push_back(DisplayWidth(headers_[i]));
    for (const auto& row : rows_) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  std::string text;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string pad(widths[i] - DisplayWidth(cells[i]), ' ');
      absl::StrAppend(&out, i == 0 ? "" : "  ", right_[i] ? pad : "", cells[i], right_[i] ? "" : pad);
    }
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(out), "\n");
  };
  line(headers_);
  for (const auto& row : rows_) line(row);
  return text;
}

}  // namespace stillhouse::client
