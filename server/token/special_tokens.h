#ifndef STILLHOUSE_SERVER_TOKEN_SPECIAL_TOKENS_H_
#define STILLHOUSE_SERVER_TOKEN_SPECIAL_TOKENS_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace stillhouse {

// A set of spellings that are one token wherever they stand in a text. Build with Add, then any thread may search.
class SpecialTokens {
 public:
  struct Match {
    size_t begin;  // the end of the text if there is none
    size_t size;
    int32_t id;  // -1: none
  };

  // Empty spellings are ignored; of two equal ones the first counts.
  void Add(std::string_view text, int32_t id);

  // The leftmost occurrence of any spelling, and the longest of those that begin there.
  Match FindFirst(std::string_view text) const;

 private:
  // A trie; node 0 is the root.
  absl::flat_hash_map<uint64_t, uint32_t> children_;  // node << 8 | byte
  std::vector<int32_t> ids_ = {-1};                   // of the spelling that ends in a node
  std::bitset<256> first_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_SPECIAL_TOKENS_H_
