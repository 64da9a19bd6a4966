// stillhouse-server: flags, signals, one ready line.
#include <pthread.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <iostream>
#include <map>
#include <set>
#include <string>

#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "server/wiring.h"

namespace {

constexpr char kExamples[] = R"(
Examples:
  stillhouse-server --model SmolLM2-135M-Instruct.Q4_1.gguf --store /var/lib/stillhouse
      One user on this machine: no keys, everything belongs to tenants/default.
  stillhouse-server --model m.gguf --store ./store --address 127.0.0.1:0 --metrics-address 127.0.0.1:0
      Free ports; the line "stillhouse listening on ..." says which.
  stillhouse-server --model m.gguf --store ./store --address 0.0.0.0:7070 \
      --admin-key-file admin.key --tls-cert server.pem --tls-key server.key
      For others: every call needs a key. Make the admin's with: openssl rand -hex 32 > admin.key
  stillhouse-server --model m.gguf --store ./store --device cuda --device-memory 60GiB --host-memory 32GiB
      A GPU shared with others: 60 GiB of it, and caches that do not fit there wait in 32 GiB of host memory.

Stop it with SIGTERM or Ctrl-C: answers in flight end (at most --drain seconds), builds go on at the next start.
Every flag can be given in a file: --config server.toml.)";

// A choice of words, each with its value.
template <typename Enum>
CLI::Option* AddChoice(CLI::App* app, const char* name, Enum* value, const std::map<std::string, Enum>& words,
                       const char* help) {
  std::set<std::string> names;
  for (const auto& [word, of_word] : words) names.insert(word);
  return app
      ->add_option_function<std::string>(
          name, [value, words](const std::string& word) { *value = words.at(word); }, help)
      ->transform(CLI::IsMember(names, CLI::ignore_case));
}

void AddFlags(CLI::App* app, stillhouse::ServerConfig* c, double* drain_seconds, std::string* log_level) {
  const CLI::AsSizeValue bytes(/*kb_is_1000=*/false);
  const auto group = [app](const char* name) { return app->add_option_group(name); };
  CLI::Option_group* what = group("What to serve");
  what->add_option("--model", c->model, "Model file (GGUF v3)")
      ->envname("STILLHOUSE_MODEL")
      ->required()
      ->check(CLI::ExistingFile);
  what->add_option("--random-weights", c->random_weights,
                   "For measuring: a model of this shape with generated parameters, and the file's tokenizer: "
                   "llama-3.1-8b, qwen3-4b or smollm2-135m")
      ->type_name("SHAPE");
  what->add_option("--store", c->store, "Folder of documents, caches, tenants; made if missing, one server at a time")
      ->envname("STILLHOUSE_STORE")
      ->required();

  CLI::Option_group* where = group("Where to listen");
  where->add_option("--address", c->address, "HOST:PORT for gRPC, or unix:PATH; port 0 picks a free one")
      ->capture_default_str();
  where
      ->add_option("--metrics-address", c->metrics_address,
                   "HOST:PORT of Prometheus metrics at /metrics; empty turns them off")
      ->capture_default_str();
  where->add_option("--metrics-tenant", c->metrics_tenants,
                    "Tenant that metrics name in their label (repeat it); others are counted as _other");
  where->add_flag("--reflection", c->reflection, "Let tools such as grpcurl list the services");

  CLI::Option_group* who = group("Who may call");
  who->add_option("--admin-key-file", c->admin_key_file,
                  "File with the key that makes tenants and their keys; with it, every call needs a key");
  who->add_option("--tls-cert", c->tls_cert, "PEM certificate chain; needs --tls-key");
  who->add_option("--tls-key", c->tls_key, "PEM private key; needs --tls-cert");
  who->add_option("--tls-client-ca", c->tls_client_ca, "PEM authorities: callers must show a certificate of theirs");
  who->add_flag("--insecure-listen", c->insecure_listen,
                "Listen off loopback although nothing says who calls (the network itself is safe)");
  who->add_option("--max-streams", c->max_streams, "Queries, uploads and exports at once, for each tenant")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  who->add_option("--requests-per-minute", c->requests_per_minute,
                  "Queries and scores, for each tenant; 0 is any number. A minute's worth may come at once")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  who->add_option("--tokens-per-minute", c->tokens_per_minute,
                  "Tokens of prompts and answers that these compute, for each tenant; 0 is any number. They are "
                  "charged afterwards: what is over delays the next")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  who->add_option("--max-stored-corpora", c->max_stored_corpora,
                  "All documents of a tenant, such as 10GiB; 0 is what the disk holds")
      ->transform(bytes)
      ->default_str("0");
  who->add_option("--max-stored-caches", c->max_stored_caches, "All caches of a tenant; 0 is what the disk holds")
      ->transform(bytes)
      ->default_str("0");
  who->add_option("--max-corpus", c->max_corpus, "Largest document, such as 256MiB")
      ->transform(bytes)
      ->default_str("1GiB");
  who->add_option("--max-artifact", c->max_artifact, "Largest imported cache file")
      ->transform(bytes)
      ->default_str("16GiB");

  CLI::Option_group* machine = group("The machine");
  AddChoice<stillhouse::Device>(
      machine, "--device", &c->device,
      {{"auto", stillhouse::Device::kAuto}, {"cpu", stillhouse::Device::kCpu}, {"cuda", stillhouse::Device::kCuda}},
      "auto (a GPU where there is one), cpu or cuda")
      ->default_str("auto");
  AddChoice<stillhouse::GpuWeights>(
      machine, "--gpu-weights", &c->gpu_weights,
      {{"f32", stillhouse::GpuWeights::kF32}, {"bf16", stillhouse::GpuWeights::kBf16}},
      "What a GPU decodes the model's matrices to: f32 (answers as on the CPU) or bf16 (faster, rounded)")
      ->default_str("f32");
  machine->add_option("--plans", c->plans,
                      "Plan file of stillhouse-tune: how products run on this GPU, over what comes with the server");
  AddChoice<stillhouse::KvType>(
      machine, "--kv", &c->kv,
      {{"auto", stillhouse::KvType::kAuto}, {"f32", stillhouse::KvType::kF32}, {"bf16", stillhouse::KvType::kBf16}},
      "What keys and values are held as: f32, bf16 (half the memory; on a GPU only), or auto: bf16 with "
      "--gpu-weights bf16")
      ->default_str("auto");
  machine->add_option("--threads", c->threads, "Processor threads; 0 is one for each core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  machine
      ->add_option("--context", c->context, "Positions that a sequence may have, memories included; 0 is the model's")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  machine->add_option("--max-sequences", c->max_sequences, "Queries that run together")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  machine->add_option("--max-queue", c->max_queue, "Queries that wait beside them; more are refused")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  machine
      ->add_option("--prefill-chunk", c->prefill_chunk,
                   "Prompt tokens in one step while other queries answer (default: 256 on a processor, 2048 on a GPU)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  machine
      ->add_option_function<std::string>(
          "--device-memory",
          [c](const std::string& text) {
            const absl::StatusOr<stillhouse::DeviceMemory> parsed = stillhouse::ParseDeviceMemory(text);
            if (!parsed.ok()) throw CLI::ValidationError("--device-memory", std::string(parsed.status().message()));
            c->device_memory = *parsed;
          },
          "What the server may take of a GPU: weights, caches, running queries, room to compute in. Bytes (60GiB), or "
          "a "
          "share of what is free at the start (90%). Beside it the driver holds about 0.8 GiB for the process")
      ->type_name("BYTES|PERCENT")
      ->default_str("90%");
  machine
      ->add_option("--kv-memory", c->kv_memory,
                   "Memory for the keys and values of running queries (default: 1GiB; on a GPU a quarter of what "
                   "--device-memory leaves)")
      ->transform(bytes);
  machine
      ->add_option("--resident-memory", c->resident_memory,
                   "Memory for caches that are ready for queries; the least used go first (default: 2GiB; on a GPU the "
                   "rest of --device-memory)")
      ->transform(bytes);
  machine
      ->add_option("--host-memory", c->host_memory,
                   "Page-locked host memory for copies of caches that left a GPU, from where they come back in "
                   "milliseconds; 0 keeps none (default: 4GiB with a GPU, else 0)")
      ->transform(bytes);

  CLI::Option_group* process = group("The process");
  process->add_option("--drain", *drain_seconds, "Seconds that answers in flight may take after SIGTERM")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 86400.0));
  process->add_option("--log-level", *log_level, "debug, info, warning or error")
      ->capture_default_str()
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}));
}

stillhouse::LogLevel ParseLogLevel(const std::string& text) {
  if (text == "debug") return stillhouse::LogLevel::kDebug;
  if (text == "warning") return stillhouse::LogLevel::kWarning;
  if (text == "error") return stillhouse::LogLevel::kError;
  return stillhouse::LogLevel::kInfo;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Serves a language model with lasting memories of documents, over gRPC.", "stillhouse-server");
  app.footer(kExamples);
  app.set_version_flag("--version", std::string("stillhouse-server ") + STILLHOUSE_VERSION);
  app.set_config("--config", "", "File of flags, one a line: address = \"0.0.0.0:7070\"");
  app.allow_config_extras(CLI::config_extras_mode::error);  // a mistyped flag must not be a missing one
  stillhouse::ServerConfig config;
  double drain_seconds = 30;
  std::string log_level = "info";
  AddFlags(&app, &config, &drain_seconds, &log_level);
  CLI11_PARSE(app, argc, argv);
  stillhouse::SetLogLevel(ParseLogLevel(log_level));

  // Blocked before any thread exists, so that only the wait below takes them.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  signal(SIGPIPE, SIG_IGN);

  absl::StatusOr<std::unique_ptr<stillhouse::RunningServer>> server = stillhouse::RunningServer::Start(config);
  if (!server.ok()) {
    std::cerr << "stillhouse-server: " << server.status().message() << std::endl;
    return 1;
  }
  std::cout << (*server)->ReadyLine() << std::endl;

  int signal_number = 0;
  sigwait(&stop, &signal_number);
  STILLHOUSE_LOG(INFO) << "stopping: answers in flight may take " << drain_seconds
                       << " s; a second signal ends at once";
  // From here on a signal has its default effect.
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  (*server)->Drain(absl::Now() + absl::Seconds(drain_seconds));
  server->reset();
  STILLHOUSE_LOG(INFO) << "stopped";
  return 0;
}
