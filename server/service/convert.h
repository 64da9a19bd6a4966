// Rows of the store as the messages that callers see.
#ifndef STILLHOUSE_SERVER_SERVICE_CONVERT_H_
#define STILLHOUSE_SERVER_SERVICE_CONVERT_H_

#include <cstdint>

#include "absl/time/time.h"
#include "cache_store/store.h"
#include "server/corpus/build_queue.h"
#include "stillhouse/v1/caches.pb.h"
#include "stillhouse/v1/corpora.pb.h"
#include "stillhouse/v1/operations.pb.h"
#include "stillhouse/v1/tenants.pb.h"

namespace stillhouse {

google::protobuf::Timestamp ToTimestamp(absl::Time time);

v1::Method MethodFromName(std::string_view name);  // "CARTRIDGE", …; METHOD_UNSPECIFIED for others

v1::Corpus ToProto(const CorpusRow& row);
// `resident`: queries find it in memory. Numbers come from the row's summary.
v1::Cache ToProto(const ArtifactRow& row, bool resident);
v1::Operation ToProto(const BuildInfo& info);
v1::Tenant ToProto(const TenantRow& row);
v1::Key ToProto(const ApiKeyRow& row);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_CONVERT_H_
