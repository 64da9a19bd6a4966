#include "server/token/special_tokens.h"

namespace stillhouse {

void SpecialTokens::Add(std::string_view text, int32_t id) {
  if (text.empty()) return;
  first_.set(static_cast<uint8_t>(text[0]));
  uint32_t node = 0;
  for (const char c : text) {
    const auto [it, added] = children_.try_emplace(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(c),
                                                   static_cast<uint32_t>(ids_.size()));
    if (added) ids_.push_back(-1);
    node = it->second;
  }
  if (ids_[node] < 0) ids_[node] = id;
}

SpecialTokens::Match SpecialTokens::FindFirst(std::string_view text) const {
  if (first_.any()) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (!first_.test(static_cast<uint8_t>(text[i]))) continue;
      Match best = {i, 0, -1};
      uint32_t node = 0;
      for (size_t j = i; j < text.size(); ++j) {
        const auto it = children_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[j]));
        if (it == children_.end()) break;
        node = it->second;
        if (ids_[node] >= 0) best = {i, j + 1 - i, ids_[node]};
      }
      if (best.id >= 0) return best;
    }
  }
  return {text.size(), 0, -1};
}

}  // namespace stillhouse
