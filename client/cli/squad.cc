#include "client/cli/squad.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "client/cli/json.h"
#include "client/cli/session.h"

namespace stillhouse::client {
namespace {

// A string field, or nothing where it is missing or of another type.
const std::string* Text(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get_ptr<const std::string*>() : nullptr;
}

const Json& List(const Json& object, const char* key) {
  static const Json& empty = *new Json(Json::array());
  if (!object.is_object()) return empty;
  const auto it = object.find(key);
  return it != object.end() && it->is_array() ? *it : empty;
}

std::string Plain(absl::string_view title) { return absl::StrReplaceAll(title, {{"_", " "}}); }

}  // namespace

absl::StatusOr<std::vector<Document>> ParseSquad(absl::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return absl::InvalidArgumentError("not a JSON file.");
  std::vector<Document> articles;
  for (const Json& article : List(json, "data")) {
    Document document;
    if (const std::string* title = Text(article, "title")) document.title = Plain(*title);
    for (const Json& paragraph : List(article, "paragraphs")) {
      const std::string* context = Text(paragraph, "context");
      if (context == nullptr) continue;
      absl::StrAppend(&document.text, document.text.empty() ? "" : "\n\n", *context);
      for (const Json& qa : List(paragraph, "qas")) {
        const std::string* question = Text(qa, "question");
        if (question == nullptr || question->empty()) continue;
        document.questions.push_back(*question);
        const Json& answers = List(qa, "answers");
        const std::string* answer = answers.empty() ? nullptr : Text(answers.front(), "text");
        document.answers.push_back(answer != nullptr ? *answer : "");
      }
    }
    if (document.title.empty()) document.title = absl::StrCat("article ", articles.size());
    if (!document.text.empty()) articles.push_back(std::move(document));
  }
  if (articles.empty()) {
    return absl::InvalidArgumentError("no articles in it; the format is {\"data\": [{\"title\", \"paragraphs\": …}]}.");
  }
  return articles;
}

Document JoinDocuments(const std::vector<Document>& parts) {
  Document whole;
  for (const Document& part : parts) {
    absl::StrAppend(&whole.title, whole.title.empty() ? "" : " + ", part.title);
    absl::StrAppend(&whole.text, whole.text.empty() ? "" : "\n\n", part.text);
    whole.questions.insert(whole.questions.end(), part.questions.begin(), part.questions.end());
    whole.answers.insert(whole.answers.end(), part.answers.begin(), part.answers.end());
  }
  return whole;
}

absl::StatusOr<std::vector<Document>> SelectDocuments(const std::vector<Document>& articles,
                                                      const std::vector<std::string>& selection, int join) {
  const auto count = static_cast<int>(articles.size());
  const auto one = [&](absl::string_view word) -> absl::StatusOr<Document> {
    int index = 0;
    if (absl::SimpleAtoi(word, &index)) {
      if (index < 0 || index >= count) {
        return absl::InvalidArgumentError(
            absl::StrCat("There is no article ", index, ": they are 0 to ", count - 1, "."));
      }
      return articles[index];
    }
    const std::string wanted = Plain(word);
    for (const Document& article : articles) {
      if (absl::EqualsIgnoreCase(article.title, wanted)) return article;
    }
    return absl::InvalidArgumentError(absl::StrCat("There is no article \"", word, "\" in the file."));
  };

  std::vector<Document> chosen;
  for (const std::string& element : selection) {
    // A title may itself hold a dash or a plus sign.
    if (auto whole = one(element); whole.ok()) {
      chosen.push_back(*std::move(whole));
      continue;
    }
    const std::vector<absl::string_view> ends = absl::StrSplit(element, '-');
    int first = 0;
    int last = 0;
    if (ends.size() == 2 && absl::SimpleAtoi(ends[0], &first) && absl::SimpleAtoi(ends[1], &last) && first >= 0 &&
        first <= last && last < count) {
      for (int i = first; i <= last; ++i) chosen.push_back(articles[i]);
      continue;
    }
    std::vector<Document> parts;
    for (absl::string_view word : absl::StrSplit(element, '+')) {
      CLIENT_ASSIGN(parts.emplace_back(), one(word));
    }
    chosen.push_back(JoinDocuments(parts));
  }
  if (selection.empty()) chosen = articles;
  if (join <= 1) return chosen;
  std::vector<Document> joined;
  for (size_t i = 0; i < chosen.size(); i += join) {
    const size_t end = std::min(chosen.size(), i + join);
    joined.push_back(JoinDocuments({chosen.begin() + i, chosen.begin() + end}));
  }
  return joined;
}

}  // namespace stillhouse::client
