#include "server/tenancy/listen_policy.h"

#include <arpa/inet.h>

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace stillhouse {
namespace {

std::string_view Host(std::string_view address) {
  std::string_view host = address.substr(0, address.rfind(':'));
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return host;
}

}  // namespace

bool IsLoopback(std::string_view address) {
  if (address.substr(0, 5) == "unix:") return true;
  const std::string host(Host(address));
  if (host == "localhost") return true;
  in_addr v4{};
  // inet_pton takes four plain decimal numbers only, so "127.evil.example" is a host name and not loopback.
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6) != 0;
  return false;
}

absl::Status CheckListenPlan(const ListenPlan& plan) {
  const std::string address(plan.address);
  if (plan.address.substr(0, 5) != "unix:") {
    const size_t colon = address.rfind(':');
    int port = -1;
    if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 ||
        port > 65535) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", address, "' is no address; write HOST:PORT, such as 127.0.0.1:7070 (port 0 picks one)"));
    }
  }
  if (plan.client_certificates && !plan.tls) {
    return absl::InvalidArgumentError("--tls-client-ca needs --tls-cert and --tls-key");
  }
  if (IsLoopback(address) || plan.keys || plan.client_certificates || plan.insecure_listen) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "others can reach ", address,
      " and nothing says who they are: give --admin-key-file (bearer keys) or --tls-client-ca (client "
      "certificates), listen on loopback (127.0.0.1), or say --insecure-listen if the network itself is safe"));
}

}  // namespace stillhouse
