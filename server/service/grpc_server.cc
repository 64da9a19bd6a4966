#include "server/service/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <vector>

#include "absl/time/clock.h"
#include "kernels/base/strings.h"
#include "server/service/caches_service.h"
#include "server/service/corpora_service.h"
#include "server/service/inference_service.h"
#include "server/service/operations_service.h"
#include "server/service/server_info_service.h"
#include "server/service/tenants_service.h"

namespace stillhouse {
namespace {

// A prompt of the longest context, with room; documents and files travel in chunks.
constexpr int kMaxReceive = 16 << 20;
constexpr int kMaxSend = 64 << 20;
constexpr int kMaxStreamsPerConnection = 1024;
constexpr int kMaxMetadata = 16 << 10;
constexpr size_t kTransportMemory = size_t{512} << 20;

std::shared_ptr<grpc::ServerCredentials> Credentials(const GrpcServerOptions& options) {
  if (options.tls_certificate.empty()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions ssl(options.tls_client_ca.empty()
                                            ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                            : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  ssl.pem_key_cert_pairs.push_back({options.tls_key, options.tls_certificate});
  ssl.pem_root_certs = options.tls_client_ca;
  return grpc::SslServerCredentials(ssl);
}

void SetLimits(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMaxReceive);
  builder->SetMaxSendMessageSize(kMaxSend);
  grpc::ResourceQuota quota("stillhouse");
  quota.Resize(kTransportMemory);
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadata);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // two servers on one port is a mistake, not a wish
  // A long prefill sends nothing for a while. The server's own pings find dead clients within a minute; a client may
  // ping every ten seconds, also while nothing is in flight, without being taken for abusive.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

}  // namespace

struct GrpcServer::Impl {
  std::vector<std::unique_ptr<grpc::Service>> services;  // outlive the server
  std::unique_ptr<grpc::Server> server;
};

GrpcServer::GrpcServer() : impl_(std::make_unique<Impl>()) {}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(ServiceContext* service,
                                                              const GrpcServerOptions& options) {
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("a TLS certificate needs its key, and a key its certificate");
  }
  static const bool once = [] {
    grpc::EnableDefaultHealthCheckService(true);
    return true;
  }();
  (void)once;
  // The plugin adds itself to every builder made afterwards; the process has one server.
  if (options.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  auto server = std::unique_ptr<GrpcServer>(new GrpcServer());
  server->service_ = service;
  grpc::ServerBuilder builder;
  SetLimits(&builder);
  builder.AddListeningPort(options.address, Credentials(options), &server->port_);
  std::vector<std::unique_ptr<grpc::Service>>& services = server->impl_->services;
  services.push_back(MakeCorporaService(service));
  services.push_back(MakeCachesService(service));
  services.push_back(MakeInferenceService(service));
  services.push_back(MakeOperationsService(service));
  services.push_back(MakeTenantsService(service));
  services.push_back(MakeServerInfoService(service));
  for (const auto& one : services) builder.RegisterService(one.get());
  server->impl_->server = builder.BuildAndStart();
  const bool socket_file = options.address.rfind("unix:", 0) == 0;
  if (server->impl_->server == nullptr || (server->port_ == 0 && !socket_file)) {
    return absl::UnavailableError(
        StrCat("cannot listen on ", options.address, ": the address is in use or not one of this machine",
               options.tls_certificate.empty() ? "" : ", or the certificates are not usable"));
  }
  if (socket_file) server->port_ = 0;
  if (auto* health = server->impl_->server->GetHealthCheckService()) health->SetServingStatus(true);
  return server;
}

GrpcServer::~GrpcServer() {
  if (impl_->server != nullptr) Drain(absl::Now());
}

void GrpcServer::Drain(absl::Time deadline) {
  if (impl_->server == nullptr) return;
  if (auto* health = impl_->server->GetHealthCheckService()) health->SetServingStatus(false);
  service_->draining.store(true);
  // The port stays open meanwhile: a health check must be able to see NOT_SERVING.
  while (service_->calls_in_flight.load() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(10));
  impl_->server->Shutdown(absl::ToChronoTime(deadline));
  impl_->server.reset();
}

}  // namespace stillhouse
