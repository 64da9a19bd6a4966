#include <memory>

#include "client/cli/format.h"
#include "client/cli/session.h"
#include "client/names.h"

// `stillhouse corpus …`
namespace stillhouse::client {
namespace {

struct UploadFlags {
  std::string path;
  UploadOptions options;
};

absl::Status Upload(Session& session, UploadFlags& flags) {
  UploadOptions options = flags.options;
  if (options.corpus_id.empty()) {
    if (flags.path == "-") return absl::InvalidArgumentError("Name the document with --id when it comes from a pipe.");
    options.corpus_id = DeriveId(flags.path);
  }
  CLIENT_RETURN_IF_ERROR(CheckId("corpus id", options.corpus_id));
  if (options.display_name.empty() && flags.path != "-") {
    const size_t slash = flags.path.rfind('/');
    options.display_name = flags.path.substr(slash == std::string::npos ? 0 : slash + 1).substr(0, 256);
  }
  CLIENT_ASSIGN(Client * client, session.Connect());
  int64_t limit = int64_t{1} << 30;
  if (flags.path == "-") {
    CLIENT_ASSIGN(const v1::ServerInfo info, client->Info());
    if (info.limits().max_corpus_bytes() > 0) limit = info.limits().max_corpus_bytes();
  }
  CLIENT_ASSIGN(const auto source, OpenInput(flags.path, limit));
  v1::Corpus corpus;
  {
    Progress progress = session.NewProgress();
    CLIENT_ASSIGN(corpus, client->Upload(options, *source, [&](int64_t done, int64_t size) {
      progress.ShowBytes("uploading", done, size);
    }));
  }
  if (session.json) {
    session.PrintJson(ToJson(corpus));
    return absl::OkStatus();
  }
  std::string line = ShortName(corpus.name()) + "  " + Bytes(corpus.size_bytes());
  if (corpus.token_count() > 0) line += ", " + Count(corpus.token_count()) + " tokens";
  session.Print(line + "\n");
  session.Note("Build a memory of it: stillhouse cache build " + ShortName(corpus.name()));
  return absl::OkStatus();
}

absl::Status List(Session& session, int64_t limit) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto corpora, client->ListCorpora(limit));
  Table table({"CORPUS", "SIZE>", "TOKENS>", "CREATED", "TITLE"});
  for (const v1::Corpus& corpus : corpora) {
    if (session.json) session.PrintJson(ToJson(corpus));
    table.Row({ShortName(corpus.name()), Bytes(corpus.size_bytes()),
               corpus.token_count() > 0 ? Count(corpus.token_count()) : "-", When(corpus.create_time()),
               Ellipsis(corpus.display_name(), 60)});
  }
  if (session.json) return absl::OkStatus();
  if (table.empty()) {
    session.Note("No documents yet. Upload one: stillhouse corpus upload FILE");
  } else {
    session.Print(table.Text());
  }
  return absl::OkStatus();
}

absl::Status Show(Session& session, const std::string& text) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string tenant, client->Tenant());
  CLIENT_ASSIGN(const std::string name, CorpusName(tenant, text));
  CLIENT_ASSIGN(const v1::Corpus corpus, client->GetCorpus(name));
  if (session.json) {
    session.PrintJson(ToJson(corpus));
    return absl::OkStatus();
  }
  Table table({"NAME", corpus.name()});
  table.Row({"title", corpus.display_name()});
  table.Row({"type", corpus.media_type()});
  table.Row({"size", Bytes(corpus.size_bytes())});
  table.Row({"tokens", corpus.token_count() > 0 ? Count(corpus.token_count()) : "-"});
  table.Row({"sha256", corpus.sha256()});
  table.Row({"created", When(corpus.create_time())});
  session.Print(table.Text());
  return absl::OkStatus();
}

absl::Status Delete(Session& session, const std::vector<std::string>& texts, bool force) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string tenant, client->Tenant());
  for (const std::string& text : texts) {
    CLIENT_ASSIGN(const std::string name, CorpusName(tenant, text));
    CLIENT_RETURN_IF_ERROR(client->DeleteCorpus(name, force));
    if (session.json) {
      session.PrintJson({{"deleted", name}});
    } else {
      session.Note("Deleted " + ShortName(name) + ".");
    }
  }
  return absl::OkStatus();
}

}  // namespace

void AddCorpusCommands(CLI::App& app, Session& session) {
  CLI::App* group = app.add_subcommand("corpus", "Documents: upload, list, show, delete");
  group->require_subcommand(1);
  group->fallthrough();

  {
    auto flags = std::make_shared<UploadFlags>();
    CLI::App* command = group->add_subcommand("upload", "Upload a document; a broken upload goes on where it stopped");
    command->footer(
        "Examples:\n"
        "  stillhouse corpus upload handbook.txt\n"
        "  stillhouse corpus upload --id terms --title \"Terms of sale, 2024\" terms.md\n"
        "  pdftotext report.pdf - | stillhouse corpus upload --id report -");
    command->add_option("file", flags->path, "The document, or - for standard input")->required();
    command->add_option("--id", flags->options.corpus_id, "Id of the corpus (default: made from the file's name)");
    command->add_option("--title", flags->options.display_name,
                        "One line that says what it is (default: the file's name)");
    command->add_option("--type", flags->options.media_type, "Media type")->capture_default_str();
    command->callback([&session, flags] { session.action = [&session, flags] { return Upload(session, *flags); }; });
  }
  {
    auto limit = std::make_shared<int64_t>(0);
    CLI::App* command = group->add_subcommand("list", "Documents of the tenant");
    command->add_option("--limit", *limit, "At most this many; 0 is all")->check(CLI::NonNegativeNumber);
    command->callback([&session, limit] { session.action = [&session, limit] { return List(session, *limit); }; });
  }
  {
    auto name = std::make_shared<std::string>();
    CLI::App* command = group->add_subcommand("show", "One document");
    command->add_option("corpus", *name, "Its id or full name")->required();
    command->callback([&session, name] { session.action = [&session, name] { return Show(session, *name); }; });
  }
  {
    auto names = std::make_shared<std::vector<std::string>>();
    auto force = std::make_shared<bool>(false);
    CLI::App* command = group->add_subcommand("delete", "Delete documents");
    command->add_option("corpus", *names, "Ids or full names")->required();
    command->add_flag("--force", *force, "Delete their memories too, and cancel their builds");
    command->callback([&session, names, force] {
      session.action = [&session, names, force] { return Delete(session, *names, *force); };
    });
  }
}

}  // namespace stillhouse::client
