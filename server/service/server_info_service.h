// stillhouse.v1.Server over the server's own facts.
#ifndef STILLHOUSE_SERVER_SERVICE_SERVER_INFO_SERVICE_H_
#define STILLHOUSE_SERVER_SERVICE_SERVER_INFO_SERVICE_H_

#include <memory>

#include "server/service/service_context.h"

namespace grpc {
class Service;
}

namespace stillhouse {

// The context must outlive it.
std::unique_ptr<grpc::Service> MakeServerInfoService(ServiceContext* service);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_SERVER_INFO_SERVICE_H_
