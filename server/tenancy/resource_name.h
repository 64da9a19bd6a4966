// Names of things as callers write them: tenants/{t}, tenants/{t}/corpora/{c}, tenants/{t}/corpora/{c}/caches/{k},
// tenants/{t}/keys/{key}, operations/{o}.
#ifndef STILLHOUSE_SERVER_TENANCY_RESOURCE_NAME_H_
#define STILLHOUSE_SERVER_TENANCY_RESOURCE_NAME_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace stillhouse {

struct CorpusName {
  std::string tenant;
  std::string corpus;
  std::string ToString() const;
  friend bool operator==(const CorpusName&, const CorpusName&) = default;
};

struct CacheName {
  std::string tenant;
  std::string corpus;
  std::string cache;
  std::string ToString() const;
  friend bool operator==(const CacheName&, const CacheName&) = default;
};

struct KeyName {
  std::string tenant;
  std::string key;
  std::string ToString() const;
};

// INVALID_ARGUMENT, with the expected form, for anything else. Ids match ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$.
absl::StatusOr<std::string> ParseTenantName(std::string_view name);
absl::StatusOr<CorpusName> ParseCorpusName(std::string_view name);
absl::StatusOr<CacheName> ParseCacheName(std::string_view name);
absl::StatusOr<KeyName> ParseKeyName(std::string_view name);
absl::StatusOr<std::string> ParseOperationName(std::string_view name);
// A cache's name, or a corpus' (then `cache` is empty).
absl::StatusOr<CacheName> ParseCacheOrCorpusName(std::string_view name);
// tenants/{t}/corpora/{c}, where {c} may be "-" for all (then `corpus` is empty).
absl::StatusOr<CorpusName> ParseCorpusNameOrAll(std::string_view name);

std::string TenantName(std::string_view tenant);
std::string OperationName(std::string_view operation);

// INVALID_ARGUMENT that names `field` unless `id` is a well-formed id.
absl::Status CheckResourceId(std::string_view id, std::string_view field);

// Lower- or upper-case UUID, 8-4-4-4-12.
bool IsUuid(std::string_view text);
// A fresh random one (version 4).
std::string MakeUuid();
// `characters` random ones of [a-z0-9], for ids.
std::string RandomSuffix(int characters);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TENANCY_RESOURCE_NAME_H_
