#include "server/service/operations_service.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <memory>

#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "server/corpus/build_queue.h"
#include "server/service/call.h"
#include "server/service/convert.h"
#include "server/service/validation.h"
#include "server/tenancy/resource_name.h"
#include "stillhouse/v1/operations.grpc.pb.h"

namespace stillhouse {
namespace {

constexpr absl::Duration kDefaultWait = absl::Seconds(60);
constexpr absl::Duration kMaxWait = absl::Minutes(10);
constexpr absl::Duration kLookEvery = absl::Milliseconds(100);
// Before the caller's own deadline, so that it gets an answer and no error.
constexpr absl::Duration kAnswerMargin = absl::Milliseconds(200);

absl::StatusOr<std::string> OperationId(const std::string& name) { return ParseOperationName(name); }

absl::Status Hidden(const absl::Status& status, const std::string& name) {
  return absl::IsNotFound(status) ? NotFound(name) : status;
}

// Waits without holding a thread: looks at the operation on the work pool, then sets an alarm.
class WaitCall final : public grpc::ServerUnaryReactor {
 public:
  WaitCall(ServiceContext* service, grpc::CallbackServerContext* context, const v1::WaitOperationRequest* request,
           v1::Operation* response)
      : service_(service),
        context_(context),
        request_(request),
        response_(response),
        counter_(service, "WaitOperation") {
    service_->work.Post([this] { Begin(); });
  }

 private:
  void OnCancel() override {}  // the next look sees it, within kLookEvery
  void OnDone() override { delete this; }

  void Begin() {
    const absl::Status status = Prepare();
    if (!status.ok()) return Finish(counter_.Finish(status));
    Look();
  }

  absl::Status Prepare() {
    STILLHOUSE_ASSIGN_OR_RETURN(const Caller caller, Authenticate(*service_, *context_));
    STILLHOUSE_RETURN_IF_ERROR(CheckTenantKey(caller));
    tenant_ = caller.tenant;
    STILLHOUSE_ASSIGN_OR_RETURN(operation_, OperationId(request_->name()));
    absl::Duration timeout = kDefaultWait;
    if (request_->has_timeout()) {
      timeout = absl::Seconds(request_->timeout().seconds()) + absl::Nanoseconds(request_->timeout().nanos());
      if (timeout < absl::ZeroDuration()) return BadField("timeout", "is negative");
    }
    until_ = std::min(absl::Now() + std::min(timeout, kMaxWait), Deadline(*context_) - kAnswerMargin);
    return absl::OkStatus();
  }

  void Look() {
    if (context_->IsCancelled()) return Finish(counter_.Finish(CancelledStatus(*context_)));
    const absl::StatusOr<BuildInfo> info = service_->builds->Get(tenant_, operation_);
    if (!info.ok()) return Finish(counter_.Finish(Hidden(info.status(), request_->name())));
    const absl::Time now = absl::Now();
    if (IsDone(info->row.state) || now >= until_ || service_->draining.load()) {
      *response_ = ToProto(*info);
      return Finish(counter_.Finish(absl::OkStatus()));
    }
    // A new alarm each time: the old one's callback, from which this runs, may not have returned yet.
    alarm_ = std::make_unique<grpc::Alarm>();
    alarm_->Set(absl::ToChronoTime(std::min(now + kLookEvery, until_)),
                [this](bool) { service_->work.Post([this] { Look(); }); });
  }

  ServiceContext* service_;
  grpc::CallbackServerContext* context_;
  const v1::WaitOperationRequest* request_;
  v1::Operation* response_;
  CallCounter counter_;
  std::string tenant_, operation_;
  absl::Time until_;
  std::unique_ptr<grpc::Alarm> alarm_;
};

class OperationsService final : public v1::Operations::CallbackService {
 public:
  explicit OperationsService(ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* GetOperation(grpc::CallbackServerContext* context, const v1::GetOperationRequest* request,
                                         v1::Operation* response) override {
    return RunTenantUnary(
        service_, context, "GetOperation", request, response,
        [service = service_](const Caller& caller, const auto& in, v1::Operation* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const std::string id, OperationId(in.name()));
          const absl::StatusOr<BuildInfo> info = service->builds->Get(caller.tenant, id);
          if (!info.ok()) return Hidden(info.status(), in.name());
          *out = ToProto(*info);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* ListOperations(grpc::CallbackServerContext* context,
                                           const v1::ListOperationsRequest* request,
                                           v1::ListOperationsResponse* response) override {
    return RunTenantUnary(
        service_, context, "ListOperations", request, response,
        [service = service_](const Caller& caller, const auto& in, v1::ListOperationsResponse* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ResolveParent(caller, in.parent()));
          STILLHOUSE_ASSIGN_OR_RETURN(const int page_size, CheckPageSize(in.page_size()));
          OperationFilter filter;
          if (in.running_only()) filter.done = false;
          STILLHOUSE_ASSIGN_OR_RETURN(const Page<BuildInfo> page,
                                      service->builds->List(tenant, filter, {page_size, in.page_token()}));
          for (const BuildInfo& info : page.rows) *out->add_operations() = ToProto(info);
          out->set_next_page_token(page.next_page_token);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* WaitOperation(grpc::CallbackServerContext* context, const v1::WaitOperationRequest* request,
                                          v1::Operation* response) override {
    return new WaitCall(service_, context, request, response);
  }

  grpc::ServerUnaryReactor* CancelOperation(grpc::CallbackServerContext* context,
                                            const v1::CancelOperationRequest* request,
                                            v1::Operation* response) override {
    return RunTenantUnary(
        service_, context, "CancelOperation", request, response,
        [service = service_](const Caller& caller, const auto& in, v1::Operation* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const std::string id, OperationId(in.name()));
          const absl::StatusOr<BuildInfo> info = service->builds->Cancel(caller.tenant, id);
          if (!info.ok()) return Hidden(info.status(), in.name());
          *out = ToProto(*info);
          return absl::OkStatus();
        });
  }

 private:
  ServiceContext* service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeOperationsService(ServiceContext* service) {
  return std::make_unique<OperationsService>(service);
}

}  // namespace stillhouse
