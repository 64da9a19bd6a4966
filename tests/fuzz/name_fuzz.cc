// The short texts that callers send: resource names, ids, keys, page tokens, and an operator's addresses. What is
// accepted is written back as it came.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "cache_store/embedded/page_token.h"
#include "kernels/base/logging.h"
#include "server/tenancy/api_key.h"
#include "server/tenancy/authenticator.h"
#include "server/tenancy/listen_policy.h"
#include "server/tenancy/resource_name.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stillhouse;  // NOLINT
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto tenant = ParseTenantName(text); tenant.ok()) STILLHOUSE_CHECK(TenantName(*tenant) == text);
  if (const auto name = ParseCorpusName(text); name.ok()) STILLHOUSE_CHECK(name->ToString() == text);
  if (const auto name = ParseCacheName(text); name.ok()) {
    STILLHOUSE_CHECK(name->ToString() == text);
    STILLHOUSE_CHECK(!ParseCorpusName(text).ok());
  }
  if (const auto name = ParseCacheOrCorpusName(text); name.ok()) {
    STILLHOUSE_CHECK(text ==
                     (name->cache.empty() ? CorpusName{name->tenant, name->corpus}.ToString() : name->ToString()));
  }
  if (const auto name = ParseKeyName(text); name.ok()) STILLHOUSE_CHECK(name->ToString() == text);
  if (const auto operation = ParseOperationName(text); operation.ok()) {
    STILLHOUSE_CHECK(OperationName(*operation) == text);
  }
  ParseCorpusNameOrAll(text).IgnoreError();
  if (CheckResourceId(text, "id").ok()) {
    STILLHOUSE_CHECK(size >= 1 && size <= 63 &&
                     text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") == std::string_view::npos);
    STILLHOUSE_CHECK(ParseTenantName(TenantName(text)).ok());
  }
  if (IsUuid(text)) STILLHOUSE_CHECK(size == 36);

  if (const auto key = ParseApiKey(text)) {
    STILLHOUSE_CHECK(key->ToString() == text && IsKeyId(key->id));
    STILLHOUSE_CHECK(HashApiKey(*key).size() == 64);
  }
  if (const auto key = ParseAdminKey(text); key.ok()) STILLHOUSE_CHECK(text.find(*key) != std::string_view::npos);
  ListenPlan plan;
  plan.address = text;
  if (CheckListenPlan(plan).ok()) STILLHOUSE_CHECK(IsLoopback(text));

  for (size_t parts = 1; parts <= 3; ++parts) {
    const auto last = ReadPageToken("list", text, parts);
    if (!last.ok() || text.empty()) continue;
    STILLHOUSE_CHECK(last->size() == parts);
    STILLHOUSE_CHECK(*ReadPageToken("list", MakePageToken("list", *last), parts) == *last);
  }
  return 0;
}
