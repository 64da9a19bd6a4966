#ifndef STILLHOUSE_CLIENT_CLI_INTERRUPT_H_
#define STILLHOUSE_CLIENT_CLI_INTERRUPT_H_

#include <functional>

namespace stillhouse::client {

// Ctrl-C. Install takes SIGINT over with a thread of its own; call it before any other thread starts. Without a scope
// the program ends with 130; within one, the first Ctrl-C runs the scope's handler on that thread and the second ends
// the program.
void InstallInterrupt();

// Scopes do not nest.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> handler);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
};

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_INTERRUPT_H_
