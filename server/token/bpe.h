#ifndef STILLHOUSE_SERVER_TOKEN_BPE_H_
#define STILLHOUSE_SERVER_TOKEN_BPE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace stillhouse {

// The merges of a byte-level BPE vocabulary (Sennrich, Haddow, Birch 2016): of all neighbouring pairs that have a
// merge, the one of the lowest rank is replaced, the leftmost first, until none is left. Immutable once built: any
// thread may call Encode with a scratch of its own.
class BpeMerges {
 public:
  // Words longer than this are merged in overlapping windows of this size, which bounds the memory.
  static constexpr size_t kWindow = 1 << 20;

  // Working memory, grown as needed and reused from word to word.
  class Scratch {
   private:
    friend class BpeMerges;
    struct Symbol {
      int32_t id;
      uint32_t rank;  // of the merge with the next symbol
      uint32_t previous;
      uint32_t next;
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;  // rank << 32 | index
  };

  // `byte_ids[b]` is the token of byte b, or -1: the byte has none and is dropped before merging. Merges are to be
  // added in the order of their ranks; of two for one pair the first counts.
  explicit BpeMerges(const std::array<int32_t, 256>& byte_ids, size_t expected_merges, size_t longest_token);
  void Add(int32_t left, int32_t right, uint32_t rank, int32_t result);

  // Appends the ids of one word.
  void Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;

 private:
  struct Slot {
    uint64_t pair;  // left << 32 | right
    uint32_t rank;  // kNone: an empty slot
    int32_t result;
  };
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr Slot kEmpty = {0, kNone, -1};

  const Slot& Find(int32_t left, int32_t right) const;
  void Load(std::string_view word, Scratch* scratch) const;
  // Both reduce scratch->symbols; the live ones are linked by `next` from symbol 0.
  void MergeShort(Scratch* scratch) const;
  void MergeLong(Scratch* scratch) const;
  void EncodeWindowed(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;

  std::array<int32_t, 256> byte_ids_;
  size_t overlap_;
  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_BPE_H_
