#include <algorithm>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/format.h"
#include "client/cli/query_flags.h"
#include "client/cli/session.h"

// `stillhouse bench`: what a caller of a running server feels.
namespace stillhouse::client {
namespace {

struct BenchFlags {
  QueryFlags query;
  std::vector<int> streams = {1, 4, 16};
  int requests = 8;
  int tokens = 64;
  int warmup = 1;
  std::string prompt = "Say in a few sentences what this is about.";
};

// Nearest rank.
double Percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(p * static_cast<double>(values.size() - 1) + 0.5);
  return values[rank];
}

struct Samples {
  absl::Mutex mutex;
  std::vector<double> first ABSL_GUARDED_BY(mutex);
  std::vector<double> rate ABSL_GUARDED_BY(mutex);
  int64_t tokens ABSL_GUARDED_BY(mutex) = 0;
  int started ABSL_GUARDED_BY(mutex) = 0;
  int64_t kv_bytes ABSL_GUARDED_BY(mutex) = 0;
  absl::Status status ABSL_GUARDED_BY(mutex);
};

absl::Status Bench(Session& session, const BenchFlags& flags) {
  CLIENT_RETURN_IF_ERROR(flags.query.CheckMemories());
  CLIENT_ASSIGN(Client * client, session.Connect());
  CLIENT_ASSIGN(const auto memories, flags.query.Memories(*client));
  v1::QueryRequest request;
  for (const std::string& name : memories) request.add_caches(name);
  v1::Message& message = *request.mutable_messages()->add_messages();
  message.set_role("user");
  message.set_content(flags.prompt);
  request.mutable_sampling()->set_max_tokens(flags.tokens);
  request.mutable_sampling()->set_ignore_eos(true);
  for (int i = 0; i < flags.warmup; ++i) CLIENT_RETURN_IF_ERROR(client->Ask(request).status());

  Table table({"STREAMS>", "REQUESTS>", "FIRST TOKEN p50>", "p95>", "TOKENS/S EACH p50>", "TOKENS/S IN ALL>",
               "KV BYTES EACH>"});
  for (const int streams : flags.streams) {
    const int total = std::max(flags.requests, streams);
    Samples samples;
    const auto work = [&] {
      while (true) {
        {
          absl::MutexLock lock(&samples.mutex);
          if (!samples.status.ok() || samples.started == total) return;
          ++samples.started;
        }
        const auto answer = client->Ask(request);
        absl::MutexLock lock(&samples.mutex);
        if (!answer.ok()) {
          samples.status = answer.status();
          return;
        }
        const double first = absl::ToDoubleSeconds(answer->first_token);
        const double rest = absl::ToDoubleSeconds(answer->total) - first;
        const int tokens = answer->finish.usage().completion_tokens();
        samples.first.push_back(first);
        if (tokens > 1 && rest > 0) samples.rate.push_back((tokens - 1) / rest);
        samples.tokens += tokens;
        samples.kv_bytes = answer->finish.usage().kv_bytes();
      }
    };
    const absl::Time start = absl::Now();
    std::vector<std::thread> threads;
    for (int i = 0; i < streams; ++i) threads.emplace_back(work);
    for (std::thread& thread : threads) thread.join();
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    absl::MutexLock lock(&samples.mutex);
    if (!samples.status.ok()) return samples.status;
    const double all = static_cast<double>(samples.tokens) / seconds;
    if (session.json) {
      session.PrintJson({{"streams", streams},
                         {"requests", total},
                         {"tokens_per_request", flags.tokens},
                         {"first_token_seconds_p50", Percentile(samples.first, 0.5)},
                         {"first_token_seconds_p95", Percentile(samples.first, 0.95)},
                         {"decode_tokens_per_second_p50", Percentile(samples.rate, 0.5)},
                         {"tokens_per_second", all},
                         {"seconds", seconds},
                         {"kv_bytes", samples.kv_bytes}});
    } else {
      session.Note(absl::StrCat("measured ", streams, streams == 1 ? " stream" : " streams"));
      table.Row({absl::StrCat(streams), absl::StrCat(total), Seconds(Percentile(samples.first, 0.5)),
                 Seconds(Percentile(samples.first, 0.95)), Number(Percentile(samples.rate, 0.5), 1), Number(all, 1),
                 Bytes(samples.kv_bytes)});
    }
  }
  if (!session.json) session.Print(table.Text());
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = app.add_subcommand("bench", "Measure a running server: first token, decode rate, many streams");
  command->footer(
      "Examples:\n"
      "  stillhouse bench --cache handbook\n"
      "  stillhouse bench --no-cache --streams 1,2,8 --requests 32 --tokens 128 --json");
  flags->query.DeclareMemories(*command);
  command->add_option("--streams", flags->streams, "Queries at once, a run each")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--requests", flags->requests, "Queries per run, at least one per stream")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--tokens", flags->tokens, "Tokens per answer, exactly")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--warmup", flags->warmup, "Queries before the first run")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--prompt", flags->prompt, "The question")->capture_default_str();
  command->callback([&session, flags] { session.action = [&session, flags] { return Bench(session, *flags); }; });
}

}  // namespace stillhouse::client
