#include "server/metrics/page_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/base/status.h"
#include "kernels/base/strings.h"

namespace stillhouse {
namespace {

constexpr unsigned kMostConnections = 64, kIdleSeconds = 10;
constexpr size_t kConnectionBytes = size_t{32} << 10;  // of a request's headers

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
  int Release() { return std::exchange(fd_, -1); }

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

}  // namespace

struct PageServer::Impl {
  Page page;
  int port = 0;
  MHD_Daemon* daemon = nullptr;

  ~Impl() {
    if (daemon) MHD_stop_daemon(daemon);
  }

  static MHD_Result Answer(void* impl, MHD_Connection* connection, const char* path, const char* method, const char*,
                           const char*, size_t*, void**) {
    const Page& page = static_cast<const Impl*>(impl)->page;
    // The body of an answer to HEAD is left out on the way.
    if (std::strcmp(method, MHD_HTTP_METHOD_GET) != 0 && std::strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
      return Send(connection, MHD_HTTP_METHOD_NOT_ALLOWED, kPlain, "only GET and HEAD\n");
    }
    if (page.path != path) return Send(connection, MHD_HTTP_NOT_FOUND, kPlain, StrCat("see ", page.path, "\n"));
    return Send(connection, MHD_HTTP_OK, page.content_type.c_str(), page.make());
  }

  static MHD_Result Send(MHD_Connection* connection, unsigned status, const char* content_type,
                         const std::string& body) {
    MHD_Response* response =
        MHD_create_response_from_buffer(body.size(), const_cast<char*>(body.data()), MHD_RESPMEM_MUST_COPY);
    if (!response) return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");  // an idle scraper keeps no place
    const MHD_Result queued = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return queued;
  }

  static constexpr const char* kPlain = "text/plain; charset=utf-8";
};

PageServer::PageServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PageServer::~PageServer() = default;

int PageServer::port() const { return impl_->port; }

absl::StatusOr<std::unique_ptr<PageServer>> PageServer::Start(const std::string& host, int port, Page page) {
  auto impl = std::make_unique<Impl>();
  impl->page = std::move(page);
  STILLHOUSE_ASSIGN_OR_RETURN(Descriptor listener, Listen(host, port));
  STILLHOUSE_ASSIGN_OR_RETURN(impl->port, PortOf(listener));
  errno = 0;
  impl->daemon = MHD_start_daemon(MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD, 0, nullptr, nullptr, Impl::Answer,
                                  impl.get(), MHD_OPTION_LISTEN_SOCKET, listener.get(), MHD_OPTION_CONNECTION_LIMIT,
                                  kMostConnections, MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds,
                                  MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_END);
  if (!impl->daemon) return Failed("starting the HTTP server");
  listener.Release();  // the daemon's now
  return std::unique_ptr<PageServer>(new PageServer(std::move(impl)));
}

}  // namespace stillhouse
