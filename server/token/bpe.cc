#include "server/token/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

constexpr uint32_t kEnd = UINT32_MAX;
// Up to this many symbols a plain search for the lowest rank is faster than a heap.
constexpr size_t kShort = 64;

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t Mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15u;
  return x ^ (x >> 32);
}

}  // namespace

BpeMerges::BpeMerges(const std::array<int32_t, 256>& byte_ids, size_t expected_merges, size_t longest_token)
    : byte_ids_(byte_ids), overlap_(std::clamp<size_t>(16 * longest_token, 4096, kWindow / 2)) {
  slots_.assign(std::bit_ceil(2 * expected_merges + 2), kEmpty);
  mask_ = slots_.size() - 1;
}

void BpeMerges::Add(int32_t left, int32_t right, uint32_t rank, int32_t result) {
  const uint64_t pair = PairKey(left, right);
  for (uint64_t i = Mix(pair) & mask_;; i = (i + 1) & mask_) {
    if (slots_[i].rank == kNone) {
      slots_[i] = {pair, rank, result};
      return;
    }
    if (slots_[i].pair == pair) return;
  }
}

const BpeMerges::Slot& BpeMerges::Find(int32_t left, int32_t right) const {
  const uint64_t pair = PairKey(left, right);
  for (uint64_t i = Mix(pair) & mask_;; i = (i + 1) & mask_) {
    if (slots_[i].rank == kNone || slots_[i].pair == pair) return slots_[i];
  }
}

void BpeMerges::Load(std::string_view word, Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  symbols.clear();
  for (const char c : word) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id < 0) continue;
    const auto n = static_cast<uint32_t>(symbols.size());
    symbols.push_back({id, kNone, n - 1, n + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = kEnd;
  for (size_t i = 0; i + 1 < symbols.size(); ++i) symbols[i].rank = Find(symbols[i].id, symbols[i + 1].id).rank;
}

void BpeMerges::MergeShort(Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  size_t count = symbols.size();
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (symbols[i].rank < symbols[best].rank) best = i;
    }
    if (symbols[best].rank == kNone) break;
    symbols[best].id = Find(symbols[best].id, symbols[best + 1].id).result;
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      symbols[i].id = symbols[i + 1].id;
      symbols[i].rank = symbols[i + 1].rank;
    }
    symbols[best].rank = best + 1 < count ? Find(symbols[best].id, symbols[best + 1].id).rank : kNone;
    if (best > 0) symbols[best - 1].rank = Find(symbols[best - 1].id, symbols[best].id).rank;
  }
  if (count > 0) symbols[count - 1].next = kEnd;
}

void BpeMerges::MergeLong(Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  const auto later = std::greater<uint64_t>();
  heap.clear();
  for (size_t i = 0; i < symbols.size(); ++i) {
    if (symbols[i].rank != kNone) heap.push_back(static_cast<uint64_t>(symbols[i].rank) << 32 | i);
  }
  std::make_heap(heap.begin(), heap.end(), later);
  const auto rank_again = [&](uint32_t i) {
    Scratch::Symbol& symbol = symbols[i];
    symbol.rank = symbol.next == kEnd ? kNone : Find(symbol.id, symbols[symbol.next].id).rank;
    if (symbol.rank == kNone) return;
    heap.push_back(static_cast<uint64_t>(symbol.rank) << 32 | i);
    std::push_heap(heap.begin(), heap.end(), later);
  };
  while (!heap.empty()) {
    const auto rank = static_cast<uint32_t>(heap.front() >> 32);
    const auto i = static_cast<uint32_t>(heap.front());
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    // A rank names one pair, so an entry is current exactly if the symbol still has its rank (dead symbols have none).
    Scratch::Symbol& symbol = symbols[i];
    if (symbol.rank != rank) continue;
    Scratch::Symbol& right = symbols[symbol.next];
    symbol.id = Find(symbol.id, right.id).result;
    symbol.next = right.next;
    right.rank = kNone;
    if (symbol.next != kEnd) symbols[symbol.next].previous = i;
    rank_again(i);
    if (i > 0) rank_again(symbol.previous);
  }
}

void BpeMerges::Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  if (word.size() > kWindow) {
    EncodeWindowed(word, scratch, ids);
    return;
  }
  Load(word, scratch);
  const auto& symbols = scratch->symbols;
  if (symbols.empty()) return;
  if (symbols.size() <= kShort) {
    MergeShort(scratch);
  } else {
    MergeLong(scratch);
  }
  for (uint32_t i = 0; i != kEnd; i = symbols[i].next) ids->push_back(symbols[i].id);
}

// Which merges happen at a place depends on a few tokens around it, so all tokens of a window but those near its end
// stand; the next window begins where the last of them ends.
void BpeMerges::EncodeWindowed(std::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  while (!word.empty()) {
    const bool last = word.size() <= kWindow;
    const std::string_view window = word.substr(0, kWindow);
    Load(window, scratch);
    MergeLong(scratch);
    const auto& symbols = scratch->symbols;
    // Symbols are counted in bytes that have a token.
    const size_t stable = last ? symbols.size() : symbols.size() - std::min(symbols.size(), overlap_);
    uint32_t i = 0;
    if (symbols.empty()) i = kEnd;
    uint32_t kept = 0;
    while (i != kEnd) {
      const uint32_t end = symbols[i].next == kEnd ? static_cast<uint32_t>(symbols.size()) : symbols[i].next;
      if (end > stable) break;
      ids->push_back(symbols[i].id);
      kept = end;
      i = symbols[i].next;
    }
    if (last) return;
    if (kept == 0) {
      // Hardly any byte of the window has a token. All of it stands; a merge across its end would be the only loss.
      for (; i != kEnd; i = symbols[i].next) ids->push_back(symbols[i].id);
      word.remove_prefix(window.size());
      continue;
    }
    size_t bytes = 0;
    for (uint32_t counted = 0; counted < kept; ++bytes) counted += byte_ids_[static_cast<uint8_t>(window[bytes])] >= 0;
    word.remove_prefix(bytes);
  }
}

}  // namespace stillhouse
