#include <memory>

#include "client/cli/format.h"
#include "client/cli/report.h"
#include "client/cli/session.h"
#include "client/names.h"

// `stillhouse operation …`
namespace stillhouse::client {
namespace {

void ShowOperations(const Session& session, const std::vector<v1::Operation>& operations) {
  Table table({"OPERATION", "TARGET", "METHOD", "STATE", "LEFT>", "CREATED"});
  for (const v1::Operation& operation : operations) {
    if (session.json) session.PrintJson(ToJson(operation));
    const v1::OperationMetadata& metadata = operation.metadata();
    table.Row({ShortName(operation.name()), ShortName(metadata.target()), MethodWord(metadata.method()),
               Ellipsis(OperationWord(operation), 60),
               metadata.has_eta_seconds() && !operation.done() ? Seconds(metadata.eta_seconds()) : "-",
               When(metadata.create_time())});
  }
  if (session.json) return;
  if (table.empty()) {
    session.Note("No operations.");
  } else {
    session.Print(table.Text());
  }
}

absl::Status List(Session& session, bool running, int64_t limit) {
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto operations, client->ListOperations(running, limit));
  ShowOperations(session, operations);
  return absl::OkStatus();
}

absl::Status Show(Session& session, const std::string& text) {
  CLIENT_ASSIGN(const std::string name, OperationName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Operation operation, client->GetOperation(name));
  ShowOperations(session, {operation});
  return absl::OkStatus();
}

absl::Status Wait(Session& session, const std::string& text) {
  v1::Operation operation;
  CLIENT_ASSIGN(*operation.mutable_name(), OperationName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Cache cache, FollowBuild(session, *client, operation));
  if (session.json) {
    session.PrintJson(ToJson(cache));
  } else {
    session.Print(ShortName(cache.name()) + "\n");
  }
  return absl::OkStatus();
}

absl::Status Cancel(Session& session, const std::string& text) {
  CLIENT_ASSIGN(const std::string name, OperationName(text));
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const v1::Operation operation, client->CancelOperation(name));
  if (session.json) {
    session.PrintJson(ToJson(operation));
  } else {
    session.Note(operation.done() && !operation.has_error() ? "It was done already." : "It ends soon.");
  }
  return absl::OkStatus();
}

}  // namespace

void AddOperationCommands(CLI::App& app, Session& session) {
  CLI::App* group = app.add_subcommand("operation", "Builds that run or ran: list, show, wait, cancel");
  group->require_subcommand(1);
  group->fallthrough();
  {
    auto running = std::make_shared<bool>(false);
    auto limit = std::make_shared<int64_t>(50);
    CLI::App* command = group->add_subcommand("list", "Builds of the tenant, newest first");
    command->add_flag("--running", *running, "Only those that are not done");
    command->add_option("--limit", *limit, "At most this many; 0 is all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    command->callback([&session, running, limit] {
      session.action = [&session, running, limit] { return List(session, *running, *limit); };
    });
  }
  const auto one = [&](const char* verb, const char* text, absl::Status (*run)(Session&, const std::string&)) {
    auto name = std::make_shared<std::string>();
    CLI::App* command = group->add_subcommand(verb, text);
    command->add_option("operation", *name, "Its id or full name")->required();
    command->callback(
        [&session, name, run] { session.action = [&session, name, run] { return run(session, *name); }; });
  };
  one("show", "One build", Show);
  one("wait", "Follow a build to its end", Wait);
  one("cancel", "End a build", Cancel);
}

}  // namespace stillhouse::client
