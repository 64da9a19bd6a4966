#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/cli/build_flags.h"
#include "client/cli/format.h"
#include "client/cli/report.h"
#include "client/cli/session.h"
#include "client/names.h"

// `stillhouse cache …`
namespace stillhouse::client {
namespace {

struct CacheFlags {
  std::string corpus;
  std::string id;
  std::string title;
  std::string method = "cartridge";
  std::optional<double> ratio;
  std::optional<int32_t> slots;
  bool replace = false;
  bool no_wait = false;
  BuildFlags recipe;
};

void ShowCache(const Session& session, const v1::Cache& cache) {
  if (session.json) {
    session.PrintJson(ToJson(cache));
    return;
  }
  Table table({"NAME", cache.name()});
  if (!cache.display_name().empty()) table.Row({"title", cache.display_name()});
  table.Row({"method", MethodWord(cache.method())});
  table.Row({"state", StateWord(cache.state())});
  table.Row({"slots", absl::StrCat(Count(cache.slots()), " for ", Count(cache.corpus_tokens()), " tokens (",
                                   Number(cache.compression_ratio(), 1), "×)")});
  table.Row({"positions",
             absl::StrCat(Count(cache.logical_length()), ", questions start at ", Count(cache.next_position()))});
  table.Row({"memory", absl::StrCat(Bytes(cache.canonical_bytes()), " ", cache.dtype())});
  table.Row({"file", Bytes(cache.artifact_bytes())});
  table.Row({"sha256", cache.sha256()});
  table.Row({"created", When(cache.create_time())});
  session.Print(table.Text());
  if (cache.has_quality() && cache.quality().rows_size() > 0) session.Print("\n" + ReportText(cache.quality()));
}

absl::Status Build(Session& session, const CacheFlags& flags) {
  v1::BuildCacheRequest request;
  CLIENT_ASSIGN(const v1::Method method, ParseMethod(flags.method));
  request.set_method(method);
  if (!flags.id.empty()) CLIENT_RETURN_IF_ERROR(CheckId("cache id", flags.id));
  request.set_cache_id(flags.id);
  request.set_display_name(flags.title);
  request.set_replace(flags.replace);
  if (flags.ratio) request.set_compression_ratio(*flags.ratio);
  if (flags.slots) request.set_slots(*flags.slots);
  CLIENT_RETURN_IF_ERROR(flags.recipe.Fill(request));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string tenant, client->Tenant());
  CLIENT_ASSIGN(*request.mutable_parent(), CorpusName(tenant, flags.corpus));
  CLIENT_ASSIGN(const v1::Operation operation, client->Build(std::move(request)));
  if (flags.no_wait) {
    if (session.json) {
      session.PrintJson(ToJson(operation));
    } else {
      session.Print(ShortName(operation.name()) + "\n");
      session.Note("Follow it: stillhouse operation wait " + ShortName(operation.name()));
    }
    return absl::OkStatus();
  }
  CLIENT_ASSIGN(const v1::Cache cache, FollowBuild(session, *client, operation));
  ShowCache(session, cache);
  if (!session.json) {
    session.Note(absl::StrCat("\nAsk it: stillhouse ask --cache ", ShortName(cache.name()), " \"…\""));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ResolveCache(Client& client, const std::string& text) {
  CLIENT_ASSIGN(const std::string tenant, client.Tenant());
  return CacheName(tenant, text);
}

absl::Status Show(Session& session, const std::string& text) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string name, ResolveCache(*client, text));
  CLIENT_ASSIGN(const v1::Cache cache, client->GetCache(name));
  ShowCache(session, cache);
  return absl::OkStatus();
}

absl::Status List(Session& session, const std::string& corpus, int64_t limit) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  std::string parent;
  if (!corpus.empty()) {
    CLIENT_ASSIGN(const std::string tenant, client->Tenant());
    CLIENT_ASSIGN(parent, CorpusName(tenant, corpus));
  }
  CLIENT_ASSIGN(const auto caches, client->ListCaches(parent, limit));
  Table table({"CACHE", "METHOD", "STATE", "SLOTS>", "RATIO>", "MEMORY>", "RECOVERED>", "CREATED"});
  for (const v1::Cache& cache : caches) {
    if (session.json) session.PrintJson(ToJson(cache));
    table.Row({ShortName(cache.name()), MethodWord(cache.method()), StateWord(cache.state()), Count(cache.slots()),
               Number(cache.compression_ratio(), 1), Bytes(cache.canonical_bytes()),
               cache.quality().has_recovered() ? Number(cache.quality().recovered(), 2) : "-",
               When(cache.create_time())});
  }
  if (session.json) return absl::OkStatus();
  if (table.empty()) {
    session.Note("No memories yet. Build one: stillhouse cache build CORPUS");
  } else {
    session.Print(table.Text());
  }
  return absl::OkStatus();
}

absl::Status Delete(Session& session, const std::vector<std::string>& texts) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  for (const std::string& text : texts) {
    CLIENT_ASSIGN(const std::string name, ResolveCache(*client, text));
    CLIENT_RETURN_IF_ERROR(client->DeleteCache(name));
    if (session.json) {
      session.PrintJson({{"deleted", name}});
    } else {
      session.Note("Deleted " + ShortName(name) + ".");
    }
  }
  return absl::OkStatus();
}

absl::Status Export(Session& session, const std::string& text, const std::string& path) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string name, ResolveCache(*client, text));
  std::string target = path;
  if (target.empty()) {
    // The name is made here: a server does not choose where a file goes.
    target = ShortName(name) + ".safetensors";
    target[target.find('/')] = '-';
  }
  v1::FileHeader header;
  {
    Progress progress = session.NewProgress();
    CLIENT_ASSIGN(header, client->Export(name, target, [&](int64_t done, int64_t size) {
      progress.ShowBytes("exporting", done, size);
    }));
  }
  if (target == "-") return absl::OkStatus();
  if (session.json) {
    session.PrintJson({{"file", target}, {"size_bytes", header.size_bytes()}, {"sha256", header.sha256()}});
  } else {
    session.Print(absl::StrCat(target, "  ", Bytes(header.size_bytes()), "\n"));
  }
  return absl::OkStatus();
}

absl::Status Import(Session& session, const std::string& corpus, const std::string& path, std::string id,
                    const std::string& title) {
  if (id.empty()) {
    if (path == "-") return absl::InvalidArgumentError("Name the cache with --id when it comes from a pipe.");
    id = DeriveId(path);
  }
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const std::string tenant, client->Tenant());
  CLIENT_ASSIGN(const std::string parent, CorpusName(tenant, corpus));
  CLIENT_ASSIGN(const auto source, OpenInput(path, int64_t{1} << 34));
  v1::Cache cache;
  {
    Progress progress = session.NewProgress();
    CLIENT_ASSIGN(cache, client->Import(parent, id, title, *source, [&](int64_t done, int64_t size) {
      progress.ShowBytes("importing", done, size);
    }));
  }
  ShowCache(session, cache);
  return absl::OkStatus();
}

}  // namespace

void AddCacheCommands(CLI::App& app, Session& session) {
  CLI::App* group = app.add_subcommand("cache", "Memories of documents: build, show, list, delete, export, import");
  group->require_subcommand(1);
  group->fallthrough();

  {
    auto flags = std::make_shared<CacheFlags>();
    CLI::App* command = group->add_subcommand("build", "Build a memory of a document and wait for it");
    command->footer(
        "Examples:\n"
        "  stillhouse cache build handbook\n"
        "  stillhouse cache build handbook --id quick --profile quick --ratio 10\n"
        "  stillhouse cache build handbook --method full --id whole\n"
        "  stillhouse cache build handbook --eval-questions questions.txt --no-wait");
    command->add_option("corpus", flags->corpus, "The document's id or full name")->required();
    command->add_option("--id", flags->id, "Id of the memory (default: cache- and eight characters)");
    command->add_option("--title", flags->title, "One line that says what it is");
    command
        ->add_option("--method", flags->method,
                     "cartridge, attention-matching, full, still, sink-window, l2, snapkv or h2o")
        ->capture_default_str();
    CLI::Option* ratio = command->add_option("--ratio", flags->ratio, "Document tokens per slot (default 10)");
    command->add_option("--slots", flags->slots, "Size as key/value rows instead")->excludes(ratio);
    command->add_flag("--replace", flags->replace, "Replace a memory of this id when the build succeeds");
    command->add_flag("--no-wait", flags->no_wait, "Print the operation and return at once");
    flags->recipe.Declare(*command);
    command->callback([&session, flags] { session.action = [&session, flags] { return Build(session, *flags); }; });
  }
  {
    auto name = std::make_shared<std::string>();
    CLI::App* command = group->add_subcommand("show", "One memory and its quality report");
    command->add_option("cache", *name, "CORPUS/CACHE or full name")->required();
    command->callback([&session, name] { session.action = [&session, name] { return Show(session, *name); }; });
  }
  {
    auto corpus = std::make_shared<std::string>();
    auto limit = std::make_shared<int64_t>(0);
    CLI::App* command = group->add_subcommand("list", "Memories of one document or of all");
    command->add_option("corpus", *corpus, "Only this document's");
    command->add_option("--limit", *limit, "At most this many; 0 is all")->check(CLI::NonNegativeNumber);
    command->callback([&session, corpus, limit] {
      session.action = [&session, corpus, limit] { return List(session, *corpus, *limit); };
    });
  }
  {
    auto names = std::make_shared<std::vector<std::string>>();
    CLI::App* command = group->add_subcommand("delete", "Delete memories");
    command->add_option("cache", *names, "CORPUS/CACHE or full names")->required();
    command->callback([&session, names] { session.action = [&session, names] { return Delete(session, *names); }; });
  }
  {
    auto name = std::make_shared<std::string>();
    auto path = std::make_shared<std::string>();
    CLI::App* command = group->add_subcommand("export", "Save a memory as one safetensors file");
    command->add_option("cache", *name, "CORPUS/CACHE or full name")->required();
    command->add_option("file", *path, "Where to (default: CORPUS-CACHE.safetensors here; - is standard output)");
    command->callback(
        [&session, name, path] { session.action = [&session, name, path] { return Export(session, *name, *path); }; });
  }
  {
    auto flags = std::make_shared<CacheFlags>();
    auto path = std::make_shared<std::string>();
    CLI::App* command = group->add_subcommand("import", "Give a saved memory to a document of the server");
    command->footer("The file must belong to the same model; the server verifies it first.");
    command->add_option("corpus", flags->corpus, "The document's id or full name")->required();
    command->add_option("file", *path, "The file, or - for standard input")->required();
    command->add_option("--id", flags->id, "Id of the memory (default: made from the file's name)");
    command->add_option("--title", flags->title, "One line that says what it is");
    command->callback([&session, flags, path] {
      session.action = [&session, flags, path] {
        return Import(session, flags->corpus, *path, flags->id, flags->title);
      };
    });
  }
}

}  // namespace stillhouse::client
