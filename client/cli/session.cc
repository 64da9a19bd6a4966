#include "client/cli/session.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "client/error.h"

#ifndef STILLHOUSE_VERSION
#define STILLHOUSE_VERSION "unknown"
#endif

namespace stillhouse::client {

absl::StatusOr<Client*> Session::Connect() {
  if (client_ == nullptr) {
    ChannelOptions options = channel;
    if (!key_file.empty()) {
      CLIENT_ASSIGN(const std::string text, ReadText(key_file, 4096));
      options.key = std::string(absl::StripAsciiWhitespace(text));
    }
    options.timeout = absl::Seconds(timeout_seconds);
    CLIENT_ASSIGN(client_, Client::Create(options));
  }
  return client_.get();
}

void Session::Print(absl::string_view text) const { fwrite(text.data(), 1, text.size(), stdout); }

void Session::PrintJson(const Json& json) const {
  Print(Dump(json) + "\n");
  fflush(stdout);
}

void Session::Note(absl::string_view line) const {
  if (quiet) return;
  fflush(stdout);
  fprintf(stderr, "%.*s\n", static_cast<int>(line.size()), line.data());
}

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  switch (OriginOf(status)) {
    case Origin::kTransport:
      return 3;
    case Origin::kServer:
      return 1;
    case Origin::kLocal:
      // A transfer that arrived damaged, or work that was cut short, is no mistake in the command.
      return absl::IsDataLoss(status) || absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                     absl::IsInternal(status)
                 ? 1
                 : 2;
  }
  return 1;
}

void DeclareProgram(CLI::App& app, Session& session) {
  app.name("stillhouse");
  app.description("Asks a Stillhouse server: lasting memories of documents for language models.");
  app.footer(
      "Examples:\n"
      "  stillhouse corpus upload handbook.txt\n"
      "  stillhouse cache build handbook --profile quick\n"
      "  stillhouse ask --cache handbook \"Who approves travel?\"\n"
      "  stillhouse ask --cache handbook/quick --chat\n"
      "\n"
      "Exit codes: 0 done, 1 the server refused or a build failed, 2 wrong usage or an unreadable file,\n"
      "3 the server cannot be reached, 130 interrupted.");
  app.set_version_flag("--version", std::string("stillhouse " STILLHOUSE_VERSION));
  app.require_subcommand(1);
  app.fallthrough();
  app.option_defaults()->group("Connection");
  app.add_option("--address", session.channel.address, "Server, host:port or unix:/path")
      ->envname("STILLHOUSE_ADDRESS")
      ->capture_default_str();
  app.add_option("--key", session.channel.key, "Bearer key (better from the environment or a file)")
      ->envname("STILLHOUSE_KEY");
  app.add_option("--key-file", session.key_file, "File that holds the bearer key");
  app.add_flag("--tls", session.channel.tls, "Speak TLS, checked against the system's roots or --ca-file");
  app.add_option("--ca-file", session.channel.ca_file, "PEM roots to trust (implies --tls)");
  app.add_option("--cert-file", session.channel.certificate_file, "PEM certificate for mutual TLS");
  app.add_option("--cert-key-file", session.channel.private_key_file, "Its private key");
  app.add_option("--server-name", session.channel.server_name, "Name that the server's certificate carries");
  app.add_flag("--plaintext-key", session.channel.plaintext_key,
               "Allow the key to travel unencrypted to another host (a trusted network)");
  app.add_option("--tenant", session.channel.tenant, "Tenant that short names belong to (default: the key's)");
  app.add_option("--timeout", session.timeout_seconds, "Seconds that a call may take; 0 is no limit")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--attempts", session.channel.attempts, "Sends of one call before giving up on a transient failure")
      ->check(CLI::Range(1, 20))
      ->capture_default_str();
  app.option_defaults()->group("Output");
  app.add_flag("--json", session.json, "Machine-readable: one JSON object, or one per line");
  app.add_flag("-q,--quiet", session.quiet, "No progress and no remarks on standard error");
  app.option_defaults()->group("Options");

  AddCorpusCommands(app, session);
  AddCacheCommands(app, session);
  AddAskCommand(app, session);
  AddScoreCommands(app, session);
  AddOperationCommands(app, session);
  AddTenantCommands(app, session);
  AddServerCommands(app, session);
  AddBenchCommand(app, session);
  AddEvalCommand(app, session);
  AddTuneCommand(app, session);
  AddCompletionCommand(app, session);
}

}  // namespace stillhouse::client
