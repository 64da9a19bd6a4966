// stillhouse.v1.Operations over the build queue.
#ifndef STILLHOUSE_SERVER_SERVICE_OPERATIONS_SERVICE_H_
#define STILLHOUSE_SERVER_SERVICE_OPERATIONS_SERVICE_H_

#include <memory>

#include "server/service/service_context.h"

namespace grpc {
class Service;
}

namespace stillhouse {

// The context must outlive it.
std::unique_ptr<grpc::Service> MakeOperationsService(ServiceContext* service);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_OPERATIONS_SERVICE_H_
