#include "client/cli/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"

namespace stillhouse::client {
namespace {

struct Handler {
  absl::Mutex mutex;
  std::function<void()> run ABSL_GUARDED_BY(mutex);
};

// Never destroyed: the thread outlives main.
Handler& TheHandler() {
  static Handler& handler = *new Handler;
  return handler;
}

}  // namespace

void InstallInterrupt() {
  TheHandler();
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::thread([set] {
    while (true) {
      int signal = 0;
      if (sigwait(&set, &signal) != 0) continue;
      std::function<void()> run;
      {
        absl::MutexLock lock(&TheHandler().mutex);
        run = std::exchange(TheHandler().run, nullptr);
      }
      if (run == nullptr) {
        if (isatty(STDERR_FILENO) == 1) (void)!write(STDERR_FILENO, "\n", 1);
        _exit(130);
      }
      run();
    }
  }).detach();
}

InterruptScope::InterruptScope(std::function<void()> handler) {
  absl::MutexLock lock(&TheHandler().mutex);
  TheHandler().run = std::move(handler);
}

InterruptScope::~InterruptScope() {
  absl::MutexLock lock(&TheHandler().mutex);
  TheHandler().run = nullptr;
}

}  // namespace stillhouse::client
