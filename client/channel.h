#ifndef STILLHOUSE_CLIENT_CHANNEL_H_
#define STILLHOUSE_CLIENT_CHANNEL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/synchronization/mutex.h"
#include "client/client.h"
#include "client/error.h"
#include "stillhouse/v1/caches.grpc.pb.h"
#include "stillhouse/v1/corpora.grpc.pb.h"
#include "stillhouse/v1/inference.grpc.pb.h"
#include "stillhouse/v1/operations.grpc.pb.h"
#include "stillhouse/v1/server.grpc.pb.h"
#include "stillhouse/v1/tenants.grpc.pb.h"

// Inside of the client library: what its .cc files share. The only header here that includes gRPC.
namespace stillhouse::client {

struct Cancellation::State {
  absl::Mutex mutex;
  bool cancelled ABSL_GUARDED_BY(mutex) = false;
  int next ABSL_GUARDED_BY(mutex) = 0;
  std::map<int, grpc::ClientContext*> calls ABSL_GUARDED_BY(mutex);
};

// Registers a call with a cancellation for as long as the scope lives. A null cancellation is allowed.
class CancelScope {
 public:
  CancelScope(Cancellation* cancellation, grpc::ClientContext& context);
  ~CancelScope();
  CancelScope(const CancelScope&) = delete;
  CancelScope& operator=(const CancelScope&) = delete;

 private:
  std::shared_ptr<Cancellation::State> state_;
  int id_ = 0;
};

struct Client::Impl {
  ChannelOptions options;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Corpora::Stub> corpora;
  std::unique_ptr<v1::Caches::Stub> caches;
  std::unique_ptr<v1::Inference::Stub> inference;
  std::unique_ptr<v1::Operations::Stub> operations;
  std::unique_ptr<v1::Tenants::Stub> tenants;
  std::unique_ptr<v1::Server::Stub> server;
  absl::Mutex mutex;
  std::string tenant ABSL_GUARDED_BY(mutex);

  // Sets the key and the deadline (`timeout` where given, else the client's).
  void Prepare(grpc::ClientContext& context, std::optional<absl::Duration> timeout = std::nullopt) const;
  absl::Status Translate(const grpc::Status& status) const;
  // Pauses before send number `attempt` + 1 and returns true, or returns false when `status` is final.
  bool Retry(const absl::Status& status, int attempt) const;

  // Where a tenant was chosen: makes the request speak for it, as the names that this client makes do.
  template <typename Request>
  void SetParent(Request& request) {
    absl::MutexLock lock(&mutex);
    if (request.parent().empty() && !options.tenant.empty()) request.set_parent(tenant);
  }

  // One unary call with retries; safe for calls that are idempotent or carry a request id.
  template <typename Response, typename Call>
  absl::StatusOr<Response> Unary(Call call) {
    for (int attempt = 1;; ++attempt) {
      grpc::ClientContext context;
      Prepare(context);
      Response response;
      const absl::Status status = Translate(call(&context, &response));
      if (status.ok()) return response;
      if (!Retry(status, attempt)) return status;
    }
  }

  // The same for a deletion: when an answer was lost, a repetition may find that the deletion was done.
  template <typename Response, typename Call>
  absl::Status Delete(Call call) {
    bool lost = false;
    for (int attempt = 1;; ++attempt) {
      grpc::ClientContext context;
      Prepare(context);
      Response response;
      const absl::Status status = Translate(call(&context, &response));
      if (status.ok() || (lost && absl::IsNotFound(status))) return absl::OkStatus();
      lost = lost || OriginOf(status) == Origin::kTransport;
      if (!Retry(status, attempt)) return status;
    }
  }

  // All pages of a list. `fetch(context, page_size, token, response)`, `take(response)` moves the items out.
  template <typename Item, typename Response, typename Fetch, typename Take>
  absl::StatusOr<std::vector<Item>> Pages(int64_t limit, Fetch fetch, Take take) {
    constexpr int kPage = 200;
    std::vector<Item> items;
    std::string token;
    while (true) {
      const int page = limit > 0 ? static_cast<int>(std::min<int64_t>(kPage, limit - items.size())) : kPage;
      auto response = Unary<Response>(
          [&](grpc::ClientContext* context, Response* out) { return fetch(context, page, token, out); });
      if (!response.ok()) return response.status();
      for (auto& item : *take(*response)) items.push_back(std::move(item));
      if (limit > 0 && static_cast<int64_t>(items.size()) >= limit) {
        items.resize(limit);
        return items;
      }
      if (response->next_page_token().empty()) return items;
      if (response->next_page_token() == token) return absl::InternalError("The server repeats a page token.");
      token = response->next_page_token();
    }
  }
};

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CHANNEL_H_
