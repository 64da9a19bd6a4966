// The `stillhouse` command line. See client/README.md.
#include <cstdio>
#include <cstdlib>

#include "client/cli/interrupt.h"
#include "client/cli/session.h"
#include "client/error.h"

int main(int argc, char** argv) {
  using stillhouse::client::Session;
  // What gRPC would log, the errors say; GRPC_VERBOSITY in the environment brings it back.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  stillhouse::client::InstallInterrupt();
  Session session;
  CLI::App app;
  stillhouse::client::DeclareProgram(app, session);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  absl::Status status = session.action ? session.action() : absl::InvalidArgumentError("No command was given.");
  // An earlier flush that failed has dropped what it held: only ferror remembers.
  if (status.ok() && (fflush(stdout) != 0 || ferror(stdout))) {
    status = absl::FailedPreconditionError("Standard output cannot be written.");
  }
  if (status.ok()) return 0;
  fflush(stdout);
  if (session.json) {
    fprintf(stderr, "%s\n", stillhouse::client::Dump(stillhouse::client::ErrorJson(status)).c_str());
  } else {
    fprintf(stderr, "stillhouse: %s\n", stillhouse::client::Describe(status).c_str());
    const std::string hint = stillhouse::client::Hint(status, session.channel.address);
    if (!hint.empty()) fprintf(stderr, "  %s\n", hint.c_str());
  }
  return stillhouse::client::ExitCode(status);
}
