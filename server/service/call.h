// What every call does first and last: who calls, which tenant is meant, and counting. Includes gRPC.
#ifndef STILLHOUSE_SERVER_SERVICE_CALL_H_
#define STILLHOUSE_SERVER_SERVICE_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/service/service_context.h"
#include "server/service/status_map.h"
#include "server/tenancy/authenticator.h"

namespace stillhouse {

// The caller by the call's metadata. UNAVAILABLE once the server is stopping.
absl::StatusOr<Caller> Authenticate(const ServiceContext& service, const grpc::CallbackServerContext& context);

// The tenant that a `parent` field means: the caller's own if it is empty, else NOT_FOUND unless it is the caller's
// own.
absl::StatusOr<std::string> ResolveParent(const Caller& caller, std::string_view parent);
// OK for a tenant's key. PERMISSION_DENIED for the admin key, which manages tenants and nothing else.
absl::Status CheckTenantKey(const Caller& caller);
// OK for the admin key.
absl::Status CheckAdminKey(const ServiceContext& service, const Caller& caller);

// The call's deadline; infinite if it has none.
absl::Time Deadline(const grpc::CallbackServerContext& context);
// What a call that the client left, or whose time is up, ends with.
absl::Status CancelledStatus(const grpc::CallbackServerContext& context);

// Counts one call: begun when made, ended by Finish, which is called once and gives the status to end it with.
class CallCounter {
 public:
  CallCounter(ServiceContext* service, const char* method);
  grpc::Status Finish(const absl::Status& status) const;

 private:
  ServiceContext* service_;
  const char* method_;
};

// A unary call: authenticates and runs `work(caller, request, response)` on the work pool.
template <typename Request, typename Response, typename Work>
grpc::ServerUnaryReactor* RunUnary(ServiceContext* service, grpc::CallbackServerContext* context, const char* method,
                                   const Request* request, Response* response, Work work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const CallCounter counter(service, method);
  service->work.Post([=]() {
    const auto run = [&]() -> absl::Status {
      if (context->IsCancelled()) return CancelledStatus(*context);
      absl::StatusOr<Caller> caller = Authenticate(*service, *context);
      if (!caller.ok()) return caller.status();
      return work(*caller, *request, response);
    };
    reactor->Finish(counter.Finish(run()));
  });
  return reactor;
}

// The same for calls that only a tenant's key may make.
template <typename Request, typename Response, typename Work>
grpc::ServerUnaryReactor* RunTenantUnary(ServiceContext* service, grpc::CallbackServerContext* context,
                                         const char* method, const Request* request, Response* response, Work work) {
  return RunUnary(service, context, method, request, response,
                  [work](const Caller& caller, const Request& in, Response* out) -> absl::Status {
                    absl::Status allowed = CheckTenantKey(caller);
                    return allowed.ok() ? work(caller, in, out) : allowed;
                  });
}

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_CALL_H_
