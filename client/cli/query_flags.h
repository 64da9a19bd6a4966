#ifndef STILLHOUSE_CLIENT_CLI_QUERY_FLAGS_H_
#define STILLHOUSE_CLIENT_CLI_QUERY_FLAGS_H_

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/client.h"

namespace stillhouse::client {

// Which memories answer, and how tokens are drawn: shared by `ask`, `score` and `bench`.
class QueryFlags {
 public:
  void DeclareMemories(CLI::App& command);
  void DeclareSampling(CLI::App& command);

  // OK when exactly one of --cache and --no-cache was given.
  absl::Status CheckMemories() const;
  // Full names, in the order given; asks the server for the tenant where short names were used.
  absl::StatusOr<std::vector<std::string>> Memories(Client& client) const;
  v1::SamplingOptions Sampling() const;

 private:
  std::vector<std::string> caches_;
  bool no_cache_ = false;
  std::optional<double> temperature_, top_p_, min_p_, presence_, frequency_, repetition_;
  std::optional<int32_t> top_k_, max_tokens_, logprobs_;
  std::optional<uint64_t> seed_;
  std::vector<std::string> stop_;
};

}  // namespace stillhouse::client

#endif  // STILLHOUSE_CLIENT_CLI_QUERY_FLAGS_H_
