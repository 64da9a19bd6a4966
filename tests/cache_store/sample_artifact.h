#ifndef STILLHOUSE_TESTS_CACHE_STORE_SAMPLE_ARTIFACT_H_
#define STILLHOUSE_TESTS_CACHE_STORE_SAMPLE_ARTIFACT_H_

#include <string>
#include <vector>

#include "cache_store/artifact.h"

namespace stillhouse {

// A small artifact: 2 layers, 3 KV heads, 5 slots, width 4, fp16 keys and values, β and positions. `seed` varies the
// bytes.
struct SampleArtifact {
  ArtifactHeader header;
  std::vector<std::string> buffers;
  std::vector<ArtifactSection> sections;  // into buffers
};
SampleArtifact MakeSampleArtifact(int seed = 0);
std::string SampleArtifactFile(int seed = 0);

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_CACHE_STORE_SAMPLE_ARTIFACT_H_
