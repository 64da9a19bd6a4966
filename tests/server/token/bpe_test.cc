#include "server/token/bpe.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace stillhouse {
namespace {

// Tokens 0..255 are the bytes; merges are (left, right) with the rank of their order and the result 256 + order.
struct Vocabulary {
  std::vector<std::pair<int32_t, int32_t>> merges;
  std::array<int32_t, 256> byte_ids;

  Vocabulary() {
    for (int b = 0; b < 256; ++b) byte_ids[b] = b;
  }
  BpeMerges Build() const {
    BpeMerges bpe(byte_ids, merges.size(), /*longest_token=*/64);
    for (size_t i = 0; i < merges.size(); ++i) {
      bpe.Add(merges[i].first, merges[i].second, static_cast<uint32_t>(i), 256 + static_cast<int32_t>(i));
    }
    return bpe;
  }
  // The definition, step by step.
  std::vector<int32_t> Naive(const std::string& word) const {
    std::map<std::pair<int32_t, int32_t>, size_t> rank;
    for (size_t i = 0; i < merges.size(); ++i) rank.emplace(merges[i], i);
    std::vector<int32_t> ids;
    for (const char c : word) {
      if (byte_ids[static_cast<uint8_t>(c)] >= 0) ids.push_back(byte_ids[static_cast<uint8_t>(c)]);
    }
    while (true) {
      size_t best = SIZE_MAX, at = 0;
      for (size_t i = 0; i + 1 < ids.size(); ++i) {
        const auto it = rank.find({ids[i], ids[i + 1]});
        if (it != rank.end() && it->second < best) best = it->second, at = i;
      }
      if (best == SIZE_MAX) return ids;
      ids[at] = 256 + static_cast<int32_t>(best);
      ids.erase(ids.begin() + at + 1);
    }
  }
};

std::vector<int32_t> Encode(const BpeMerges& bpe, const std::string& word) {
  BpeMerges::Scratch scratch;
  std::vector<int32_t> ids;
  bpe.Encode(word, &scratch, &ids);
  return ids;
}

TEST(BpeTest, AgreesWithTheDefinitionOnRandomVocabularies) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    Vocabulary vocabulary;
    const int letters = 2 + static_cast<int>(random() % 4);
    if (random() % 3 == 0) vocabulary.byte_ids['b'] = -1;
    const int merges = static_cast<int>(random() % 40);
    for (int i = 0; i < merges; ++i) {
      const auto pick = [&] {
        const auto k = static_cast<int32_t>(random() % (letters + vocabulary.merges.size()));
        return k < letters ? 'a' + k : 256 + k - letters;
      };
      const std::pair<int32_t, int32_t> merge(pick(), pick());
      bool known = false;
      for (const auto& other : vocabulary.merges) known |= other == merge;
      if (!known) vocabulary.merges.push_back(merge);
    }
    const BpeMerges bpe = vocabulary.Build();
    for (const int length : {0, 1, 2, 7, 63, 64, 65, 66, 200}) {  // both sides of the switch to the heap
      std::string word;
      for (int i = 0; i < length; ++i) word += static_cast<char>('a' + random() % letters);
      ASSERT_EQ(Encode(bpe, word), vocabulary.Naive(word)) << word;
    }
  }
}

TEST(BpeTest, DropsBytesWithoutATokenBeforeMerging) {
  Vocabulary vocabulary;
  vocabulary.merges = {{'a', 'c'}};
  vocabulary.byte_ids['b'] = -1;
  EXPECT_EQ(Encode(vocabulary.Build(), "abc"), (std::vector<int32_t>{256}));
  EXPECT_EQ(Encode(vocabulary.Build(), "bbb"), std::vector<int32_t>{});
}

// Merges that double a run: a, aa, aaaa, … up to 64.
Vocabulary Doubling() {
  Vocabulary vocabulary;
  vocabulary.merges = {{'a', 'a'}};
  for (int i = 0; i < 5; ++i) vocabulary.merges.push_back({256 + i, 256 + i});
  return vocabulary;
}

TEST(BpeTest, AMillionEqualBytesTakeNoQuadraticTime) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = Encode(Doubling().Build(), std::string(1000000, 'a'));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(120));
  EXPECT_EQ(ids, std::vector<int32_t>(1000000 / 64, 261));
}

TEST(BpeTest, WindowsOfAGiantWordJoinWithoutASeam) {
  Vocabulary vocabulary = Doubling();
  vocabulary.merges.push_back({'b', 'c'});
  vocabulary.byte_ids['x'] = -1;
  const BpeMerges bpe = vocabulary.Build();
  // Runs of 1 to 200 with bytes that vanish: their encodings are known one by one.
  std::string word;
  std::vector<int32_t> expected;
  std::mt19937 random(3);
  while (word.size() < 2 * BpeMerges::kWindow) {
    size_t run = 1 + random() % 200;
    word += std::string(run, 'a');
    word += "xbcx";
    for (int power = 6; power >= 0; --power) {
      for (; run >= (size_t{1} << power); run -= size_t{1} << power) expected.push_back(power == 0 ? 'a' : 255 + power);
    }
    expected.push_back(262);
  }
  EXPECT_EQ(Encode(bpe, word), expected);
  EXPECT_EQ(Encode(bpe, std::string(2 * BpeMerges::kWindow, 'a')),
            std::vector<int32_t>(2 * BpeMerges::kWindow / 64, 261));
  EXPECT_EQ(Encode(bpe, std::string(2 * BpeMerges::kWindow, 'x')), std::vector<int32_t>());
}

}  // namespace
}  // namespace stillhouse
