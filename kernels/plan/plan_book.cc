#include "kernels/plan/plan_book.h"

#include <array>
#include <cmath>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/logging.h"
#include "kernels/base/strings.h"
#include "kernels/plan/shipped_plans.h"

namespace stillhouse {
namespace {

constexpr std::string_view kTitle = "stillhouse-plans";
constexpr std::string_view kVersion = "1";
constexpr size_t kMaxName = 128;
constexpr double kMaxMicroseconds = 1e9;
constexpr int64_t kMaxExtent = int64_t{1} << 31;

constexpr std::array<std::string_view, 3> kDTypes = {"f32", "bf16", "mixed"};
constexpr std::array<std::string_view, 3> kLayouts = {"b-rows", "b-columns", "other"};
constexpr std::array<std::string_view, 7> kEpilogues = {"element",     "row", "none", "normed",
                                                        "scaled-rows", "glu", "turn"};
constexpr std::array<std::string_view, 6> kBuckets = {"1", "2-8", "9-32", "33-128", "129-512", "513+"};
constexpr std::array<std::string_view, 8> kWays = {"slices",     "fragments", "cluster", "exchange",
                                                   "warpgroups", "library",   "skinny",  "wide"};

template <typename E, size_t kCount>
std::string_view NameOf(const std::array<std::string_view, kCount>& names, E value) {
  return names[static_cast<size_t>(value)];
}

template <typename E, size_t kCount>
bool ParseName(const std::array<std::string_view, kCount>& names, std::string_view text, E* value) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == text) {
      *value = static_cast<E>(i);
      return true;
    }
  }
  return false;
}

bool ParseNumber(std::string_view text, int64_t least, int64_t most, int64_t* value) {
  return !text.empty() && text[0] >= '0' && text[0] <= '9' && absl::SimpleAtoi(ToAbsl(text), value) &&
         *value >= least && *value <= most;
}

// Words of a line; name="…" may hold blanks. False for a quote that does not end.
bool Split(std::string_view line, std::vector<std::string_view>* words) {
  size_t i = 0;
  while (i < line.size()) {
    if (line[i] == ' ' || line[i] == '\t') {
      ++i;
      continue;
    }
    if (line[i] == '#') return true;
    const size_t begin = i;
    bool quoted = false;
    while (i < line.size() && (quoted || (line[i] != ' ' && line[i] != '\t'))) quoted ^= line[i++] == '"';
    if (quoted) return false;
    words->push_back(line.substr(begin, i - begin));
  }
  return true;
}

std::optional<std::string> Unquote(std::string_view text) {
  if (text.size() < 3 || text.size() > kMaxName + 2 || text.front() != '"' || text.back() != '"') return std::nullopt;
  text = text.substr(1, text.size() - 2);
  for (char c : text) {
    if (c == '"' || c < ' ' || c > '~') return std::nullopt;
  }
  return std::string(text);
}

// The plan of a line's words after the first; says what is wrong with them.
std::optional<std::string> ParsePlan(const std::vector<std::string_view>& words, DecomposeKKey* key, TimedPlan* plan) {
  enum Field { kGpu, kDType, kM, kN, kK, kLayout, kEpilogue, kWay, kTile, kSplits, kUs, kFields };
  constexpr std::array<std::string_view, kFields> kNames = {"gpu",      "dtype", "m",    "n",      "k", "layout",
                                                            "epilogue", "way",   "tile", "splits", "us"};
  std::array<bool, kFields> seen = {};
  for (size_t i = 1; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    Field field = kFields;
    if (equals == std::string_view::npos || !ParseName(kNames, words[i].substr(0, equals), &field)) {
      return StrCat("unknown word '", words[i].substr(0, 40), "'");
    }
    if (seen[field]) return StrCat(kNames[field], " is said twice");
    seen[field] = true;
    const std::string_view text = words[i].substr(equals + 1);
    int64_t number = 0;
    bool good = false;
    switch (field) {
      case kGpu:
        if (auto name = Unquote(text)) {
          key->gpu = *std::move(name);
          good = true;
        }
        break;
      case kDType:
        good = ParseName(kDTypes, text, &key->dtype);
        break;
      case kM:
        good = ParseName(kBuckets, text, &key->m);
        break;
      case kN:
        good = ParseNumber(text, 1, kMaxExtent, &key->n);
        break;
      case kK:
        good = ParseNumber(text, 1, kMaxExtent, &key->k);
        break;
      case kLayout:
        good = ParseName(kLayouts, text, &key->layout);
        break;
      case kEpilogue:
        good = ParseName(kEpilogues, text, &key->epilogue);
        break;
      case kWay:
        good = ParseName(kWays, text, &plan->plan.way);
        break;
      case kTile: {
        const size_t x = text.find('x');
        int64_t n = 0;
        good = x != std::string_view::npos && ParseNumber(text.substr(0, x), 1, 1024, &number) &&
               ParseNumber(text.substr(x + 1), 1, 1024, &n);
        plan->plan.tile_m = static_cast<int>(number);
        plan->plan.tile_n = static_cast<int>(n);
        break;
      }
      case kSplits:
        good = ParseNumber(text, 1, 65535, &number);
        plan->plan.splits = static_cast<int>(number);
        break;
      case kUs:
        good = absl::SimpleAtod(ToAbsl(text), &plan->microseconds) && std::isfinite(plan->microseconds) &&
               plan->microseconds >= 0.0 && plan->microseconds <= kMaxMicroseconds;
        break;
      case kFields:
        break;
    }
    if (!good) return StrCat("'", text.substr(0, 40), "' is no ", kNames[field]);
  }
  for (int i = 0; i < kFields; ++i) {
    if (!seen[i] && i != kUs) return StrCat(kNames[i], " is missing");
  }
  return std::nullopt;
}

}  // namespace

RowBucket BucketOf(int64_t m) {
  return m <= 1     ? RowBucket::k1
         : m <= 8   ? RowBucket::k2
         : m <= 32  ? RowBucket::k9
         : m <= 128 ? RowBucket::k33
         : m <= 512 ? RowBucket::k129
                    : RowBucket::k513;
}

int64_t RowsOf(RowBucket bucket) {
  constexpr int64_t kRows[] = {1, 8, 16, 64, 256, 1024};
  return kRows[static_cast<size_t>(bucket)];
}

bool ParseRowBucket(std::string_view text, RowBucket* bucket) { return ParseName(kBuckets, text, bucket); }
bool ParsePlanLayout(std::string_view text, PlanLayout* layout) { return ParseName(kLayouts, text, layout); }
bool ParsePlanEpilogue(std::string_view text, PlanEpilogue* epilogue) { return ParseName(kEpilogues, text, epilogue); }

absl::StatusOr<PlanBook> PlanBook::Parse(std::string_view text) {
  if (text.size() > kMaxBytes) {
    return absl::InvalidArgumentError(StrCat("a plan file of ", text.size(), " bytes; at most ", kMaxBytes));
  }
  PlanBook book;
  bool titled = false;
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    const auto refuse = [&](std::string_view why) {
      return absl::InvalidArgumentError(StrCat("plan file, line ", number, ": ", why));
    };
    std::vector<std::string_view> words;
    if (!Split(line, &words)) return refuse("a quote does not end");
    if (words.empty()) continue;
    if (!titled) {
      if (words.size() != 2 || words[0] != kTitle) return refuse(StrCat("the first line is not '", kTitle, " 1'"));
      if (words[1] != kVersion) return refuse("made by a newer stillhouse-tune: make it again with this one");
      titled = true;
      continue;
    }
    if (words[0] != "decompose_k") return refuse(StrCat("unknown op '", words[0].substr(0, 40), "'"));
    DecomposeKKey key;
    TimedPlan plan;
    if (const auto wrong = ParsePlan(words, &key, &plan)) return refuse(*wrong);
    if (book.decompose_k_.size() >= static_cast<size_t>(kMaxPlans)) {
      return refuse(StrCat("more than ", kMaxPlans, " plans"));
    }
    if (!book.decompose_k_.emplace(std::move(key), plan).second) return refuse("a second plan for one key");
  }
  if (!titled) return absl::InvalidArgumentError("an empty plan file");
  return book;
}

absl::StatusOr<PlanBook> PlanBook::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(StrCat("cannot open the plan file ", path));
  // One byte more than may be, so that a longer file is refused without being read.
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::UnavailableError(StrCat("cannot read the plan file ", path));
  text.resize(static_cast<size_t>(file.gcount()));
  auto book = Parse(text);
  if (!book.ok()) return absl::Status(book.status().code(), StrCat(path, ": ", ToStd(book.status().message())));
  return book;
}

const PlanBook& PlanBook::Shipped() {
  static const PlanBook* const book = [] {
    auto* all = new PlanBook;
    for (const char* text : ShippedPlans()) {
      auto parsed = Parse(text);
      STILLHOUSE_CHECK(parsed.ok()) << parsed.status().message();
      all->AddAll(*parsed);
    }
    return all;
  }();
  return *book;
}

void PlanBook::AddAll(const PlanBook& other) {
  for (const auto& [key, plan] : other.decompose_k_) decompose_k_[key] = plan;
}

std::optional<DecomposeKPlan> PlanBook::Find(const DecomposeKKey& key) const {
  const auto it = decompose_k_.find(key);
  if (it == decompose_k_.end()) return std::nullopt;
  return it->second.plan;
}

PlanTable PlanBook::TableFor(std::string_view gpu) const {
  PlanTable table;
  for (const auto& [key, plan] : decompose_k_) {
    if (key.gpu == gpu) table.Put(key, plan.plan);
  }
  return table;
}

const DecomposeKPlan* PlanTable::Find(const DecomposeKKey& key) const {
  const auto it = plans_.find(key);
  return it == plans_.end() ? nullptr : &it->second;
}

size_t PlanTable::Hash::operator()(const DecomposeKKey& key) const {
  uint64_t hash = static_cast<uint64_t>(key.n) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(key.k);
  for (const uint64_t part : {static_cast<uint64_t>(key.dtype), static_cast<uint64_t>(key.m),
                              static_cast<uint64_t>(key.layout), static_cast<uint64_t>(key.epilogue)}) {
    hash = hash << 3 ^ hash >> 61 ^ part;
  }
  return static_cast<size_t>(hash * 0xbf58476d1ce4e5b9ull >> 16);
}

bool PlanTable::Same::operator()(const DecomposeKKey& a, const DecomposeKKey& b) const {
  return a.n == b.n && a.k == b.k && a.m == b.m && a.epilogue == b.epilogue && a.layout == b.layout &&
         a.dtype == b.dtype;
}

int PlanBook::CountFor(std::string_view text) const {
  int count = 0;
  for (const auto& [key, plan] : decompose_k_) {
    const bool begins = text.substr(0, key.gpu.size()) == key.gpu;
    count += begins && (text.size() == key.gpu.size() || text[key.gpu.size()] == ' ') ? 1 : 0;
  }
  return count;
}

std::string PlanBook::PrintLine(const DecomposeKKey& key, const TimedPlan& timed) {
  const DecomposeKPlan& plan = timed.plan;
  std::string line =
      StrCat("decompose_k gpu=\"", key.gpu, "\" dtype=", NameOf(kDTypes, key.dtype), " m=", NameOf(kBuckets, key.m),
             " n=", key.n, " k=", key.k, " layout=", NameOf(kLayouts, key.layout),
             " epilogue=", NameOf(kEpilogues, key.epilogue), " way=", NameOf(kWays, plan.way), " tile=", plan.tile_m,
             "x", plan.tile_n, " splits=", plan.splits);
  if (timed.microseconds >= 0.005) absl::StrAppend(&line, absl::StrFormat(" us=%.2f", timed.microseconds));
  return line;
}

std::string PlanBook::Print() const {
  std::string text = StrCat(kTitle, " ", kVersion, "\n");
  for (const auto& [key, plan] : decompose_k_) absl::StrAppend(&text, PrintLine(key, plan), "\n");
  return text;
}

}  // namespace stillhouse
