#ifndef STILLHOUSE_TESTS_CACHE_STORE_STORE_INVARIANTS_H_
#define STILLHOUSE_TESTS_CACHE_STORE_STORE_INVARIANTS_H_

#include <string>

#include "cache_store/store.h"

namespace stillhouse {

// Empty, or what is wrong with the store as a whole: a corpus, artifact or checkpoint of `tenant` whose bytes do not
// match its row. With `exact` (after an open), also files in blobs/, tmp/ or uploads/ that no row of the tenant
// accounts for.
std::string BrokenInvariant(Store& store, const std::string& directory, const std::string& tenant, bool exact);

// The bytes of a stored artifact.
absl::StatusOr<std::string> ReadArtifact(Store& store, const std::string& tenant, const std::string& corpus,
                                         const std::string& cache);

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_CACHE_STORE_STORE_INVARIANTS_H_
