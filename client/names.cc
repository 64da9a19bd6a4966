#include "client/names.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace stillhouse::client {
namespace {

constexpr size_t kMaxId = 63;

bool IsIdBody(char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-'; }

std::string Slug(absl::string_view text) {
  std::string id;
  for (const char c : text) {
    const char lower = absl::ascii_tolower(c);
    if (absl::ascii_isalnum(lower)) {
      id.push_back(lower);
    } else if (!id.empty() && id.back() != '-') {
      id.push_back('-');
    }
  }
  if (!id.empty() && absl::ascii_isdigit(id[0])) id.insert(0, "d");
  if (id.size() > kMaxId) id.resize(kMaxId);
  while (!id.empty() && id.back() == '-') id.pop_back();
  return id.empty() ? "document" : id;
}

absl::Status BadName(absl::string_view text, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not ", wanted, "."));
}

}  // namespace

bool IsValidId(absl::string_view id) {
  if (id.empty() || id.size() > kMaxId || !absl::ascii_islower(id.front()) || id.back() == '-') return false;
  for (const char c : id) {
    if (!IsIdBody(c)) return false;
  }
  return true;
}

absl::Status CheckId(absl::string_view what, absl::string_view id) {
  if (IsValidId(id)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", id, "\" cannot be a ", what,
      ": lower-case letters, digits and dashes only, at most 63, starting with a letter. Perhaps \"", Slug(id), "\"?"));
}

std::string DeriveId(absl::string_view file_or_title) {
  absl::string_view base = file_or_title;
  while (base.size() > 1 && base.back() == '/') base.remove_suffix(1);
  if (const size_t slash = base.rfind('/'); slash != absl::string_view::npos) base.remove_prefix(slash + 1);
  // "notes.txt" loses its extension, "Apache-2.0" and ".profile" lose nothing: an extension starts with a letter.
  if (const size_t dot = base.rfind('.');
      dot != absl::string_view::npos && dot > 0 && dot + 1 < base.size() && absl::ascii_isalpha(base[dot + 1])) {
    base = base.substr(0, dot);
  }
  return Slug(base);
}

absl::StatusOr<std::string> CorpusName(absl::string_view tenant, absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  if (parts.size() == 1 && IsValidId(parts[0])) return absl::StrCat(tenant, "/corpora/", parts[0]);
  if (parts.size() == 4 && parts[0] == "tenants" && IsValidId(parts[1]) && parts[2] == "corpora" &&
      IsValidId(parts[3])) {
    return std::string(text);
  }
  return BadName(text, "a corpus: write its id, such as handbook, or tenants/TENANT/corpora/CORPUS");
}

absl::StatusOr<std::string> CacheName(absl::string_view tenant, absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '/');
  if (parts.size() == 2 && IsValidId(parts[0]) && IsValidId(parts[1])) {
    return absl::StrCat(tenant, "/corpora/", parts[0], "/caches/", parts[1]);
  }
  if (parts.size() == 6 && parts[0] == "tenants" && IsValidId(parts[1]) && parts[2] == "corpora" &&
      IsValidId(parts[3]) && parts[4] == "caches" && IsValidId(parts[5])) {
    return std::string(text);
  }
  return BadName(text,
                 "a cache: write CORPUS/CACHE, such as handbook/quick, or "
                 "tenants/TENANT/corpora/CORPUS/caches/CACHE");
}

absl::StatusOr<std::string> MemoryName(absl::string_view tenant, absl::string_view text) {
  if (auto cache = CacheName(tenant, text); cache.ok()) return cache;
  if (auto corpus = CorpusName(tenant, text); corpus.ok()) return corpus;
  return BadName(text, "a memory: write CORPUS/CACHE, or CORPUS for its newest cache");
}

absl::StatusOr<std::string> OperationName(absl::string_view text) {
  const absl::string_view id = absl::StripPrefix(text, "operations/");
  if (id.empty() || absl::StrContains(id, '/')) return BadName(text, "an operation: write operations/ID or ID");
  return absl::StrCat("operations/", id);
}

absl::StatusOr<std::string> TenantName(absl::string_view text) {
  const absl::string_view id = absl::StripPrefix(text, "tenants/");
  if (auto status = CheckId("tenant id", id); !status.ok()) return status;
  return absl::StrCat("tenants/", id);
}

std::string ShortName(absl::string_view name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '/');
  if (parts.size() == 6 && parts[0] == "tenants" && parts[4] == "caches") return absl::StrCat(parts[3], "/", parts[5]);
  if (parts.size() == 4 && parts[0] == "tenants" && parts[2] == "corpora") return std::string(parts[3]);
  if (parts.size() == 2 && (parts[0] == "operations" || parts[0] == "tenants")) return std::string(parts[1]);
  return std::string(name);
}

}  // namespace stillhouse::client
