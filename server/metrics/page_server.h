// One page over HTTP, for a scraper.
#ifndef STILLHOUSE_SERVER_METRICS_PAGE_SERVER_H_
#define STILLHOUSE_SERVER_METRICS_PAGE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace stillhouse {

// Answers GET and HEAD of one path, and 404 or 405 to everything else, on one thread of libmicrohttpd's: its stack is
// the process's usual one, where the small ones of other servers do not hold the thread-local storage that CUDA's
// libraries bring along. Who sends more headers than fit 32 KiB, or nothing for ten seconds, is hung up on.
class PageServer {
 public:
  struct Page {
    std::string path;          // "/metrics"
    std::string content_type;  // of what `make` returns
    std::function<std::string()> make;
  };

  // Listens on an IP address ("127.0.0.1", "::1") and port; 0 picks one. UNAVAILABLE with the system's reason.
  static absl::StatusOr<std::unique_ptr<PageServer>> Start(const std::string& host, int port, Page page);
  // Returns when no page is being made any more; answers on their way are cut off.
  ~PageServer();
  PageServer(const PageServer&) = delete;
  PageServer& operator=(const PageServer&) = delete;

  int port() const;

 private:
  struct Impl;
  explicit PageServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_METRICS_PAGE_SERVER_H_
