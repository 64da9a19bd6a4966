#include "client/client.h"

#include <algorithm>

#include "client/channel.h"

namespace stillhouse::client {

absl::StatusOr<std::string> Client::Tenant() {
  {
    absl::MutexLock lock(&impl_->mutex);
    if (!impl_->tenant.empty()) return impl_->tenant;
  }
  auto info = Info();
  if (!info.ok()) return info.status();
  if (info->tenant().empty()) {
    return absl::FailedPreconditionError(
        "This key is no tenant's, as an admin key is: use one made with `stillhouse tenant key create TENANT`.");
  }
  absl::MutexLock lock(&impl_->mutex);
  return impl_->tenant = info->tenant();
}

absl::StatusOr<v1::Corpus> Client::GetCorpus(const std::string& name) {
  v1::GetCorpusRequest request;
  request.set_name(name);
  return impl_->Unary<v1::Corpus>(
      [&](auto* context, auto* response) { return impl_->corpora->GetCorpus(context, request, response); });
}

absl::StatusOr<std::vector<v1::Corpus>> Client::ListCorpora(int64_t limit) {
  auto tenant = Tenant();
  if (!tenant.ok()) return tenant.status();
  v1::ListCorporaRequest request;
  request.set_parent(*tenant);
  return impl_->Pages<v1::Corpus, v1::ListCorporaResponse>(
      limit,
      [&](auto* context, int size, const std::string& token, auto* response) {
        request.set_page_size(size);
        request.set_page_token(token);
        return impl_->corpora->ListCorpora(context, request, response);
      },
      [](v1::ListCorporaResponse& response) { return response.mutable_corpora(); });
}

absl::Status Client::DeleteCorpus(const std::string& name, bool force) {
  v1::DeleteCorpusRequest request;
  request.set_name(name);
  request.set_force(force);
  return impl_->Delete<v1::DeleteCorpusResponse>(
      [&](auto* context, auto* response) { return impl_->corpora->DeleteCorpus(context, request, response); });
}

absl::StatusOr<v1::Operation> Client::Build(v1::BuildCacheRequest request) {
  if (request.request_id().empty()) request.set_request_id(NewRequestId());
  return impl_->Unary<v1::Operation>(
      [&](auto* context, auto* response) { return impl_->caches->BuildCache(context, request, response); });
}

absl::StatusOr<v1::Cache> Client::GetCache(const std::string& name) {
  v1::GetCacheRequest request;
  request.set_name(name);
  return impl_->Unary<v1::Cache>(
      [&](auto* context, auto* response) { return impl_->caches->GetCache(context, request, response); });
}

absl::StatusOr<std::vector<v1::Cache>> Client::ListCaches(const std::string& corpus, int64_t limit) {
  v1::ListCachesRequest request;
  if (corpus.empty()) {
    auto tenant = Tenant();
    if (!tenant.ok()) return tenant.status();
    request.set_parent(*tenant + "/corpora/-");
  } else {
    request.set_parent(corpus);
  }
  return impl_->Pages<v1::Cache, v1::ListCachesResponse>(
      limit,
      [&](auto* context, int size, const std::string& token, auto* response) {
        request.set_page_size(size);
        request.set_page_token(token);
        return impl_->caches->ListCaches(context, request, response);
      },
      [](v1::ListCachesResponse& response) { return response.mutable_caches(); });
}

absl::Status Client::DeleteCache(const std::string& name) {
  v1::DeleteCacheRequest request;
  request.set_name(name);
  return impl_->Delete<v1::DeleteCacheResponse>(
      [&](auto* context, auto* response) { return impl_->caches->DeleteCache(context, request, response); });
}

absl::StatusOr<v1::Finish> Client::Query(const v1::QueryRequest& wanted,
                                         const std::function<void(const v1::QueryEvent&)>& on_event,
                                         Cancellation* cancellation) {
  v1::QueryRequest request = wanted;
  impl_->SetParent(request);
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    impl_->Prepare(context);
    const CancelScope scope(cancellation, context);
    auto reader = impl_->inference->Query(&context, request);
    v1::QueryEvent event;
    v1::Finish finish;
    bool any = false;
    bool finished = false;
    while (reader->Read(&event)) {
      any = true;
      if (event.has_finish()) {
        finish = event.finish();
        finished = true;
      }
      on_event(event);
    }
    const absl::Status status = impl_->Translate(reader->Finish());
    if (status.ok() && !finished) return absl::DataLossError("The server ended the answer without saying why.");
    if (status.ok()) return finish;
    if (any || (cancellation != nullptr && cancellation->cancelled()) || !impl_->Retry(status, attempt)) return status;
  }
}

absl::StatusOr<Answer> Client::Ask(const v1::QueryRequest& request, Cancellation* cancellation) {
  Answer answer;
  bool first = true;
  const absl::Time start = absl::Now();
  auto finish = Query(
      request,
      [&](const v1::QueryEvent& event) {
        if (event.has_accepted()) answer.accepted = event.accepted();
        if (!event.has_token()) return;
        if (first) answer.first_token = absl::Now() - start;
        first = false;
        answer.text += event.token().text();
      },
      cancellation);
  if (!finish.ok()) return finish.status();
  answer.finish = *std::move(finish);
  answer.total = absl::Now() - start;
  if (first) answer.first_token = answer.total;
  return answer;
}

absl::StatusOr<v1::ScoreResponse> Client::Score(const v1::ScoreRequest& wanted) {
  v1::ScoreRequest request = wanted;
  impl_->SetParent(request);
  return impl_->Unary<v1::ScoreResponse>(
      [&](auto* context, auto* response) { return impl_->inference->Score(context, request, response); });
}

absl::StatusOr<v1::TokenizeResponse> Client::Tokenize(const v1::TokenizeRequest& request) {
  return impl_->Unary<v1::TokenizeResponse>(
      [&](auto* context, auto* response) { return impl_->inference->Tokenize(context, request, response); });
}

absl::StatusOr<v1::DetokenizeResponse> Client::Detokenize(const v1::DetokenizeRequest& request) {
  return impl_->Unary<v1::DetokenizeResponse>(
      [&](auto* context, auto* response) { return impl_->inference->Detokenize(context, request, response); });
}

absl::StatusOr<v1::Operation> Client::GetOperation(const std::string& name) {
  v1::GetOperationRequest request;
  request.set_name(name);
  return impl_->Unary<v1::Operation>(
      [&](auto* context, auto* response) { return impl_->operations->GetOperation(context, request, response); });
}

absl::StatusOr<std::vector<v1::Operation>> Client::ListOperations(bool running_only, int64_t limit) {
  v1::ListOperationsRequest request;
  impl_->SetParent(request);
  request.set_running_only(running_only);
  return impl_->Pages<v1::Operation, v1::ListOperationsResponse>(
      limit,
      [&](auto* context, int size, const std::string& token, auto* response) {
        request.set_page_size(size);
        request.set_page_token(token);
        return impl_->operations->ListOperations(context, request, response);
      },
      [](v1::ListOperationsResponse& response) { return response.mutable_operations(); });
}

absl::StatusOr<v1::Operation> Client::CancelOperation(const std::string& name) {
  v1::CancelOperationRequest request;
  request.set_name(name);
  return impl_->Unary<v1::Operation>(
      [&](auto* context, auto* response) { return impl_->operations->CancelOperation(context, request, response); });
}

absl::StatusOr<v1::Operation> Client::Wait(const std::string& name, const WaitOptions& options,
                                           const std::function<void(const v1::Operation&)>& progress) {
  const absl::Time end = absl::Now() + options.timeout;
  absl::Time heard = absl::Now();
  while (true) {
    const absl::Duration interval = std::clamp(end - absl::Now(), absl::ZeroDuration(), options.interval);
    v1::WaitOperationRequest request;
    request.set_name(name);
    const int64_t nanos = std::max<int64_t>(1, absl::ToInt64Nanoseconds(interval));
    request.mutable_timeout()->set_seconds(nanos / 1000000000);
    request.mutable_timeout()->set_nanos(static_cast<int32_t>(nanos % 1000000000));
    grpc::ClientContext context;
    impl_->Prepare(context, interval + absl::Seconds(30));
    v1::Operation operation;
    absl::Status status;
    {
      const CancelScope scope(options.cancellation, context);
      status = impl_->Translate(impl_->operations->WaitOperation(&context, request, &operation));
    }
    if (options.cancellation != nullptr && options.cancellation->cancelled()) {
      return absl::CancelledError("The wait was ended; the operation goes on.");
    }
    if (status.ok()) {
      heard = absl::Now();
      if (progress) progress(operation);
      if (operation.done()) return operation;
    } else if (!IsTransient(status) || absl::Now() - heard > options.patience) {
      return status;
    } else {
      absl::SleepFor(absl::Milliseconds(500));
    }
    if (absl::Now() >= end) {
      return absl::DeadlineExceededError("The operation is not done yet; it goes on without us.");
    }
  }
}

absl::StatusOr<std::string> Client::Result(const v1::Operation& operation) {
  if (!operation.done()) return absl::FailedPreconditionError("The operation is not done.");
  if (operation.has_error()) {
    const v1::OperationError& error = operation.error();
    return FromOperation(error.code(), error.message(), error.reason());
  }
  return operation.cache();
}

absl::StatusOr<v1::Tenant> Client::CreateTenant(const std::string& id, const std::string& display_name) {
  v1::CreateTenantRequest request;
  request.set_tenant_id(id);
  request.set_display_name(display_name);
  request.set_request_id(NewRequestId());
  return impl_->Unary<v1::Tenant>(
      [&](auto* context, auto* response) { return impl_->tenants->CreateTenant(context, request, response); });
}

absl::StatusOr<v1::Tenant> Client::GetTenant(const std::string& name) {
  v1::GetTenantRequest request;
  request.set_name(name);
  return impl_->Unary<v1::Tenant>(
      [&](auto* context, auto* response) { return impl_->tenants->GetTenant(context, request, response); });
}

absl::StatusOr<std::vector<v1::Tenant>> Client::ListTenants(int64_t limit) {
  v1::ListTenantsRequest request;
  return impl_->Pages<v1::Tenant, v1::ListTenantsResponse>(
      limit,
      [&](auto* context, int size, const std::string& token, auto* response) {
        request.set_page_size(size);
        request.set_page_token(token);
        return impl_->tenants->ListTenants(context, request, response);
      },
      [](v1::ListTenantsResponse& response) { return response.mutable_tenants(); });
}

absl::Status Client::DeleteTenant(const std::string& name) {
  v1::DeleteTenantRequest request;
  request.set_name(name);
  return impl_->Delete<v1::DeleteTenantResponse>(
      [&](auto* context, auto* response) { return impl_->tenants->DeleteTenant(context, request, response); });
}

absl::StatusOr<v1::Key> Client::CreateKey(const std::string& tenant, const std::string& display_name) {
  v1::CreateKeyRequest request;
  request.set_parent(tenant);
  request.set_display_name(display_name);
  // Not idempotent: a lost answer must not leave a second key that nobody knows of, so it is sent once.
  grpc::ClientContext context;
  impl_->Prepare(context);
  v1::Key key;
  const absl::Status status = impl_->Translate(impl_->tenants->CreateKey(&context, request, &key));
  if (!status.ok()) return status;
  return key;
}

absl::StatusOr<std::vector<v1::Key>> Client::ListKeys(const std::string& tenant) {
  v1::ListKeysRequest request;
  request.set_parent(tenant);
  auto response = impl_->Unary<v1::ListKeysResponse>(
      [&](auto* context, auto* out) { return impl_->tenants->ListKeys(context, request, out); });
  if (!response.ok()) return response.status();
  return std::vector<v1::Key>(response->keys().begin(), response->keys().end());
}

absl::Status Client::DeleteKey(const std::string& name) {
  v1::DeleteKeyRequest request;
  request.set_name(name);
  return impl_->Delete<v1::DeleteKeyResponse>(
      [&](auto* context, auto* response) { return impl_->tenants->DeleteKey(context, request, response); });
}

absl::StatusOr<v1::ServerInfo> Client::Info() {
  return impl_->Unary<v1::ServerInfo>(
      [&](auto* context, auto* response) { return impl_->server->GetServerInfo(context, {}, response); });
}

absl::StatusOr<v1::ListModelsResponse> Client::Models() {
  return impl_->Unary<v1::ListModelsResponse>(
      [&](auto* context, auto* response) { return impl_->server->ListModels(context, {}, response); });
}

absl::StatusOr<v1::ListKernelsResponse> Client::Kernels() {
  return impl_->Unary<v1::ListKernelsResponse>(
      [&](auto* context, auto* response) { return impl_->server->ListKernels(context, {}, response); });
}

}  // namespace stillhouse::client
