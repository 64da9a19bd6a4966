// stillhouse.v1.Inference over the engine and the directory.
#ifndef STILLHOUSE_SERVER_SERVICE_INFERENCE_SERVICE_H_
#define STILLHOUSE_SERVER_SERVICE_INFERENCE_SERVICE_H_

#include <memory>

#include "server/service/service_context.h"

namespace grpc {
class Service;
}

namespace stillhouse {

// The context must outlive it.
std::unique_ptr<grpc::Service> MakeInferenceService(ServiceContext* service);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_INFERENCE_SERVICE_H_
