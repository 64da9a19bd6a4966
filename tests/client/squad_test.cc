#include "client/cli/squad.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace stillhouse::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kFile[] = R"({"version": "1.1", "data": [
  {"title": "First_Text", "paragraphs": [
    {"context": "Alpha.", "qas": [{"id": "1", "question": "Who?", "answers": [{"answer_start": 0, "text": "A"}]}]},
    {"context": "Beta.", "qas": [{"id": "2", "question": "What?", "answers": []}]}]},
  {"title": "Fresno,_California", "paragraphs": [{"context": "Gamma.", "qas": []}]},
  {"title": "Third", "paragraphs": [{"context": "Delta.", "qas": [{"question": "Why?"}]}]},
  {"title": "1973_oil_crisis", "paragraphs": [{"context": "Epsilon.", "qas": []}]}
]})";

std::vector<std::string> Titles(const std::vector<Document>& documents) {
  std::vector<std::string> titles;
  for (const Document& document : documents) titles.push_back(document.title);
  return titles;
}

TEST(ParseSquad, JoinsParagraphsAndKeepsQuestions) {
  const auto articles = ParseSquad(kFile);
  ASSERT_TRUE(articles.ok()) << articles.status();
  EXPECT_THAT(Titles(*articles), ElementsAre("First Text", "Fresno, California", "Third", "1973 oil crisis"));
  EXPECT_EQ((*articles)[0].text, "Alpha.\n\nBeta.");
  EXPECT_THAT((*articles)[0].questions, ElementsAre("Who?", "What?"));
  EXPECT_THAT((*articles)[0].answers, ElementsAre("A", ""));
}

TEST(ParseSquad, RefusesOtherFiles) {
  for (const char* text : {"", "{", "[]", "{}", "3", R"({"data": 3})", R"({"data": [{"title": 5}]})",
                           R"({"data": [{"paragraphs": [{"context": 1}]}]})", "{\"data\": [\xff]}"}) {
    EXPECT_FALSE(ParseSquad(text).ok()) << text;
  }
}

TEST(ParseSquad, SurvivesOddShapes) {
  const auto articles =
      ParseSquad(R"({"data": [7, {"paragraphs": [null, {"context": "X.", "qas": [1, {"question": ""}, {"question": "Q?",
                    "answers": [{"text": 4}]}]}]}]})");
  ASSERT_TRUE(articles.ok());
  EXPECT_THAT((*articles)[0].questions, ElementsAre("Q?"));
  EXPECT_THAT((*articles)[0].answers, ElementsAre(""));
}

TEST(SelectDocuments, ByTitleIndexRangeAndJoin) {
  const auto articles = *ParseSquad(kFile);
  EXPECT_THAT(Titles(*SelectDocuments(articles, {}, 1)),
              ElementsAre("First Text", "Fresno, California", "Third", "1973 oil crisis"));
  EXPECT_THAT(Titles(*SelectDocuments(articles, {"third", "Fresno,_California"}, 1)),
              ElementsAre("Third", "Fresno, California"));
  EXPECT_THAT(Titles(*SelectDocuments(articles, {"1-2", "0"}, 1)),
              ElementsAre("Fresno, California", "Third", "First Text"));
  EXPECT_THAT(Titles(*SelectDocuments(articles, {"1973_oil_crisis"}, 1)), ElementsAre("1973 oil crisis"));
  const auto joined = *SelectDocuments(articles, {"0+Third"}, 1);
  ASSERT_EQ(joined.size(), 1u);
  EXPECT_EQ(joined[0].title, "First Text + Third");
  EXPECT_EQ(joined[0].text, "Alpha.\n\nBeta.\n\nDelta.");
  EXPECT_THAT(joined[0].questions, ElementsAre("Who?", "What?", "Why?"));
  EXPECT_THAT(Titles(*SelectDocuments(articles, {"0-2"}, 2)), ElementsAre("First Text + Fresno, California", "Third"));
}

TEST(SelectDocuments, SaysWhatThereIsNot) {
  const auto articles = *ParseSquad(kFile);
  EXPECT_THAT(std::string(SelectDocuments(articles, {"9"}, 1).status().message()), HasSubstr("0 to 3"));
  for (const char* element : {"-1", "2-1", "0-9", "nobody", "0+", ""}) {
    EXPECT_FALSE(SelectDocuments(articles, {element}, 1).ok()) << element;
  }
}

}  // namespace
}  // namespace stillhouse::client
