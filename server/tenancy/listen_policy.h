// Whether a server may listen where it was told to.
#ifndef STILLHOUSE_SERVER_TENANCY_LISTEN_POLICY_H_
#define STILLHOUSE_SERVER_TENANCY_LISTEN_POLICY_H_

#include <string_view>

#include "absl/status/status.h"

namespace stillhouse {

struct ListenPlan {
  std::string_view address;  // HOST:PORT, or unix:PATH
  bool keys = false;         // callers need a bearer key
  bool tls = false;          // the transport is encrypted
  bool client_certificates = false;
  bool insecure_listen = false;  // the operator said that the network is safe
};

// Only this machine can reach it: 127.0.0.0/8, ::1, localhost, or a socket file.
bool IsLoopback(std::string_view address);

// INVALID_ARGUMENT for an address that is none; FAILED_PRECONDITION for one that others can reach while nothing says
// who they are, with the flags that would.
absl::Status CheckListenPlan(const ListenPlan& plan);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_LISTEN_POLICY_H_
