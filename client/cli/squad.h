#ifndef STILLHOUSE_CLIENT_CLI_SQUAD_H_
#define STILLHOUSE_CLIENT_CLI_SQUAD_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stillhouse::client {

// A document with questions about it that nobody trains on.
struct Document {
  std::string title;
  std::string text;
  std::vector<std::string> questions;
  // One per question; may be empty strings where the file has none.
  std::vector<std::string> answers;
};

// The articles of a file in the SQuAD format ({"data": [{"title", "paragraphs": [{"context", "qas": […]}]}]}):
// paragraphs joined by two newlines, underscores of titles shown as blanks.
absl::StatusOr<std::vector<Document>> ParseSquad(absl::string_view json);

// Chooses and joins articles. An element is a title, an index from 0, a range "3-7", or several of these joined into
// one document by '+' ("20+21+22+23"). Nothing selected: every article. Then every `join` documents become one.
absl::StatusOr<std::vector<Document>> SelectDocuments(const std::vector<Document>& articles,
                                                      const std::vector<std::string>& selection, int join);

// Texts joined by two newlines, questions one after the other, titles by " + ".
Document JoinDocuments(const std::vector<Document>& parts);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_SQUAD_H_
