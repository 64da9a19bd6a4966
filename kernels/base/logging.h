// Checks for our own bugs, and one-line logs on standard error.
//
// STILLHOUSE_CHECK aborts with file, line and the streamed message: use it where only a bug in this program can fail.
// Whatever input, disk, network or memory can cause is an absl::Status instead.
#ifndef STILLHOUSE_KERNELS_BASE_LOGGING_H_
#define STILLHOUSE_KERNELS_BASE_LOGGING_H_

#include <sstream>

namespace stillhouse {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kFatal = 4 };

// Lines below this level are dropped. Default: kInfo. Any thread.
void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();

namespace internal {

// Collects one line and writes it in its destructor; a fatal one aborts the process.
class LogLine {
 public:
  LogLine(LogLevel level, const char* file, int line);
  ~LogLine();
  LogLine(const LogLine&) = delete;
  LogLine& operator=(const LogLine&) = delete;
  std::ostream& stream() { return stream_; }

 private:
  LogLevel level_;
  std::ostringstream stream_;
};

struct LogVoidify {
  void operator&(std::ostream&) {}
};

}  // namespace internal
}  // namespace stillhouse

#define STILLHOUSE_LOG_LEVEL_DEBUG ::stillhouse::LogLevel::kDebug
#define STILLHOUSE_LOG_LEVEL_INFO ::stillhouse::LogLevel::kInfo
#define STILLHOUSE_LOG_LEVEL_WARNING ::stillhouse::LogLevel::kWarning
#define STILLHOUSE_LOG_LEVEL_ERROR ::stillhouse::LogLevel::kError
#define STILLHOUSE_LOG_LEVEL_FATAL ::stillhouse::LogLevel::kFatal

// STILLHOUSE_LOG(INFO) << "message";
#define STILLHOUSE_LOG(severity)                                  \
  (STILLHOUSE_LOG_LEVEL_##severity < ::stillhouse::GetLogLevel()) \
      ? (void)0                                                   \
      : ::stillhouse::internal::LogVoidify() &                    \
            ::stillhouse::internal::LogLine(STILLHOUSE_LOG_LEVEL_##severity, __FILE__, __LINE__).stream()

#define STILLHOUSE_CHECK(condition)                                                                      \
  (__builtin_expect(static_cast<bool>(condition), 1))                                                    \
      ? (void)0                                                                                          \
      : ::stillhouse::internal::LogVoidify() &                                                           \
            ::stillhouse::internal::LogLine(::stillhouse::LogLevel::kFatal, __FILE__, __LINE__).stream() \
                << "check failed: " #condition " "

#define STILLHOUSE_CHECK_EQ(a, b) STILLHOUSE_CHECK((a) == (b)) << (a) << " vs " << (b) << " "
#define STILLHOUSE_CHECK_LE(a, b) STILLHOUSE_CHECK((a) <= (b)) << (a) << " vs " << (b) << " "
#define STILLHOUSE_CHECK_LT(a, b) STILLHOUSE_CHECK((a) < (b)) << (a) << " vs " << (b) << " "
#define STILLHOUSE_CHECK_GE(a, b) STILLHOUSE_CHECK((a) >= (b)) << (a) << " vs " << (b) << " "
#define STILLHOUSE_CHECK_GT(a, b) STILLHOUSE_CHECK((a) > (b)) << (a) << " vs " << (b) << " "

#endif  // STILLHOUSE_KERNELS_BASE_LOGGING_H_
