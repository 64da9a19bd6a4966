#include "server/tenancy/resource_name.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cache_store/store.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

constexpr std::string_view kIdRule = "ids are 1 to 63 of a-z, 0-9 and '-', begin with a letter and do not end with '-'";
constexpr size_t kMaxName = 512;

// What a message may quote of a caller's text.
std::string Quoted(std::string_view text) {
  std::string out = "'";
  for (char c : text.substr(0, 80)) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  if (text.size() > 80) out += "...";
  return out + "'";
}

absl::Status BadName(std::string_view name, std::string_view form) {
  return WithReason(absl::InvalidArgumentError(absl::StrCat(Quoted(name), " is not a name of the form ",
                                                            std::string(form), "; ", std::string(kIdRule))),
                    "INVALID_NAME");
}

// Splits at '/' and checks the collection words at the even places. Returns the ids.
bool Match(std::string_view name, const std::vector<std::string_view>& collections, std::vector<std::string>* ids) {
  if (name.size() > kMaxName) return false;
  ids->clear();
  for (size_t i = 0; i < collections.size(); ++i) {
    if (i > 0) {
      if (name.empty() || name.front() != '/') return false;
      name.remove_prefix(1);
    }
    const std::string_view word = collections[i];
    if (name.substr(0, word.size()) != word || name.size() <= word.size() || name[word.size()] != '/') return false;
    name.remove_prefix(word.size() + 1);
    const size_t end = name.find('/');
    ids->emplace_back(name.substr(0, end));
    name.remove_prefix(end == std::string_view::npos ? name.size() : end);
  }
  return name.empty();
}

bool AllIds(const std::vector<std::string>& ids) {
  for (const std::string& id : ids) {
    if (!IsResourceId(id)) return false;
  }
  return true;
}

std::string_view Digits() { return "abcdefghijklmnopqrstuvwxyz0123456789"; }

}  // namespace

std::string CorpusName::ToString() const { return absl::StrCat("tenants/", tenant, "/corpora/", corpus); }
std::string CacheName::ToString() const {
  return absl::StrCat("tenants/", tenant, "/corpora/", corpus, "/caches/", cache);
}
std::string KeyName::ToString() const { return absl::StrCat("tenants/", tenant, "/keys/", key); }
std::string TenantName(std::string_view tenant) { return absl::StrCat("tenants/", std::string(tenant)); }
std::string OperationName(std::string_view operation) { return absl::StrCat("operations/", std::string(operation)); }

absl::StatusOr<std::string> ParseTenantName(std::string_view name) {
  std::vector<std::string> ids;
  if (!Match(name, {"tenants"}, &ids) || !AllIds(ids)) return BadName(name, "tenants/{tenant}");
  return ids[0];
}

absl::StatusOr<CorpusName> ParseCorpusName(std::string_view name) {
  std::vector<std::string> ids;
  if (!Match(name, {"tenants", "corpora"}, &ids) || !AllIds(ids)) {
    return BadName(name, "tenants/{tenant}/corpora/{corpus}");
  }
  return CorpusName{ids[0], ids[1]};
}

absl::StatusOr<CorpusName> ParseCorpusNameOrAll(std::string_view name) {
  std::vector<std::string> ids;
  if (Match(name, {"tenants", "corpora"}, &ids) && ids[1] == "-" && IsResourceId(ids[0])) return CorpusName{ids[0], ""};
  return ParseCorpusName(name);
}

absl::StatusOr<CacheName> ParseCacheName(std::string_view name) {
  std::vector<std::string> ids;
  if (!Match(name, {"tenants", "corpora", "caches"}, &ids) || !AllIds(ids)) {
    return BadName(name, "tenants/{tenant}/corpora/{corpus}/caches/{cache}");
  }
  return CacheName{ids[0], ids[1], ids[2]};
}

absl::StatusOr<CacheName> ParseCacheOrCorpusName(std::string_view name) {
  std::vector<std::string> ids;
  if (Match(name, {"tenants", "corpora"}, &ids) && AllIds(ids)) return CacheName{ids[0], ids[1], ""};
  return ParseCacheName(name);
}

absl::StatusOr<KeyName> ParseKeyName(std::string_view name) {
  std::vector<std::string> ids;
  if (!Match(name, {"tenants", "keys"}, &ids) || !IsResourceId(ids[0]) || !IsKeyId(ids[1])) {
    return BadName(name, "tenants/{tenant}/keys/{key}");
  }
  return KeyName{ids[0], ids[1]};
}

absl::StatusOr<std::string> ParseOperationName(std::string_view name) {
  std::vector<std::string> ids;
  if (!Match(name, {"operations"}, &ids) || !AllIds(ids)) return BadName(name, "operations/{operation}");
  return ids[0];
}

absl::Status CheckResourceId(std::string_view id, std::string_view field) {
  if (IsResourceId(id)) return absl::OkStatus();
  const std::string named(field);
  return WithReason(
      absl::InvalidArgumentError(absl::StrCat(named, " ", Quoted(id), " is not an id: ", std::string(kIdRule))),
      "INVALID_ID", {{"field", named}});
}

bool IsUuid(std::string_view text) {
  if (text.size() != 36) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    if (dash ? c != '-' : !hex) return false;
  }
  return true;
}

std::string MakeUuid() {
  std::string bytes = RandomBytes(16);
  bytes[6] = static_cast<char>((bytes[6] & 0x0f) | 0x40);
  bytes[8] = static_cast<char>((bytes[8] & 0x3f) | 0x80);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += kHex[static_cast<unsigned char>(bytes[i]) >> 4];
    out += kHex[static_cast<unsigned char>(bytes[i]) & 15];
  }
  return out;
}

std::string RandomSuffix(int characters) {
  std::string out;
  while (static_cast<int>(out.size()) < characters) {
    for (unsigned char byte : RandomBytes(16)) {
      // 252 = 7 × 36: larger values would favour the first letters.
      if (byte < 252 && static_cast<int>(out.size()) < characters) out += Digits()[byte % 36];
    }
  }
  return out;
}

}  // namespace stillhouse
