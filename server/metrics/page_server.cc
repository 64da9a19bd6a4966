#include "server/metrics/page_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

// Two, so that one slow scraper does not keep another one out.
constexpr int kThreads = 2;
constexpr size_t kLongestRequest = 16384;
constexpr absl::Duration kRequestTime = absl::Seconds(5), kAnswerTime = absl::Seconds(20);

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::Status Failed(const char* call) { return absl::UnavailableError(StrCat(call, ": ", std::strerror(errno))); }

absl::StatusOr<Descriptor> Listen(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return absl::UnavailableError("the host must be an IP address, such as 127.0.0.1 or [::1]");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
  Descriptor listener(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener.get() < 0) return Failed("socket");
  const int yes = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  if (bind(listener.get(), found->ai_addr, found->ai_addrlen) != 0) return Failed("bind");
  if (listen(listener.get(), SOMAXCONN) != 0) return Failed("listen");
  return listener;
}

absl::StatusOr<int> PortOf(const Descriptor& listener) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) return Failed("getsockname");
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

std::string Answer(std::string_view status, std::string_view content_type, std::string_view body, bool with_body) {
  return StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", content_type, "\r\nContent-Length: ", body.size(),
                "\r\nConnection: close\r\n\r\n", with_body ? body : std::string_view());
}

}  // namespace

struct PageServer::Impl {
  Page page;
  Descriptor listener;
  Descriptor stop;  // readable from the end of serving on
  int port = 0;
  std::array<std::thread, kThreads> threads;

  ~Impl() {
    const uint64_t one = 1;
    while (write(stop.get(), &one, sizeof(one)) < 0 && errno == EINTR) continue;
    for (std::thread& thread : threads) {
      if (thread.joinable()) thread.join();
    }
  }

  // Waits for `events` of fd. False at the deadline and at the end of serving.
  bool Wait(int fd, short events, absl::Time deadline) const {
    while (true) {
      const absl::Duration left = deadline - absl::Now();
      if (left <= absl::ZeroDuration()) return false;
      pollfd waiting[] = {{fd, events, 0}, {stop.get(), POLLIN, 0}};
      const int limit = static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(left) + 1, 60'000));
      if (poll(waiting, 2, limit) < 0 && errno != EINTR) return false;
      if (waiting[1].revents != 0) return false;
      if (waiting[0].revents != 0) return true;
    }
  }

  void Loop() const {
    while (Wait(listener.get(), POLLIN, absl::InfiniteFuture())) {
      // The other thread may have been faster.
      const Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connection.get() >= 0) {
        Serve(connection.get());
      } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        // Out of descriptors: some will be closed.
        Wait(-1, 0, absl::Now() + absl::Milliseconds(100));
      }
    }
  }

  void Serve(int connection) const {
    std::string request;
    const absl::Time deadline = absl::Now() + kRequestTime;
    while (request.find("\r\n\r\n") == std::string::npos) {
      if (request.size() > kLongestRequest || !Wait(connection, POLLIN, deadline)) return;
      char bytes[4096];
      const ssize_t size = recv(connection, bytes, sizeof(bytes), 0);
      if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) return;
      if (size > 0) request.append(bytes, static_cast<size_t>(size));
    }
    Send(connection, AnswerTo(request));
  }

  std::string AnswerTo(std::string_view request) const {
    // "GET /metrics?x=y HTTP/1.1".
    const std::string_view line = request.substr(0, request.find("\r\n"));
    const size_t space = line.find(' ');
    const std::string_view method = line.substr(0, space);
    std::string_view target = space == std::string_view::npos ? std::string_view() : line.substr(space + 1);
    target = target.substr(0, target.find_first_of(" ?"));
    const bool get = method == "GET";
    constexpr const char* kPlain = "text/plain; charset=utf-8";
    if (!get && method != "HEAD") return Answer("405 Method Not Allowed", kPlain, "only GET and HEAD\n", true);
    if (target != page.path) return Answer("404 Not Found", kPlain, StrCat("see ", page.path, "\n"), get);
    return Answer("200 OK", page.content_type, page.make(), get);
  }

  void Send(int connection, std::string_view answer) const {
    const absl::Time deadline = absl::Now() + kAnswerTime;
    while (!answer.empty() && Wait(connection, POLLOUT, deadline)) {
      const ssize_t size = send(connection, answer.data(), answer.size(), MSG_NOSIGNAL);
      if (size < 0 && errno != EAGAIN && errno != EINTR) return;
      if (size > 0) answer.remove_prefix(static_cast<size_t>(size));
    }
  }
};

PageServer::PageServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PageServer::~PageServer() = default;

int PageServer::port() const { return impl_->port; }

absl::StatusOr<std::unique_ptr<PageServer>> PageServer::Start(const std::string& host, int port, Page page) {
  auto impl = std::make_unique<Impl>();
  impl->page = std::move(page);
  STILLHOUSE_ASSIGN_OR_RETURN(impl->listener, Listen(host, port));
  STILLHOUSE_ASSIGN_OR_RETURN(impl->port, PortOf(impl->listener));
  impl->stop = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (impl->stop.get() < 0) return Failed("eventfd");
  try {
    for (std::thread& thread : impl->threads) thread = std::thread([i = impl.get()] { i->Loop(); });
  } catch (const std::system_error& error) {
    return absl::UnavailableError(StrCat("starting a thread: ", error.code().message()));
  }
  return std::unique_ptr<PageServer>(new PageServer(std::move(impl)));
}

}  // namespace stillhouse
