#ifndef STILLHOUSE_TESTS_SERVER_METRICS_HTTP_EXCHANGE_H_
#define STILLHOUSE_TESTS_SERVER_METRICS_HTTP_EXCHANGE_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace stillhouse::testing {

// A connection to a port on loopback.
class Connection {
 public:
  explicit Connection(int port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool connected() const { return connected_; }
  void Send(const std::string& text) {
    EXPECT_EQ(send(fd_, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }
  // All that comes until the other side closes.
  std::string ReadAll() {
    std::string answer;
    char buffer[4096];
    for (ssize_t n; (n = read(fd_, buffer, sizeof(buffer))) > 0;) answer.append(buffer, static_cast<size_t>(n));
    return answer;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

// One exchange; the pieces of the request are sent one after the other. Empty where nobody listens.
inline std::string HttpExchange(int port, const std::vector<std::string>& pieces) {
  Connection connection(port);
  if (!connection.connected()) return "";
  for (const std::string& piece : pieces) connection.Send(piece);
  return connection.ReadAll();
}

inline std::string HttpGet(int port, const std::string& path) {
  return HttpExchange(port, {"GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n"});
}

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SERVER_METRICS_HTTP_EXCHANGE_H_
