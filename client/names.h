#ifndef STILLHOUSE_CLIENT_NAMES_H_
#define STILLHOUSE_CLIENT_NAMES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Resource ids and names: `tenants/{t}/corpora/{c}/caches/{k}`. Pure functions.
namespace stillhouse::client {

// ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$
bool IsValidId(absl::string_view id);

// OK, or an INVALID_ARGUMENT that shows the rule and the nearest valid id. `what` such as "corpus id".
absl::Status CheckId(absl::string_view what, absl::string_view id);

// A valid id made from a file name or a title: the folder and one extension go, letters become lower case, every run of
// other characters becomes one dash, a leading digit gets a "d". "/a/Employee Handbook (v2).txt" gives
// "employee-handbook-v2". Never fails: nothing usable gives "document".
std::string DeriveId(absl::string_view file_or_title);

// What a person may write for a corpus: `handbook` or the full name. Returns the full name under `tenant`
// (`tenants/{t}`), or INVALID_ARGUMENT.
absl::StatusOr<std::string> CorpusName(absl::string_view tenant, absl::string_view text);

// For a cache: `handbook/quick` or the full name.
absl::StatusOr<std::string> CacheName(absl::string_view tenant, absl::string_view text);

// For a memory to answer from: a cache, or a corpus for its newest cache.
absl::StatusOr<std::string> MemoryName(absl::string_view tenant, absl::string_view text);

// `operations/x` from `x` or itself.
absl::StatusOr<std::string> OperationName(absl::string_view text);

// `tenants/x` from `x` or itself.
absl::StatusOr<std::string> TenantName(absl::string_view text);

// The shortest form that these functions accept: `handbook/quick`, `handbook`, an operation's id. Other text is
// returned as it is.
std::string ShortName(absl::string_view name);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_NAMES_H_
