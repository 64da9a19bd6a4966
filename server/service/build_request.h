// A BuildCache request as the specification of a build.
#ifndef STILLHOUSE_SERVER_SERVICE_BUILD_REQUEST_H_
#define STILLHOUSE_SERVER_SERVICE_BUILD_REQUEST_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "server/corpus/build_spec.h"

namespace stillhouse {

namespace v1 {
class BuildCacheRequest;
}

// The profile's defaults with every field that the request sets. Names are resolved already. The result is valid
// (ValidateBuildSpec). INVALID_ARGUMENT names the field; UNIMPLEMENTED for methods that this server cannot build.
absl::StatusOr<BuildSpec> ParseBuildRequest(const v1::BuildCacheRequest& request, std::string_view tenant,
                                            std::string_view corpus_id, std::string_view cache_id);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_BUILD_REQUEST_H_
