#ifndef STILLHOUSE_CLIENT_CLI_FORMAT_H_
#define STILLHOUSE_CLIENT_CLI_FORMAT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/timestamp.pb.h"
#include "stillhouse/v1/caches.pb.h"
#include "stillhouse/v1/operations.pb.h"

// Numbers, times and tables for people, and the words of the command line for the wire's enums. Pure functions.
namespace stillhouse::client {

// "512 B", "1.5 KiB", "98.4 MiB".
std::string Bytes(int64_t bytes);
// "870 µs", "12.3 ms", "4.2 s", "3m05s", "2h10m". Negative or not finite: "-".
std::string Seconds(double seconds);
// "12,345".
std::string Count(int64_t n);
// Fixed decimals; "-" when absent.
std::string Number(double value, int decimals);
// Local time to the minute; "-" when unset.
std::string When(const google::protobuf::Timestamp& time);

// "attention-matching" and so on, both ways (case and - or _ do not matter; "am" is accepted).
std::string MethodWord(v1::Method method);
absl::StatusOr<v1::Method> ParseMethod(absl::string_view word);
absl::StatusOr<v1::Profile> ParseProfile(absl::string_view word);
std::string StateWord(v1::Cache::State state);
std::string StageWord(v1::OperationMetadata::Stage stage);
// "done", "failed: …", "training 42 %".
std::string OperationWord(const v1::Operation& operation);

// Code points that a terminal shows one cell wide; good enough for aligned columns.
size_t DisplayWidth(absl::string_view utf8);
// At most `width` cells, on one line; a cut is marked with "…".
std::string Ellipsis(absl::string_view utf8, size_t width);

// Columns as wide as their widest cell, two blanks between. Columns whose header ends in '>' are flush right.
class Table {
 public:
  explicit Table(std::vector<std::string> headers);
  void Row(std::vector<std::string> cells);
  std::string Text() const;
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<std::string> headers_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_FORMAT_H_
