// stillhouse.v1.Corpora over the store's upload sessions.
#ifndef STILLHOUSE_SERVER_SERVICE_CORPORA_SERVICE_H_
#define STILLHOUSE_SERVER_SERVICE_CORPORA_SERVICE_H_

#include <memory>

#include "server/service/service_context.h"

namespace grpc {
class Service;
}

namespace stillhouse {

// The context must outlive it.
std::unique_ptr<grpc::Service> MakeCorporaService(ServiceContext* service);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_CORPORA_SERVICE_H_
