// What every service of one server shares. Built by the wiring, which owns all that it points to.
#ifndef STILLHOUSE_SERVER_SERVICE_SERVICE_CONTEXT_H_
#define STILLHOUSE_SERVER_SERVICE_SERVICE_CONTEXT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/corpus/directory.h"
#include "server/engine/engine.h"
#include "server/service/live_requests.h"
#include "server/service/scorer.h"
#include "server/service/work_pool.h"

namespace stillhouse {

class Authenticator;
class BuildQueue;
class ChatTemplate;
class Metrics;
class Quota;
class Store;
class TenantRegistry;
class Tokenizer;

// Facts that do not change while the server runs.
struct ServerFacts {
  std::string version;
  std::string backend;  // "cpu" or "cuda"
  std::string device;   // in words
  int threads = 0;
  absl::Time start_time;
  std::string quantisation;  // of most weights: "Q4_1"
  int64_t parameters = 0;
  int64_t weight_bytes = 0;
  ModelConfig model;
  int64_t context_tokens = 0;  // that a sequence may have
  std::string model_fingerprint;
  std::string chat_template;
  struct Kernel {
    std::string op, variant, plan;
  };
  std::vector<Kernel> kernels;
  int max_sequences = 0;
  int max_queue = 0;
};

// The engine and the directory as queries use them: functions, so that a test can stand in for either.
struct InferenceDoors {
  std::function<absl::StatusOr<GenerationHandle>(GenerationRequest, std::shared_ptr<GenerationSink>)> submit;
  std::function<void(GenerationHandle)> cancel;
  std::function<absl::StatusOr<PinnedMemory>(std::string_view tenant, std::string_view corpus, std::string_view cache)>
      pin;
  std::function<absl::StatusOr<ScoreResult>(const ScoreRequest&)> score;
};

// Members are declared so that the pools, whose jobs use the rest, end first.
struct ServiceContext {
  Store* store = nullptr;
  const Authenticator* authenticator = nullptr;
  TenantRegistry* tenants = nullptr;
  Quota* quota = nullptr;
  Metrics* metrics = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatTemplate* chat = nullptr;
  Engine* engine = nullptr;
  Directory* directory = nullptr;
  BuildQueue* builds = nullptr;
  InferenceDoors doors;
  ServerFacts facts;

  std::atomic<bool> draining{false};        // new calls are refused
  std::atomic<int64_t> calls_in_flight{0};  // of our own services
  LiveRequests live;
  WorkPool events{4};  // writes what the engine has drawn; its jobs never wait
  WorkPool work{16};   // the rest: its jobs read disks, wait for loads, and compute
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_SERVICE_SERVICE_CONTEXT_H_
