#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/session.h"

// `stillhouse tune`: becomes stillhouse-tune, which knows GPUs; this program speaks to servers only.
namespace stillhouse::client {
namespace {

absl::Status Tune(std::vector<std::string> arguments) {
  const std::string name = "stillhouse-tune";
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::string beside;
  if (!error) beside = (self.parent_path() / name).string();
  arguments.insert(arguments.begin(), name);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  fflush(stdout);
  if (!beside.empty()) execv(beside.c_str(), argv.data());
  execvp(name.c_str(), argv.data());
  return absl::FailedPreconditionError(
      absl::StrCat("stillhouse tune runs the program ", name, ", which is neither beside this one nor on the PATH: ",
                   "build it with the server (target ", name, "), with CUDA, and run it where the GPU is."));
}

}  // namespace

void AddTuneCommand(CLI::App& app, Session& session) {
  CLI::App* tune =
      app.add_subcommand("tune", "Find the fastest ways to run products on this machine's GPU (runs stillhouse-tune)");
  // All that follows is that program's, --help too.
  tune->prefix_command();
  tune->fallthrough(false);
  tune->set_help_flag();
  tune->callback([tune, &session] { session.action = [arguments = tune->remaining()] { return Tune(arguments); }; });
}

}  // namespace stillhouse::client
