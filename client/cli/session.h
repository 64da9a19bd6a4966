#ifndef STILLHOUSE_CLIENT_CLI_SESSION_H_
#define STILLHOUSE_CLIENT_CLI_SESSION_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/client.h"

namespace stillhouse::client {

// What every command shares: the global flags, the connection, where output goes, and the action that parsing chose.
// Results go to standard output, everything else to standard error.
struct Session {
  ChannelOptions channel;
  std::string key_file;
  double timeout_seconds = 0;
  bool json = false;
  bool quiet = false;
  // Set by the chosen subcommand; run once, after parsing.
  std::function<absl::Status()> action;

  // The client, made on first use.
  absl::StatusOr<Client*> Connect();
  // Standard output: text as it is, or one JSON object on a line.
  void Print(absl::string_view text) const;
  void PrintJson(const Json& json) const;
  // Standard error, unless quiet.
  void Note(absl::string_view line) const;
  Progress NewProgress() const { return Progress(stderr, quiet || json); }

 private:
  std::unique_ptr<Client> client_;
};

// 0 ok, 1 the server refused (or a build failed), 2 usage or a local file, 3 the server cannot be reached.
int ExitCode(const absl::Status& status);

// Declares every flag and command of the program on `app`.
void DeclareProgram(CLI::App& app, Session& session);

// One function per file in this folder.
void AddCorpusCommands(CLI::App& app, Session& session);
void AddCacheCommands(CLI::App& app, Session& session);
void AddAskCommand(CLI::App& app, Session& session);
void AddScoreCommands(CLI::App& app, Session& session);
void AddOperationCommands(CLI::App& app, Session& session);
void AddTenantCommands(CLI::App& app, Session& session);
void AddServerCommands(CLI::App& app, Session& session);
void AddBenchCommand(CLI::App& app, Session& session);
void AddEvalCommand(CLI::App& app, Session& session);
void AddTuneCommand(CLI::App& app, Session& session);
void AddCompletionCommand(CLI::App& app, Session& session);

}  // namespace stillhouse::client

#define STILLHOUSE_CLIENT_CONCAT_(a, b) a##b
#define STILLHOUSE_CLIENT_CONCAT(a, b) STILLHOUSE_CLIENT_CONCAT_(a, b)
// `CLIENT_ASSIGN(auto x, Call());` takes the value or returns the error; `CLIENT_RETURN_IF_ERROR(Call());`.
#define CLIENT_ASSIGN(declaration, expression) \
  CLIENT_ASSIGN_IMPL(STILLHOUSE_CLIENT_CONCAT(result_, __LINE__), declaration, expression)
#define CLIENT_ASSIGN_IMPL(result, declaration, expression) \
  auto result = (expression);                               \
  if (!result.ok()) return result.status();                 \
  declaration = *std::move(result)
#define CLIENT_RETURN_IF_ERROR(expression) \
  if (absl::Status status = (expression); !status.ok()) return status

#endif  // STILLHOUSE_CLIENT_CLI_SESSION_H_
