#ifndef STILLHOUSE_SERVER_TOKEN_WORD_CACHE_H_
#define STILLHOUSE_SERVER_TOKEN_WORD_CACHE_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace stillhouse {

// Remembers where in the ids made so far a word was encoded, so that its next occurrence is a copy. Direct-mapped,
// sized for the text (at most 2 MiB), and owned by one call of Encode: no locks, and texts of different callers never
// meet.
class WordCache {
 public:
  explicit WordCache(size_t text_bytes) : entries_(std::bit_floor(std::clamp<size_t>(text_bytes / 8, 16, 1 << 16))) {}

  // Appends the ids of `word` if they are known.
  bool Append(std::string_view word, std::vector<int32_t>* ids) const {
    const Entry& entry = entries_[Slot(word)];
    if (entry.epoch != epoch_ || entry.word != word) return false;
    const size_t end = ids->size();
    ids->resize(end + entry.count);
    std::copy_n(ids->begin() + entry.begin, entry.count, ids->begin() + end);
    return true;
  }

  // `word` must live until Forget or the end of the cache; its ids are `count` from `begin` on.
  void Put(std::string_view word, size_t begin, size_t count) {
    if (word.size() > kMaxWord) return;
    entries_[Slot(word)] = {word, begin, static_cast<uint32_t>(count), epoch_};
  }

  void Forget() { ++epoch_; }

 private:
  static constexpr size_t kMaxWord = 256;
  struct Entry {
    std::string_view word;
    size_t begin = 0;
    uint32_t count = 0;
    uint32_t epoch = 0;
  };
  size_t Slot(std::string_view word) const {
    return std::hash<std::string_view>()(word.size() <= kMaxWord ? word : std::string_view()) & (entries_.size() - 1);
  }

  std::vector<Entry> entries_;
  uint32_t epoch_ = 1;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_TOKEN_WORD_CACHE_H_
