#include "server/service/tenants_service.h"

#include "kernels/base/status.h"
#include "server/service/call.h"
#include "server/service/convert.h"
#include "server/service/validation.h"
#include "server/tenancy/resource_name.h"
#include "server/tenancy/tenant_registry.h"
#include "stillhouse/v1/tenants.grpc.pb.h"

namespace stillhouse {
namespace {

class TenantsService final : public v1::Tenants::CallbackService {
 public:
  explicit TenantsService(ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* CreateTenant(grpc::CallbackServerContext* context, const v1::CreateTenantRequest* request,
                                         v1::Tenant* response) override {
    return RunAdmin(context, "CreateTenant", request, response,
                    [](TenantRegistry* tenants, const auto& in, v1::Tenant* out) -> absl::Status {
                      STILLHOUSE_RETURN_IF_ERROR(CheckRequestId(in.request_id()));
                      STILLHOUSE_ASSIGN_OR_RETURN(const TenantRow row,
                                                  tenants->Create(in.tenant_id(), in.display_name(), in.request_id()));
                      *out = ToProto(row);
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* GetTenant(grpc::CallbackServerContext* context, const v1::GetTenantRequest* request,
                                      v1::Tenant* response) override {
    return RunAdmin(context, "GetTenant", request, response,
                    [](TenantRegistry* tenants, const auto& in, v1::Tenant* out) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ParseTenantName(in.name()));
                      STILLHOUSE_ASSIGN_OR_RETURN(const TenantRow row, tenants->Get(tenant));
                      STILLHOUSE_ASSIGN_OR_RETURN(const TenantUsage usage, tenants->Usage(tenant));
                      *out = ToProto(row);
                      v1::TenantUsage* used = out->mutable_usage();
                      used->set_corpora(static_cast<int64_t>(usage.corpora));
                      used->set_corpora_bytes(static_cast<int64_t>(usage.corpus_bytes));
                      used->set_caches(static_cast<int64_t>(usage.caches));
                      used->set_cache_bytes(static_cast<int64_t>(usage.cache_bytes));
                      used->set_uploads(static_cast<int64_t>(usage.uploads));
                      used->set_upload_bytes(static_cast<int64_t>(usage.upload_bytes));
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* ListTenants(grpc::CallbackServerContext* context, const v1::ListTenantsRequest* request,
                                        v1::ListTenantsResponse* response) override {
    return RunAdmin(
        context, "ListTenants", request, response,
        [](TenantRegistry* tenants, const auto& in, v1::ListTenantsResponse* out) -> absl::Status {
          STILLHOUSE_ASSIGN_OR_RETURN(const int page_size, CheckPageSize(in.page_size()));
          STILLHOUSE_ASSIGN_OR_RETURN(const Page<TenantRow> page, tenants->List({page_size, in.page_token()}));
          for (const TenantRow& row : page.rows) *out->add_tenants() = ToProto(row);
          out->set_next_page_token(page.next_page_token);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* UpdateTenant(grpc::CallbackServerContext* context, const v1::UpdateTenantRequest* request,
                                         v1::Tenant* response) override {
    return RunAdmin(context, "UpdateTenant", request, response,
                    [](TenantRegistry* tenants, const auto& in, v1::Tenant* out) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ParseTenantName(in.tenant().name()));
                      STILLHOUSE_ASSIGN_OR_RETURN(
                          const TenantRow row,
                          tenants->SetDisplayName(tenant, in.tenant().display_name(), in.tenant().etag()));
                      *out = ToProto(row);
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* DeleteTenant(grpc::CallbackServerContext* context, const v1::DeleteTenantRequest* request,
                                         v1::DeleteTenantResponse* response) override {
    return RunAdmin(context, "DeleteTenant", request, response,
                    [](TenantRegistry* tenants, const auto& in, auto*) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ParseTenantName(in.name()));
                      return tenants->Delete(tenant, in.etag());
                    });
  }

  grpc::ServerUnaryReactor* CreateKey(grpc::CallbackServerContext* context, const v1::CreateKeyRequest* request,
                                      v1::Key* response) override {
    return RunAdmin(context, "CreateKey", request, response,
                    [](TenantRegistry* tenants, const auto& in, v1::Key* out) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ParseTenantName(in.parent()));
                      STILLHOUSE_ASSIGN_OR_RETURN(const NewKey key, tenants->CreateKey(tenant, in.display_name()));
                      *out = ToProto(key.row);
                      out->set_secret(key.secret);
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* ListKeys(grpc::CallbackServerContext* context, const v1::ListKeysRequest* request,
                                     v1::ListKeysResponse* response) override {
    return RunAdmin(context, "ListKeys", request, response,
                    [](TenantRegistry* tenants, const auto& in, v1::ListKeysResponse* out) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::string tenant, ParseTenantName(in.parent()));
                      STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<ApiKeyRow> rows, tenants->ListKeys(tenant));
                      for (const ApiKeyRow& row : rows) *out->add_keys() = ToProto(row);
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* DeleteKey(grpc::CallbackServerContext* context, const v1::DeleteKeyRequest* request,
                                      v1::DeleteKeyResponse* response) override {
    return RunAdmin(context, "DeleteKey", request, response,
                    [](TenantRegistry* tenants, const auto& in, auto*) -> absl::Status {
                      STILLHOUSE_ASSIGN_OR_RETURN(const KeyName name, ParseKeyName(in.name()));
                      return tenants->RevokeKey(name.tenant, name.key);
                    });
  }

 private:
  template <typename Request, typename Response, typename Work>
  grpc::ServerUnaryReactor* RunAdmin(grpc::CallbackServerContext* context, const char* method, const Request* request,
                                     Response* response, Work work) {
    return RunUnary(service_, context, method, request, response,
                    [service = service_, work](const Caller& caller, const Request& in, Response* out) -> absl::Status {
                      STILLHOUSE_RETURN_IF_ERROR(CheckAdminKey(*service, caller));
                      return work(service->tenants, in, out);
                    });
  }

  ServiceContext* service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeTenantsService(ServiceContext* service) {
  return std::make_unique<TenantsService>(service);
}

}  // namespace stillhouse
