#ifndef STILLHOUSE_CLIENT_CLI_COMPLETION_H_
#define STILLHOUSE_CLIENT_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace stillhouse::client {

// A completion script for "bash", "zsh" or "fish", made from the declared commands and flags.
absl::StatusOr<std::string> CompletionScript(const CLI::App& root, absl::string_view shell);

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_COMPLETION_H_
