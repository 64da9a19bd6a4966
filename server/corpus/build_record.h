// What is written down of a build, beside the memory itself.
#ifndef STILLHOUSE_SERVER_CORPUS_BUILD_RECORD_H_
#define STILLHOUSE_SERVER_CORPUS_BUILD_RECORD_H_

#include <string>
#include <string_view>

#include "cache_store/artifact.h"
#include "server/corpus/build_spec.h"

namespace stillhouse {

// The recipe without what is the caller's own: ids, and texts (their number stays).
std::string ProvenanceJson(const BuildSpec& spec);

// What the catalog says of the cache without opening its file.
std::string SummaryJson(const ArtifactHeader& header, std::string_view display_name);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_BUILD_RECORD_H_
