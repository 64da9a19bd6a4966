#include "client/cli/query_flags.h"

#include "client/cli/session.h"
#include "client/names.h"

namespace stillhouse::client {

void QueryFlags::DeclareMemories(CLI::App& command) {
  CLI::Option* cache = command.add_option("-c,--cache", caches_,
                                          "Memory to answer from: CORPUS/CACHE, or CORPUS for its newest; may be given "
                                          "several times, in order");
  cache->take_all()->expected(1)->allow_extra_args(false);  // what follows its value is the question
  command.add_flag("--no-cache", no_cache_, "Ask the plain model")->excludes(cache);
}

void QueryFlags::DeclareSampling(CLI::App& command) {
  const std::string group = "Sampling";
  command.add_option("--temperature", temperature_, "0 to 2; 0 is greedy (the default)")->group(group);
  command.add_option("--top-p", top_p_, "(0, 1]")->group(group);
  command.add_option("--top-k", top_k_, "1 or more")->group(group);
  command.add_option("--min-p", min_p_, "0 to 1")->group(group);
  command.add_option("--presence-penalty", presence_, "-2 to 2")->group(group);
  command.add_option("--frequency-penalty", frequency_, "-2 to 2")->group(group);
  command.add_option("--repetition-penalty", repetition_, "(0, 2]; 1 is off")->group(group);
  command.add_option("--max-tokens", max_tokens_, "Longest answer (default 256)")->group(group);
  command.add_option("--stop", stop_, "End the answer before this text; may be given several times")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false)
      ->group(group);
  command.add_option("--seed", seed_, "Same seed and request: same text")->group(group);
  command.add_option("--logprobs", logprobs_, "Log-probabilities of this many likeliest tokens (with --json --events)")
      ->group(group);
}

absl::Status QueryFlags::CheckMemories() const {
  if (!caches_.empty() || no_cache_) return absl::OkStatus();
  return absl::InvalidArgumentError("Name the memory with --cache CORPUS, or ask the plain model with --no-cache.");
}

absl::StatusOr<std::vector<std::string>> QueryFlags::Memories(Client& client) const {
  std::vector<std::string> names;
  if (caches_.empty()) return names;
  CLIENT_ASSIGN(const std::string tenant, client.Tenant());
  for (const std::string& text : caches_) {
    CLIENT_ASSIGN(names.emplace_back(), MemoryName(tenant, text));
  }
  return names;
}

v1::SamplingOptions QueryFlags::Sampling() const {
  v1::SamplingOptions options;
  if (temperature_) options.set_temperature(*temperature_);
  if (top_p_) options.set_top_p(*top_p_);
  if (top_k_) options.set_top_k(*top_k_);
  if (min_p_) options.set_min_p(*min_p_);
  if (presence_) options.set_presence_penalty(*presence_);
  if (frequency_) options.set_frequency_penalty(*frequency_);
  if (repetition_) options.set_repetition_penalty(*repetition_);
  if (max_tokens_) options.set_max_tokens(*max_tokens_);
  if (seed_) options.set_seed(*seed_);
  if (logprobs_) options.set_logprobs(*logprobs_);
  for (const std::string& stop : stop_) options.add_stop(stop);
  return options;
}

}  // namespace stillhouse::client
