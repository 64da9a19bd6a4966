#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include <array>
#include <cstdlib>
#include <fstream>

#include "client/cli/completion.h"
#include "client/cli/session.h"
#include "client/error.h"

namespace stillhouse::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Parsed {
  Session session;
  CLI::App app;
  int code = 0;
};

std::unique_ptr<Parsed> Parse(std::vector<std::string> arguments) {
  auto parsed = std::make_unique<Parsed>();
  DeclareProgram(parsed->app, parsed->session);
  std::reverse(arguments.begin(), arguments.end());
  try {
    parsed->app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    parsed->code = error.get_exit_code();
    if (parsed->code == 0) parsed->code = -1;  // help or version
  }
  return parsed;
}

// What the chosen command says without a server: port 1 of loopback refuses, and nothing is retried.
absl::Status Perform(std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--address", "127.0.0.1:1", "--attempts", "1", "--quiet"});
  const auto parsed = Parse(arguments);
  EXPECT_EQ(parsed->code, 0);
  return parsed->session.action ? parsed->session.action() : absl::InternalError("no action");
}

TEST(Program, GlobalFlagsMayComeAnywhere) {
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{"--address", "h:1", "--json", "corpus", "list"},
                                             {"corpus", "--json", "list", "--address", "h:1"},
                                             {"corpus", "list", "--address", "h:1", "--json"}}) {
    const auto parsed = Parse(arguments);
    EXPECT_EQ(parsed->code, 0);
    EXPECT_EQ(parsed->session.channel.address, "h:1");
    EXPECT_TRUE(parsed->session.json);
  }
}

TEST(Program, AddressAndKeyComeFromTheEnvironment) {
  setenv("STILLHOUSE_ADDRESS", "example.org:7", 1);
  setenv("STILLHOUSE_KEY", "secret", 1);
  const auto parsed = Parse({"corpus", "list"});
  unsetenv("STILLHOUSE_ADDRESS");
  unsetenv("STILLHOUSE_KEY");
  EXPECT_EQ(parsed->session.channel.address, "example.org:7");
  EXPECT_EQ(parsed->session.channel.key, "secret");
}

TEST(Program, RefusesWrongUsage) {
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"corpus"},
                                             {"fly"},
                                             {"corpus", "upload"},
                                             {"cache", "build", "x", "--ratio", "2", "--slots", "3"},
                                             {"cache", "build", "x", "--ratio", "two"},
                                             {"ask", "--cache", "x", "--no-cache", "q"},
                                             {"ask", "--temperature", "warm", "q"},
                                             {"completion", "tcsh"},
                                             {"--attempts", "0", "corpus", "list"},
                                             {"--timeout", "-1", "corpus", "list"}}) {
    EXPECT_GT(Parse(arguments)->code, 0);
  }
}

TEST(Program, EveryCommandHasHelp) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{"--help"},
                                                                     {"corpus", "upload", "--help"},
                                                                     {"cache", "build", "--help"},
                                                                     {"ask", "--help"},
                                                                     {"score", "--help"},
                                                                     {"operation", "--help"},
                                                                     {"tenant", "key", "--help"},
                                                                     {"eval", "--help"},
                                                                     {"report", "--help"},
                                                                     {"bench", "--help"},
                                                                     {"server", "info", "--help"},
                                                                     {"--version"}}) {
    EXPECT_EQ(Parse(arguments)->code, -1);
  }
}

TEST(Program, TuneTakesWhatever) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"tune"}, {"tune", "--help"}, {"tune", "--output", "h.plans", "--product", "256,7168"}}) {
    const auto parsed = Parse(arguments);
    EXPECT_EQ(parsed->code, 0) << arguments.back();
  }
}

TEST(Program, LocalMistakesAreUsageErrors) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{"ask", "what?"},
                                                                     {"ask", "--cache", "x"},
                                                                     {"ask", "--cache", "x", "--chat", "q"},
                                                                     {"ask", "--cache", "x", "--chat", "--raw"},
                                                                     {"ask", "--no-cache", "--file", "/none"},
                                                                     {"corpus", "upload", "/none"},
                                                                     {"corpus", "upload", "-"},
                                                                     {"cache", "build", "x", "--method", "magic"},
                                                                     {"cache", "build", "x", "--id", "Not Valid"},
                                                                     {"operation", "show", "a/b"},
                                                                     {"tenant", "create", "UPPER"},
                                                                     {"eval"},
                                                                     {"eval", "--document", "a"},
                                                                     {"tokenize"},
                                                                     {"corpus", "list", "--key-file", "/none"},
                                                                     {"corpus", "list", "--ca-file", "/none"},
                                                                     {"corpus", "list", "--cert-file", "/none"}}) {
    const absl::Status status = Perform(arguments);
    EXPECT_EQ(ExitCode(status), 2) << ::testing::PrintToString(arguments) << " " << status;
  }
}

TEST(Program, AnOptionTakesOneValueAndLeavesTheQuestion) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{{"ask", "--no-cache", "--stop", "x", "why?"},
                                                                     {"ask", "--no-cache", "why?", "--stop", "x"}}) {
    EXPECT_EQ(ExitCode(Perform(arguments)), 3) << ::testing::PrintToString(arguments);
  }
  // With a memory the tenant is asked for first, and that is where nobody answers.
  for (const auto& arguments :
       std::vector<std::vector<std::string>>{{"ask", "--cache", "handbook", "why?"},
                                             {"ask", "-c", "handbook/quick", "why?", "and how?", "--max-tokens", "4"},
                                             {"ask", "--cache", "a", "--cache", "b", "why?"},
                                             {"ask", "why?", "--cache", "a", "--cache", "b"}}) {
    EXPECT_EQ(ExitCode(Perform(arguments)), 3) << ::testing::PrintToString(arguments);
  }
}

TEST(Program, ASilentAddressIsReportedAsSuch) {
  const absl::Status status = Perform({"corpus", "list"});
  EXPECT_EQ(ExitCode(status), 3) << status;
  EXPECT_THAT(Hint(status, "127.0.0.1:1"), HasSubstr("Is the server running"));
  EXPECT_EQ(ExitCode(Perform({"server", "health"})), 3);
}

TEST(Program, KeysStayHomeWithoutTls) {
  const auto parsed = Parse({"corpus", "list", "--address", "example.org:7070", "--key", "secret"});
  const absl::Status status = parsed->session.action();
  EXPECT_EQ(ExitCode(status), 2);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("unencrypted"), Not(HasSubstr("secret"))));
}

TEST(Program, BadAddressesAreUsageErrors) {
  for (const char* address : {"", "nohost", "host:", ":1", "host:99999", "host:1x"}) {
    const auto parsed = Parse({"corpus", "list", "--address", address});
    EXPECT_EQ(ExitCode(parsed->session.action()), 2) << address;
  }
}

TEST(ExitCode, OneForEachOrigin) {
  EXPECT_EQ(ExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCode(FromRpc(5, "No.", "", true)), 1);
  EXPECT_EQ(ExitCode(FromRpc(14, "gone", "", true)), 3);
  EXPECT_EQ(ExitCode(absl::InvalidArgumentError("x")), 2);
  EXPECT_EQ(ExitCode(absl::DataLossError("x")), 1);
}

// Runs a shell on the completion script and a few lines more; returns what they print.
std::string Shell(const std::string& shell, const std::string& script, const std::string& more) {
  const std::string path = ::testing::TempDir() + "/stillhouse_completion_" + shell;
  std::ofstream(path) << script << "\n" << more << "\n";
  FILE* pipe = popen((shell + " '" + path + "' 2>&1").c_str(), "r");
  std::string out;
  std::array<char, 4096> block;
  while (const size_t n = fread(block.data(), 1, block.size(), pipe)) out.append(block.data(), n);
  EXPECT_EQ(pclose(pipe), 0) << out;
  std::remove(path.c_str());
  return out;
}

TEST(Completion, BashCompletesCommandsAndFlags) {
  const auto parsed = Parse({"completion", "bash"});
  const std::string script = *CompletionScript(parsed->app, "bash");
  const auto complete = [&](const std::string& words, int current) {
    return Shell("bash", script,
                 "COMP_WORDS=(" + words + "); COMP_CWORD=" + std::to_string(current) +
                     "; _stillhouse; printf '%s ' \"${COMPREPLY[@]}\"");
  };
  EXPECT_THAT(complete("stillhouse co", 1), AllOf(HasSubstr("corpus"), HasSubstr("completion"), Not(HasSubstr("ask"))));
  EXPECT_THAT(complete("stillhouse --json cache b", 3), HasSubstr("build"));
  EXPECT_THAT(complete("stillhouse cache build x --r", 4), AllOf(HasSubstr("--ratio"), HasSubstr("--replace")));
  EXPECT_THAT(complete("stillhouse tenant key cr", 3), HasSubstr("create"));
  EXPECT_THAT(complete("stillhouse ask --add", 2), HasSubstr("--address"));
}

TEST(Completion, OtherShells) {
  const auto parsed = Parse({"completion", "zsh"});
  EXPECT_THAT(*CompletionScript(parsed->app, "zsh"),
              AllOf(HasSubstr("#compdef stillhouse"), HasSubstr("'cache build'")));
  EXPECT_THAT(*CompletionScript(parsed->app, "fish"), AllOf(HasSubstr("-l ratio"), HasSubstr("-a upload")));
  EXPECT_FALSE(CompletionScript(parsed->app, "tcsh").ok());
}

}  // namespace
}  // namespace stillhouse::client
