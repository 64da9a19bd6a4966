// What the command line reads: SQuAD files, question files, names that people type, and a server's error details. The
// first byte chooses.

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "client/cli/build_flags.h"
#include "client/cli/json.h"
#include "client/cli/squad.h"
#include "client/error.h"
#include "client/names.h"
#include "kernels/base/logging.h"

namespace stillhouse::client {
namespace {

void TrySquad(absl::string_view text) {
  const auto articles = ParseSquad(text);
  if (!articles.ok()) return;
  STILLHOUSE_CHECK(!articles->empty());
  for (const Document& article : *articles) {
    STILLHOUSE_CHECK(!article.text.empty() && article.questions.size() == article.answers.size());
  }
  const std::string first = articles->front().title;
  for (const std::string& selection : {first, first + "+0", std::string("0-0"), std::string("0+0"), std::string()}) {
    SelectDocuments(*articles, {selection}, 2).IgnoreError();
  }
  STILLHOUSE_CHECK(SelectDocuments(*articles, {}, 3).ok());
}

void TryQuestions(absl::string_view text) {
  const auto questions = ParseQuestions(text);
  if (!questions.ok()) return;
  STILLHOUSE_CHECK(!questions->questions.empty());
  STILLHOUSE_CHECK(questions->answers.empty() || questions->answers.size() == questions->questions.size());
}

void TryNames(absl::string_view text) {
  STILLHOUSE_CHECK(IsValidId(DeriveId(text))) << DeriveId(text);
  if (const auto name = MemoryName("tenants/t", text); name.ok()) {
    STILLHOUSE_CHECK(CacheName("tenants/t", *name).ok() || CorpusName("tenants/t", *name).ok()) << *name;
  }
  OperationName(text).IgnoreError();
  TenantName(text).IgnoreError();
  ShortName(text);
}

void TryError(absl::string_view text) {
  const absl::Status status = FromRpc(14, text.substr(0, 20), text, false);
  RetryDelay(status);
  Fact(status, "field");
  STILLHOUSE_CHECK(!Describe(status).empty() && !Dump(ErrorJson(status)).empty());
  Hint(status, "127.0.0.1:1");
}

}  // namespace
}  // namespace stillhouse::client

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace stillhouse::client;  // NOLINT
  if (size == 0) return 0;
  const absl::string_view rest(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 4) {
    case 0:
      TrySquad(rest);
      break;
    case 1:
      TryQuestions(rest);
      break;
    case 2:
      TryNames(rest);
      break;
    default:
      TryError(rest);
  }
  return 0;
}
