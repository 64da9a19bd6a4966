#include "server/metrics/page_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>

#include "tests/server/metrics/http_exchange.h"

namespace stillhouse {
namespace {

using ::testing::AllOf;
using testing::Connection;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::HttpExchange;
using testing::HttpGet;
using ::testing::Not;
using ::testing::StartsWith;

// As much as CUDA's libraries bring along: a thread that is given a stack of less cannot be made.
thread_local volatile char library_storage[192 << 10];

std::unique_ptr<PageServer> Serve(const std::function<std::string()>& make) {
  library_storage[0] = 1;
  absl::StatusOr<std::unique_ptr<PageServer>> server =
      PageServer::Start("127.0.0.1", 0, {"/metrics", "text/plain; version=0.0.4", make});
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

TEST(PageServerTest, AnswersOnePath) {
  int made = 0;
  const auto server = Serve([&] { return "page " + std::to_string(++made) + "\n"; });
  ASSERT_NE(server, nullptr);
  const int port = server->port();
  EXPECT_THAT(HttpGet(port, "/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Content-Type: text/plain; version=0.0.4\r\n"),
                    HasSubstr("Content-Length: 7\r\n"), EndsWith("\r\n\r\npage 1\n")));
  EXPECT_THAT(HttpGet(port, "/metrics?name=x"), EndsWith("page 2\n"));
  EXPECT_THAT(HttpExchange(port, {"HEAD /metrics HTTP/1.1\r\n\r\n"}),
              AllOf(HasSubstr("Content-Length: 7\r\n"), EndsWith("\r\n\r\n")));
  EXPECT_THAT(HttpGet(port, "/metricsx"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(HttpGet(port, "/"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(HttpExchange(port, {"POST /metrics HTTP/1.1\r\n\r\n"}), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(HttpExchange(port, {"nonsense\r\n\r\n"}), Not(HasSubstr("page")));
  EXPECT_THAT(HttpExchange(port, {"GET /met", "rics HTTP/1.1\r", "\nHost: x\r\n\r", "\n"}), EndsWith("page 4\n"));
  EXPECT_EQ(made, 4);
}

TEST(PageServerTest, SendsWhatNoSocketTakesAtOnce) {
  const std::string page(8 << 20, 'x');
  const auto server = Serve([&] { return page; });
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(HttpGet(server->port(), "/metrics"), EndsWith("\r\n\r\n" + page));
}

TEST(PageServerTest, ARequestWithoutEndIsRefused) {
  const auto server = Serve([] { return "page"; });
  ASSERT_NE(server, nullptr);
  Connection endless(server->port());
  endless.Send("GET /metrics HTTP/1.1\r\nX: " + std::string(40000, 'x'));
  EXPECT_THAT(endless.ReadAll(), Not(HasSubstr("page")));
}

TEST(PageServerTest, OneThatSaysNothingKeepsNobodyOutAndEndsWithTheServer) {
  auto server = Serve([] { return "page"; });
  ASSERT_NE(server, nullptr);
  const int port = server->port();
  Connection silent(port);
  ASSERT_TRUE(silent.connected());
  EXPECT_THAT(HttpGet(port, "/metrics"), EndsWith("page"));
  server.reset();
  EXPECT_EQ(silent.ReadAll(), "");
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
}

}  // namespace
}  // namespace stillhouse
