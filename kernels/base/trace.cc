#include "kernels/base/trace.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>

namespace stillhouse {
namespace {

std::atomic<bool> g_enabled{false};
std::mutex g_mutex;
std::map<std::string, SpanTotal>& Totals() {
  static auto* totals = new std::map<std::string, SpanTotal>();
  return *totals;
}

int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void EnableTrace(bool enabled) { g_enabled.store(enabled, std::memory_order_relaxed); }
bool TraceEnabled() { return g_enabled.load(std::memory_order_relaxed); }

std::vector<SpanTotal> TakeTrace() {
  std::vector<SpanTotal> out;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (auto& [name, total] : Totals()) out.push_back(total);
    Totals().clear();
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.nanoseconds > b.nanoseconds; });
  return out;
}

Span::Span(const char* name) : name_(name) {
  if (TraceEnabled()) start_ = NowNanoseconds();
}

Span::~Span() {
  if (start_ < 0) return;
  const int64_t elapsed = NowNanoseconds() - start_;
  std::lock_guard<std::mutex> lock(g_mutex);
  SpanTotal& total = Totals()[name_];
  if (total.count == 0) total.name = name_;
  ++total.count;
  total.nanoseconds += elapsed;
}

}  // namespace stillhouse
