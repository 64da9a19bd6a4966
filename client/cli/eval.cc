#include <cmath>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cli/build_flags.h"
#include "client/cli/format.h"
#include "client/cli/report.h"
#include "client/cli/session.h"
#include "client/cli/squad.h"
#include "client/names.h"

// `stillhouse eval`: the quality table over documents with questions of their own.
namespace stillhouse::client {
namespace {

constexpr int64_t kMaxSquad = 256 << 20;
constexpr size_t kMaxQuestions = 1000;

struct EvalFlags {
  std::string squad;
  std::vector<std::string> articles;
  int join = 1;
  std::vector<std::string> documents;
  std::vector<std::string> questions;
  int max_questions = 0;
  bool gold = false;
  std::vector<std::string> methods = {"cartridge"};
  std::vector<double> ratios = {10};
  bool keep = false;
  BuildFlags recipe;
};

struct Column {
  const char* key;
  const char* header;
  int decimals;
};

// What is averaged at the end, in the order of the table.
constexpr Column kColumns[] = {
    {"corpus_tokens", "TOKENS>", 0},    {"slots", "SLOTS>", 0},
    {"recovered", "RECOVERED>", 3},     {"truncated_recovered", "TRUNCATED>", 3},
    {"nll_none", "NLL NONE>", 4},       {"nll_full", "NLL FULL>", 4},
    {"nll_cache", "NLL CACHE>", 4},     {"kl_cache", "KL>", 4},
    {"questions", "QUESTIONS>", 0},     {"generated_tokens", "GENERATED>", 0},
    {"training_tokens", "TRAINED>", 0}, {"build_seconds", "SECONDS>", 1},
};

absl::StatusOr<std::vector<Document>> Load(const EvalFlags& flags) {
  std::vector<Document> documents;
  if (!flags.squad.empty()) {
    CLIENT_ASSIGN(const std::string text, ReadText(flags.squad, kMaxSquad));
    const auto articles = ParseSquad(text);
    if (!articles.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flags.squad, ": ", articles.status().message()));
    }
    CLIENT_ASSIGN(documents, SelectDocuments(*articles, flags.articles, flags.join));
  }
  if (flags.documents.size() != flags.questions.size()) {
    return absl::InvalidArgumentError("Give one --questions file for every --document.");
  }
  for (size_t i = 0; i < flags.documents.size(); ++i) {
    Document document;
    document.title = flags.documents[i].substr(flags.documents[i].rfind('/') + 1);
    CLIENT_ASSIGN(document.text, ReadText(flags.documents[i], kMaxSquad));
    CLIENT_ASSIGN(Questions questions, ReadQuestions(flags.questions[i]));
    document.questions = std::move(questions.questions);
    document.answers = std::move(questions.answers);
    documents.push_back(std::move(document));
  }
  if (documents.empty()) return absl::InvalidArgumentError("Give --squad FILE, or --document FILE --questions FILE.");
  const size_t most = flags.max_questions > 0 ? std::min<size_t>(flags.max_questions, kMaxQuestions) : kMaxQuestions;
  for (Document& document : documents) {
    if (document.questions.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("\"", document.title, "\" has no questions."));
    }
    if (document.questions.size() > most) document.questions.resize(most);
    if (document.answers.size() > most) document.answers.resize(most);
    if (!flags.gold) {
      document.answers.clear();
      continue;
    }
    bool whole = document.answers.size() == document.questions.size();
    for (const std::string& answer : document.answers) whole = whole && !answer.empty();
    if (!whole) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", document.title, "\" has questions without an answer; leave --gold-answers out."));
    }
  }
  return documents;
}

Json Row(const Document& document, const v1::Cache& cache, double ratio) {
  const v1::QualityReport& report = cache.quality();
  Json row{{"document", document.title},
           {"method", MethodWord(cache.method())},
           {"ratio", ratio},
           {"corpus_tokens", cache.corpus_tokens()},
           {"slots", cache.slots()},
           {"kv_bytes", cache.canonical_bytes()},
           {"questions", report.questions()},
           {"answer_tokens", report.answer_tokens()},
           {"question_source", report.question_source()}};
  if (report.has_recovered()) row["recovered"] = report.recovered();
  for (const char* memory : {"none", "full", "cache", "truncated"}) {
    const v1::QualityReport::Row* found = FindRow(report, memory);
    if (found == nullptr) continue;
    row[absl::StrCat("nll_", memory)] = found->mean_nll();
    if (found->has_mean_kl()) row[absl::StrCat("kl_", memory)] = found->mean_kl();
    if (absl::string_view(memory) == "truncated" && found->has_recovered()) {
      row["truncated_recovered"] = found->recovered();
    }
  }
  row["generated_tokens"] = report.generated_tokens();
  row["training_tokens"] = report.training_tokens();
  row["build_seconds"] = report.build_seconds();
  row["best_step"] = report.best_step();
  row["last_step"] = report.last_step();
  if (report.has_off_context_damage()) row["off_context_damage"] = report.off_context_damage();
  return row;
}

std::vector<std::string> Cells(const Json& row) {
  std::vector<std::string> cells = {Ellipsis(row["document"].get<std::string>(), 40), row["method"].get<std::string>(),
                                    Number(row["ratio"].get<double>(), 0)};
  for (const Column& column : kColumns) {
    const auto it = row.find(column.key);
    cells.push_back(it != row.end() && it->is_number() ? Number(it->get<double>(), column.decimals) : "-");
  }
  return cells;
}

// Means of the rows of one method and ratio; a column only where every row has it.
Json Mean(const std::vector<const Json*>& rows) {
  Json mean{{"document", absl::StrCat("mean of ", rows.size())},
            {"method", (*rows[0])["method"]},
            {"ratio", (*rows[0])["ratio"]}};
  for (const Column& column : kColumns) {
    double sum = 0;
    size_t found = 0;
    for (const Json* row : rows) {
      const auto it = row->find(column.key);
      if (it == row->end() || !it->is_number()) continue;
      sum += it->get<double>();
      ++found;
    }
    if (found == rows.size()) mean[column.key] = sum / static_cast<double>(found);
  }
  return mean;
}

absl::StatusOr<v1::Cache> BuildOne(Session& session, Client& client, const EvalFlags& flags, const Document& document,
                                   const v1::Corpus& corpus, v1::Method method, double ratio) {
  v1::BuildCacheRequest request;
  CLIENT_RETURN_IF_ERROR(flags.recipe.Fill(request));
  request.set_parent(corpus.name());
  request.set_method(method);
  request.set_compression_ratio(ratio);
  request.set_cache_id(DeriveId(absl::StrCat("eval ", MethodWord(method), " ", Number(ratio, 1), "x")));
  request.set_replace(true);
  for (const std::string& question : document.questions) request.mutable_evaluation()->add_questions(question);
  for (const std::string& answer : document.answers) request.mutable_evaluation()->add_answers(answer);
  CLIENT_ASSIGN(const v1::Operation operation, client.Build(std::move(request)));
  return FollowBuild(session, client, operation,
                     absl::StrCat(Ellipsis(document.title, 24), " ", MethodWord(method), " ", Number(ratio, 0), "x "));
}

absl::Status Eval(Session& session, const EvalFlags& flags) {
  std::vector<v1::Method> methods;
  for (const std::string& word : flags.methods) {
    CLIENT_ASSIGN(methods.emplace_back(), ParseMethod(word));
  }
  CLIENT_ASSIGN(const auto documents, Load(flags));
  CLIENT_ASSIGN(Client * client, session.Connect());

  std::vector<std::string> headers = {"DOCUMENT", "METHOD", "RATIO>"};
  for (const Column& column : kColumns) headers.emplace_back(column.header);
  Table table(headers);
  std::vector<Json> rows;
  absl::Status failure;
  for (const Document& document : documents) {
    const auto source = FromBytes(document.text);
    CLIENT_ASSIGN(const std::string sha, Sha256Of(*source));
    UploadOptions upload;
    // The content is in the id, so that a changed document is never mistaken for its elder.
    upload.corpus_id = DeriveId(absl::StrCat("eval-", sha.substr(0, 8), "-", DeriveId(document.title)));
    upload.display_name = document.title.substr(0, 200);
    CLIENT_ASSIGN(const v1::Corpus corpus, client->Upload(upload, *source));
    for (const v1::Method method : methods) {
      for (const double ratio : flags.ratios) {
        const auto cache = BuildOne(session, *client, flags, document, corpus, method, ratio);
        if (!cache.ok()) {
          if (absl::IsCancelled(cache.status())) return cache.status();
          session.Note(absl::StrCat(document.title, ": ", cache.status().message()));
          failure = cache.status();
          continue;
        }
        rows.push_back(Row(document, *cache, ratio));
        if (session.json) session.PrintJson(rows.back());
        table.Row(Cells(rows.back()));
        if (rows.back().contains("recovered")) {
          session.Note(absl::StrCat(document.title, ": ", MethodWord(method), " ", Number(ratio, 0), "x recovered ",
                                    Number(rows.back()["recovered"].get<double>(), 3)));
        }
      }
    }
    if (!flags.keep) {
      if (auto status = client->DeleteCorpus(corpus.name(), /*force=*/true); !status.ok()) failure = status;
    }
  }
  std::map<std::pair<std::string, double>, std::vector<const Json*>> groups;
  for (const Json& row : rows) groups[{row["method"].get<std::string>(), row["ratio"].get<double>()}].push_back(&row);
  for (const auto& [key, group] : groups) {
    const Json mean = Mean(group);
    if (session.json) session.PrintJson(mean);
    table.Row(Cells(mean));
  }
  if (!session.json && !table.empty()) session.Print(table.Text());
  return failure;
}

}  // namespace

void AddEvalCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* command =
      app.add_subcommand("eval", "Quality table: build memories of documents, measure with their questions");
  command->alias("report");
  command->footer(
      "recovered = (NLL without - NLL with the memory) / (NLL without - NLL with the full document), on the "
      "documents'\n"
      "own questions, which are never trained on. TRUNCATED is the same for the first tokens of the text at equal "
      "size.\n"
      "\n"
      "Examples:\n"
      "  stillhouse eval --squad xquad.en.json --articles 0 Warsaw 20+21+22+23 --profile quick --json\n"
      "  stillhouse eval --squad xquad.en.json --join 4 --method cartridge,attention-matching --ratio 8,10,40\n"
      "  stillhouse eval --document terms.txt --questions terms.questions.txt");
  const std::string what = "Documents";
  command->add_option("--squad", flags->squad, "File in the SQuAD format")->group(what);
  command
      ->add_option("--articles", flags->articles,
                   "Which: titles, indices from 0, ranges 3-7, joined ones 20+21 (default: all)")
      ->group(what);
  command->add_option("--join", flags->join, "Make one document of every so many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->group(what);
  command->add_option("--document", flags->documents, "A text file; may be given several times")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false)
      ->group(what);
  command->add_option("--questions", flags->questions, "Its questions, one per line (a tab, then a reference answer)")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false)
      ->group(what);
  command->add_option("--max-questions", flags->max_questions, "Per document; 0 is all (at most 1000)")
      ->check(CLI::NonNegativeNumber)
      ->group(what);
  command
      ->add_flag("--gold-answers", flags->gold, "Score the file's reference answers instead of the full context's own")
      ->group(what);
  command->add_option("--method", flags->methods, "One or more, separated by commas")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--ratio", flags->ratios, "Document tokens per slot, one or more, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  command->add_flag("--keep", flags->keep, "Leave the documents and memories on the server");
  flags->recipe.Declare(*command, /*evaluation_file=*/false);
  command->callback([&session, flags] { session.action = [&session, flags] { return Eval(session, *flags); }; });
}

}  // namespace stillhouse::client
