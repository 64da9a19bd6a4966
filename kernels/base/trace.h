// Named spans: where a step's time goes. Off by default, and then free but for one load.
#ifndef STILLHOUSE_KERNELS_BASE_TRACE_H_
#define STILLHOUSE_KERNELS_BASE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace stillhouse {

struct SpanTotal {
  std::string name;
  int64_t count = 0;
  int64_t nanoseconds = 0;
};

// Spans are collected while enabled. Any thread.
void EnableTrace(bool enabled);
bool TraceEnabled();
// Totals per name since the last call, longest first.
std::vector<SpanTotal> TakeTrace();

// Times its own lifetime under `name` (a string literal).
class Span {
 public:
  explicit Span(const char* name);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const char* name_;
  int64_t start_ = -1;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_BASE_TRACE_H_
