// The frame of a client-streaming call: messages are handled one at a time on the work pool.
#ifndef STILLHOUSE_SERVER_SERVICE_READ_CALL_H_
#define STILLHOUSE_SERVER_SERVICE_READ_CALL_H_

#include <optional>
#include <utility>
#include <vector>

#include "server/service/call.h"
#include "server/tenancy/quota.h"

namespace stillhouse {

// The next message is read when the last was handled: a slow disk slows the sender, and nothing queues here. Deletes
// itself when the call is over.
template <typename Request>
class ReadCall : public grpc::ServerReadReactor<Request> {
 public:
  ReadCall(ServiceContext* service, grpc::CallbackServerContext* context, const char* method)
      : service_(service), context_(context), counter_(service, method) {
    this->StartRead(&message_);
  }

 protected:
  // One message. The call ends at an error, or at OK with `*done`.
  virtual absl::Status OnMessage(const Request& message, bool* done) = 0;
  // The caller has sent everything.
  virtual absl::Status OnEnd() = 0;

  ServiceContext* service() const { return service_; }
  // Set before the first OnMessage.
  const Caller& caller() const { return *caller_; }
  // Given back before the caller sees the call's end.
  void Hold(Quota::Lease lease) { leases_.push_back(std::move(lease)); }

 private:
  void OnReadDone(bool ok) override {
    service_->work.Post([this, ok] { Handle(ok); });
  }
  void OnCancel() override {}  // the read in flight fails, and Handle sees why
  void OnDone() override { delete this; }

  void Handle(bool ok) {
    bool done = false;
    const absl::Status status = HandleMessage(ok, &done);
    if (status.ok() && !done) {
      this->StartRead(&message_);
      return;
    }
    leases_.clear();
    this->Finish(counter_.Finish(status));
  }

  absl::Status HandleMessage(bool ok, bool* done) {
    if (context_->IsCancelled()) return CancelledStatus(*context_);
    if (!caller_) {
      absl::StatusOr<Caller> caller = Authenticate(*service_, *context_);
      if (!caller.ok()) return caller.status();
      absl::Status allowed = CheckTenantKey(*caller);
      if (!allowed.ok()) return allowed;
      absl::StatusOr<Quota::Lease> lease = service_->quota->AdmitStream(caller->tenant);
      if (!lease.ok()) return lease.status();
      Hold(*std::move(lease));
      caller_ = *std::move(caller);
    }
    if (ok) return OnMessage(message_, done);
    *done = true;
    return OnEnd();
  }

  ServiceContext* service_;
  grpc::CallbackServerContext* context_;
  CallCounter counter_;
  Request message_;
  std::optional<Caller> caller_;
  std::vector<Quota::Lease> leases_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_READ_CALL_H_
