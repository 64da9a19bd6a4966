// The gRPC endpoint: credentials, services, health, and an orderly end.
#ifndef STILLHOUSE_SERVER_SERVICE_GRPC_SERVER_H_
#define STILLHOUSE_SERVER_SERVICE_GRPC_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/service/service_context.h"

namespace stillhouse {

struct GrpcServerOptions {
  std::string address = "127.0.0.1:7070";  // HOST:PORT (port 0 picks one) or unix:PATH
  bool reflection = false;
  // PEM texts. Certificate and key together, or neither; the client CA asks callers for a certificate that it signed.
  std::string tls_certificate, tls_key, tls_client_ca;
};

// Serves from Start until Drain or destruction. `service` outlives it, and so does everything that it points to.
class GrpcServer {
 public:
  // Serving, and healthy, when it returns. UNAVAILABLE if the address cannot be bound; INVALID_ARGUMENT for unusable
  // certificates.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(ServiceContext* service, const GrpcServerOptions& options);
  ~GrpcServer();  // ends what still runs
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // The bound port; 0 for a socket file.
  int port() const { return port_; }

  // Health becomes NOT_SERVING, new queries are refused, calls in flight may end until `deadline`; then they are
  // cancelled. Returns when none is left.
  void Drain(absl::Time deadline);

 private:
  struct Impl;
  GrpcServer();
  std::unique_ptr<Impl> impl_;
  ServiceContext* service_ = nullptr;
  int port_ = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_GRPC_SERVER_H_
