#include "server/service/call.h"

#include <chrono>
#include <optional>

#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "server/metrics/metrics.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/reason.h"
#include "server/tenancy/resource_name.h"

namespace stillhouse {

absl::StatusOr<Caller> Authenticate(const ServiceContext& service, const grpc::CallbackServerContext& context) {
  if (service.draining.load()) {
    service.metrics->Increment(Metric::kAdmissionRejections, {"draining"});
    return WithReason(absl::UnavailableError("the server is stopping; call another one"), "DRAINING");
  }
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  std::optional<std::string_view> authorization;
  if (begin != end) {
    if (std::next(begin) != end) {
      return WithReason(absl::UnauthenticatedError("the call has more than one authorization entry; send one"),
                        "KEY_MALFORMED");
    }
    authorization = std::string_view(begin->second.data(), begin->second.size());
  }
  absl::StatusOr<Caller> caller = service.authenticator->Authenticate(authorization);
  if (!caller.ok() && absl::IsUnauthenticated(caller.status())) {
    service.metrics->Increment(Metric::kAdmissionRejections, {"unauthenticated"});
  }
  return caller;
}

absl::Status CheckTenantKey(const Caller& caller) {
  if (!caller.is_admin) return absl::OkStatus();
  return WithReason(
      absl::PermissionDeniedError("the admin key manages tenants and keys only; make a key for a tenant and use it"),
      "ADMIN_KEY");
}

absl::Status CheckAdminKey(const ServiceContext& service, const Caller& caller) {
  if (caller.is_admin) return absl::OkStatus();
  if (!service.authenticator->needs_keys()) {
    return WithReason(absl::FailedPreconditionError(
                          "this server runs without keys and has one tenant, tenants/default; start it with "
                          "--admin-key-file to manage tenants"),
                      "KEYS_NOT_IN_USE");
  }
  return WithReason(absl::PermissionDeniedError("this needs the admin key"), "ADMIN_KEY_NEEDED");
}

absl::StatusOr<std::string> ResolveParent(const Caller& caller, std::string_view parent) {
  if (parent.empty()) return caller.tenant;
  STILLHOUSE_ASSIGN_OR_RETURN(std::string tenant, ParseTenantName(parent));
  STILLHOUSE_RETURN_IF_ERROR(CheckOwns(caller, tenant, parent));
  return tenant;
}

absl::Time Deadline(const grpc::CallbackServerContext& context) {
  const std::chrono::system_clock::time_point deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

absl::Status CancelledStatus(const grpc::CallbackServerContext& context) {
  if (context.deadline() <= std::chrono::system_clock::now()) {
    return absl::DeadlineExceededError("the call's deadline passed");
  }
  return absl::CancelledError("the caller cancelled the call");
}

CallCounter::CallCounter(ServiceContext* service, const char* method) : service_(service), method_(method) {
  service_->metrics->Increment(Metric::kGrpcStarted, {method_});
  service_->calls_in_flight.fetch_add(1);
}

grpc::Status CallCounter::Finish(const absl::Status& status) const {
  service_->metrics->Increment(Metric::kGrpcHandled, {method_, CodeName(status.code())});
  if (IsQuotaReason(ReasonOf(status))) service_->metrics->Increment(Metric::kAdmissionRejections, {"quota"});
  service_->calls_in_flight.fetch_sub(1);
  return ToGrpcStatus(status);
}

}  // namespace stillhouse
