// How the questions of self-study begin. The asker is the model itself, going on with the user's turn behind a chunk of
// the document: told in words what to ask, a small model writes statements instead.
#ifndef STILLHOUSE_SERVER_CORPUS_SEEDS_H_
#define STILLHOUSE_SERVER_CORPUS_SEEDS_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "server/corpus/build_spec.h"

namespace stillhouse {

struct Seed {
  SeedKind kind = SeedKind::kQuestion;
  std::string_view lead;  // first words of the user's turn
  bool question = true;   // ends with a question mark; else with its sentence
};

// Deterministic in `draw` (uniform 64 bits): a kind of `kinds`, then one of its leads.
Seed DrawSeed(const std::vector<SeedKind>& kinds, uint64_t draw);

// A good hash of two numbers: the source of every draw of a build, the same on all platforms.
uint64_t MixDraw(uint64_t seed, uint64_t index);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_CORPUS_SEEDS_H_
