#ifndef STILLHOUSE_CACHE_STORE_EMBEDDED_SCHEMA_H_
#define STILLHOUSE_CACHE_STORE_EMBEDDED_SCHEMA_H_

#include "absl/status/status.h"
#include "cache_store/embedded/database.h"

namespace stillhouse {

// Version of the catalog that this program writes (PRAGMA user_version).
inline constexpr int kCatalogVersion = 1;

// Makes a new catalog's tables, or runs the migrations that an older one lacks, one transaction each.
// FAILED_PRECONDITION for a newer catalog or a database of another program; DATA_LOSS if SQLite's quick check finds
// damage.
absl::Status BringUpToDate(Database& database);

}  // namespace stillhouse

#endif  // STILLHOUSE_CACHE_STORE_EMBEDDED_SCHEMA_H_
