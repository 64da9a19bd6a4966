#include "server/corpus/seeds.h"

#include "absl/types/span.h"
#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

constexpr std::string_view kQuestionLeads[] = {"What",     "Who",          "When",
                                               "Where",    "Why",          "How",
                                               "How many", "Which",        "In what year",
                                               "What is",  "What did",     "What was the",
                                               "Who was",  "Where is",     "What are the",
                                               "Is",       "Did",          "What happened",
                                               "How did",  "What kind of", "According to the text, what"};
constexpr std::string_view kStructuringLeads[] = {
    "List",         "List the",        "Make a list of", "Give a timeline of", "Name the",
    "Put in order", "Make a table of", "Outline",        "What are the main",  "Which"};
constexpr std::string_view kSummarisationLeads[] = {"Summarize",
                                                    "Summarize the",
                                                    "In one sentence, what",
                                                    "Explain briefly",
                                                    "What is the main point of",
                                                    "Give the key facts about",
                                                    "Briefly describe",
                                                    "What does the text say about",
                                                    "Explain",
                                                    "Describe"};
constexpr std::string_view kUseCaseLeads[] = {
    "How can",     "How do I", "What should I know about", "Why is it important",
    "When should", "Can I",    "What do I need",           "If I",
    "How would",   "What can"};
constexpr std::string_view kCreativeLeads[] = {
    "Imagine", "Write a short",          "Describe",           "What if", "Tell me about",
    "Invent",  "Write a sentence about", "Explain to a child", "Compare", "How would you describe"};

struct Family {
  SeedKind kind;
  absl::Span<const std::string_view> leads;
};

const Family& FamilyOf(SeedKind kind) {
  static constexpr Family kFamilies[] = {
      {SeedKind::kStructuring, kStructuringLeads}, {SeedKind::kSummarisation, kSummarisationLeads},
      {SeedKind::kQuestion, kQuestionLeads},       {SeedKind::kUseCase, kUseCaseLeads},
      {SeedKind::kCreative, kCreativeLeads},
  };
  for (const Family& family : kFamilies) {
    if (family.kind == kind) return family;
  }
  STILLHOUSE_CHECK(false) << "unknown seed kind";
  return kFamilies[0];
}

bool IsRequest(std::string_view lead) {
  for (std::string_view word :
       {"List", "Name the", "Give the", "Summarize", "Explain", "Describe", "Briefly", "Compare"}) {
    if (lead.substr(0, word.size()) == word) return true;
  }
  return false;
}

}  // namespace

uint64_t MixDraw(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0xd1342543de82ef95ull + index + 0x9e3779b97f4a7c15ull;
  for (int round = 0; round < 2; ++round) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
  }
  return x;
}

Seed DrawSeed(const std::vector<SeedKind>& kinds, uint64_t draw) {
  STILLHOUSE_CHECK(!kinds.empty());
  const Family& family = FamilyOf(kinds[MixDraw(draw, 1) % kinds.size()]);
  Seed seed;
  seed.kind = family.kind;
  seed.lead = family.leads[MixDraw(draw, 3) % family.leads.size()];
  seed.question = !IsRequest(seed.lead);
  return seed;
}

}  // namespace stillhouse
