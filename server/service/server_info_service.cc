#include "server/service/server_info_service.h"

#include "server/service/call.h"
#include "server/service/convert.h"
#include "server/service/validation.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/resource_name.h"
#include "stillhouse/v1/server.grpc.pb.h"

namespace stillhouse {
namespace {

void FillLoad(const ServiceContext& service, v1::Load* load) {
  const EngineStats stats = service.engine->stats();
  load->set_running(static_cast<int32_t>(stats.running));
  load->set_waiting(static_cast<int32_t>(stats.waiting));
  load->set_kv_bytes_total(stats.pages_total * stats.page_bytes);
  load->set_kv_bytes_used((stats.pages_total - stats.pages_free) * stats.page_bytes);
  load->set_resident_caches(static_cast<int32_t>(service.directory->stats().memories));
}

absl::Status FillInfo(const ServiceContext& service, const Caller& caller, v1::ServerInfo* out) {
  const ServerFacts& facts = service.facts;
  out->set_version(facts.version);
  *out->mutable_start_time() = ToTimestamp(facts.start_time);
  out->set_backend(facts.backend);
  out->set_device(facts.device);
  out->set_threads(facts.threads);
  if (!caller.is_admin) out->set_tenant(TenantName(caller.tenant));
  out->set_model(facts.model.name);
  v1::Limits* limits = out->mutable_limits();
  limits->set_max_corpus_bytes(static_cast<int64_t>(service.quota->limits().corpus_bytes));
  limits->set_max_artifact_bytes(static_cast<int64_t>(service.quota->limits().artifact_bytes));
  limits->set_max_chunk_bytes(kMaxChunkBytes);
  limits->set_context_tokens(static_cast<int32_t>(facts.context_tokens));
  limits->set_max_sequences(facts.max_sequences);
  limits->set_max_queue(facts.max_queue);
  limits->set_max_stop_strings(kMaxStopStrings);
  limits->set_max_stop_bytes(kMaxStopBytes);
  limits->set_max_logprobs(kMaxLogprobs);
  limits->set_max_caches_per_query(kMaxCachesPerQuery);
  for (v1::Method method : {v1::CARTRIDGE, v1::ATTENTION_MATCHING, v1::FULL}) out->add_methods(method);
  FillLoad(service, out->mutable_load());
  return absl::OkStatus();
}

void FillModel(const ServerFacts& facts, v1::Model* out) {
  const ModelConfig& config = facts.model;
  out->set_name(config.name);
  out->set_architecture(config.architecture);
  out->set_fingerprint(facts.model_fingerprint);
  out->set_parameters(facts.parameters);
  out->set_weight_bytes(facts.weight_bytes);
  out->set_quantisation(facts.quantisation);
  out->set_layers(static_cast<int32_t>(config.layers));
  out->set_hidden(static_cast<int32_t>(config.hidden));
  out->set_heads(static_cast<int32_t>(config.heads));
  out->set_kv_heads(static_cast<int32_t>(config.kv_heads));
  out->set_head_dim(static_cast<int32_t>(config.head_dim));
  out->set_vocabulary(static_cast<int32_t>(config.vocabulary));
  out->set_context_tokens(static_cast<int32_t>(config.context_length));
  out->set_chat_template(facts.chat_template);
  out->set_kv_bytes_per_token(config.kv_bytes_per_slot());
}

class ServerInfoService final : public v1::Server::CallbackService {
 public:
  explicit ServerInfoService(ServiceContext* service) : service_(service) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* request,
                                          v1::ServerInfo* response) override {
    return RunUnary(service_, context, "GetServerInfo", request, response,
                    [service = service_](const Caller& caller, const auto&, v1::ServerInfo* out) {
                      return FillInfo(*service, caller, out);
                    });
  }

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override {
    return RunUnary(service_, context, "ListModels", request, response,
                    [service = service_](const Caller&, const auto&, v1::ListModelsResponse* out) {
                      FillModel(service->facts, out->add_models());
                      return absl::OkStatus();
                    });
  }

  grpc::ServerUnaryReactor* ListKernels(grpc::CallbackServerContext* context, const v1::ListKernelsRequest* request,
                                        v1::ListKernelsResponse* response) override {
    return RunUnary(service_, context, "ListKernels", request, response,
                    [service = service_](const Caller&, const auto&, v1::ListKernelsResponse* out) {
                      for (const ServerFacts::Kernel& kernel : service->facts.kernels) {
                        v1::Kernel* line = out->add_kernels();
                        line->set_op(kernel.op);
                        line->set_backend(service->facts.backend);
                        line->set_variant(kernel.variant);
                        line->set_plan(kernel.plan);
                      }
                      return absl::OkStatus();
                    });
  }

 private:
  ServiceContext* service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeServerInfoService(ServiceContext* service) {
  return std::make_unique<ServerInfoService>(service);
}

}  // namespace stillhouse
