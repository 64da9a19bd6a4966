#include "server/wiring.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "cache_store/garbage_collector.h"
#include "cache_store/store.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/plan/plans_in_use.h"
#include "server/corpus/build_queue.h"
#include "server/corpus/directory.h"
#include "server/engine/engine.h"
#include "server/engine/memory_plan.h"
#include "server/load/llama_gguf.h"
#include "server/metrics/metrics.h"
#include "server/observers.h"
#include "server/service/grpc_server.h"
#include "server/service/scorer.h"
#include "server/service/service_context.h"
#include "server/tenancy/authenticator.h"
#include "server/tenancy/listen_policy.h"
#include "server/tenancy/quota.h"
#include "server/tenancy/tenant_registry.h"

namespace stillhouse {

// In the order of construction: what is below may use what is above, and is destroyed before it.
struct RunningServer::Parts {
  ServerConfig config;
  std::unique_ptr<Backend> backend;
  GgufModel model;
  std::unique_ptr<Store> store;
  std::unique_ptr<GarbageCollector> garbage;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<EngineMetrics> engine_metrics;
  std::unique_ptr<DirectoryMetrics> directory_metrics;
  std::unique_ptr<BuildMetrics> build_metrics;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Directory> directory;
  std::unique_ptr<Quota> quota;
  std::unique_ptr<BuildQueue> builds;
  std::unique_ptr<Scorer> scorer;
  std::unique_ptr<GaugeSampler> sampler;
  std::mutex sampler_mutex;
  std::unique_ptr<Authenticator> authenticator;
  std::unique_ptr<TenantRegistry> tenants;
  std::unique_ptr<ServiceContext> service;
  std::unique_ptr<GrpcServer> grpc;
  int metrics_port = 0;
  MemoryPlan memory;          // of a GPU
  int64_t host_memory = 0;    // bytes of the host tier
  int64_t scorer_memory = 0;  // of `memory.sequences`; 0: what a context takes

  Context context() const { return Context{backend.get()}; }
};

namespace {

absl::StatusOr<std::string> ReadFile(const std::string& flag, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return absl::NotFoundError(StrCat(flag, ": cannot read ", path));
  }
  return text.str();
}

absl::Status Explain(const std::string& what, const absl::Status& status) {
  return absl::Status(status.code(), StrCat(what, ": ", ToStd(status.message())));
}

// `why_cpu` says what kept kAuto from the GPU.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const ServerConfig& config, absl::Status* why_cpu) {
  if (!config.plans.empty()) {
    const absl::StatusOr<PlanBook> plans = PlanBook::Load(config.plans);
    if (!plans.ok()) return Explain("--plans", plans.status());
    UsePlans(*plans);
  }
  CpuBackendOptions cpu;
  cpu.threads = config.threads;
  if (config.device == Device::kCpu) return MakeCpuBackend(cpu);
  CudaBackendOptions cuda;
  cuda.threads = config.threads;
  cuda.storage = config.gpu_weights == GpuWeights::kBf16 ? CudaStorage::kBf16 : CudaStorage::kF32;
  absl::StatusOr<std::unique_ptr<Backend>> backend = MakeCudaBackend(cuda);
  if (backend.ok() || config.device == Device::kCuda) return backend;
  *why_cpu = backend.status();
  return MakeCpuBackend(cpu);
}

absl::StatusOr<DType> KvDType(const ServerConfig& config, const Backend& backend) {
  const bool gpu = backend.device() == DeviceType::kCuda;
  switch (config.kv) {
    case KvType::kF32:
      return DType::kF32;
    case KvType::kBf16:
      if (!gpu) return absl::InvalidArgumentError("--kv bf16 needs a GPU: leave it out, or give --device cuda");
      return DType::kBF16;
    case KvType::kAuto:
      break;
  }
  return gpu && config.gpu_weights == GpuWeights::kBf16 ? DType::kBF16 : DType::kF32;
}

// What the driver takes for this process once its kernels and libraries are loaded, beside what it holds at the start:
// 195 MiB on an H200.
constexpr int64_t kLaterContext = int64_t{256} << 20;

// The bytes that the server may take of a GPU: its pools refuse more from here on. The driver's own part is not theirs.
absl::StatusOr<int64_t> LimitDeviceMemory(const ServerConfig& config, Backend* backend) {
  const int64_t free = std::max<int64_t>(0, backend->memory().free - kLaterContext);
  const int64_t limit = config.device_memory.bytes > 0
                            ? static_cast<int64_t>(std::min<uint64_t>(config.device_memory.bytes, INT64_MAX))
                            : static_cast<int64_t>(static_cast<double>(free) * config.device_memory.percent / 100.0);
  if (limit > free) {
    return absl::ResourceExhaustedError(StrCat("--device-memory ", limit, " is more than ", backend->name(),
                                               " has free, ", BytesForPeople(free),
                                               ": give less, or end what else uses the GPU"));
  }
  backend->LimitMemory(limit);
  return limit;
}

// How --device-memory is shared out over a model that takes `weights` bytes.
absl::StatusOr<MemoryPlan> PlanFor(const ServerConfig& config, const Context& ctx, const ModelConfig& model,
                                   int64_t device, int64_t weights, const EngineOptions& engine) {
  const EngineOptions options = ResolveOptions(engine, ctx.backend->device());
  MemoryRequest request;
  request.device = device;
  request.weights = weights;
  request.page_bytes = PagePool::BytesFor(ctx, model, options.kv_dtype, PagePool::kPageSlots);
  // Without queries that wait for their next token a step takes four times the chunk (PlanStep).
  request.prefill_rows = 4 * options.prefill_chunk;
  request.output_rows = std::max(options.max_sequences, options.max_background_sequences);
  const auto bytes = [](std::optional<uint64_t> flag) -> std::optional<int64_t> {
    if (!flag) return std::nullopt;
    return static_cast<int64_t>(std::min<uint64_t>(*flag, int64_t{1} << 60));
  };
  request.sequences = bytes(config.kv_memory);
  request.memories = bytes(config.resident_memory);
  return PlanMemory(model, request);
}

// Every matrix and vector of the model, once.
std::vector<Tensor> AllTensors(const Weights& weights) {
  std::vector<Tensor> all = {weights.embedding, weights.final_norm};
  if (!weights.config.tied_embeddings) all.push_back(weights.output);
  for (const LayerWeights& w : weights.layers) {
    for (const Tensor& t : {w.attn_norm, w.qkv, w.q, w.k, w.v, w.q_bias, w.k_bias, w.v_bias, w.q_norm, w.k_norm, w.o,
                            w.ffn_norm, w.gate_up, w.gate, w.up, w.down}) {
      all.push_back(t);
    }
  }
  return all;
}

void FillModelFacts(const Weights& weights, ServerFacts* facts) {
  std::map<std::string, int64_t> by_type;
  for (const Tensor& t : AllTensors(weights)) {
    if (!t.defined()) continue;
    facts->parameters += t.elements();
    by_type[DTypeName(t.dtype())] += t.elements();
  }
  int64_t most = 0;
  for (const auto& [name, elements] : by_type) {
    if (elements > most) {
      most = elements;
      facts->quantisation = absl::AsciiStrToUpper(name);
    }
  }
  facts->weight_bytes = weights.bytes();
  facts->model = weights.config;
  facts->model_fingerprint = weights.fingerprint;
}

std::vector<ServerFacts::Kernel> Kernels(const Backend& backend) {
  const KernelTable& table = backend.kernels();
  // "cpu avx2": the variant is what follows the backend's name.
  const std::string name = backend.name();
  const size_t space = name.find(' ');
  const std::string variant = space == std::string::npos ? name : name.substr(space + 1);
  std::vector<ServerFacts::Kernel> kernels;
#define STILLHOUSE_OP(Name) \
  if (table.Name != nullptr) kernels.push_back({#Name, variant, ""});
#define STILLHOUSE_OP_GRAD(Name)                                      \
  if (table.Name != nullptr) kernels.push_back({#Name, variant, ""}); \
  if (table.Name##Grad != nullptr) kernels.push_back({#Name "Grad", variant, ""});
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
  if (backend.device() != DeviceType::kCpu) {
    const int plans = PlansInUse().CountFor(variant);
    for (ServerFacts::Kernel& kernel : kernels) {
      if (kernel.op != "DecomposeK") continue;
      kernel.plan = plans > 0 ? StrCat(plans, " plans for this GPU")
                              : "by shape: no plans for this GPU (stillhouse tune makes them)";
    }
  }
  return kernels;
}

ArtifactFingerprints Fingerprints(const GgufModel& model) {
  const ModelConfig& config = model.weights->config;
  ArtifactFingerprints out;
  out.model = model.weights->fingerprint;
  out.tokenizer = model.tokenizer->Fingerprint();
  out.chat_template = model.chat->Fingerprint();
  out.rope_layout = config.RopeLayoutName();
  out.rope_scaling = config.rope.Fingerprint();
  out.dtype = "F32";
  return out;
}

}  // namespace

absl::StatusOr<DeviceMemory> ParseDeviceMemory(const std::string& text) {
  DeviceMemory out;
  if (absl::EndsWith(text, "%")) {
    if (!absl::SimpleAtod(text.substr(0, text.size() - 1), &out.percent) || !(out.percent > 0) || out.percent > 100) {
      return absl::InvalidArgumentError(StrCat("'", text, "' is no share; give more than 0% and at most 100%"));
    }
    return out;
  }
  std::string digits = text;
  uint64_t unit = 1;
  const std::pair<const char*, int> units[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}, {"KB", 10},
                                               {"MB", 20},  {"GB", 30},  {"TB", 40},  {"B", 0}};
  for (const auto& [name, shift] : units) {
    if (!absl::EndsWithIgnoreCase(text, name)) continue;
    digits = text.substr(0, text.size() - std::string(name).size());
    unit = uint64_t{1} << shift;
    break;
  }
  double number = 0;
  if (!absl::SimpleAtod(digits, &number) || !(number * static_cast<double>(unit) >= 1) ||
      number * static_cast<double>(unit) > 1e18) {
    return absl::InvalidArgumentError(StrCat("'", text, "' is no size; give bytes (60GiB) or a share (90%)"));
  }
  out.bytes = static_cast<uint64_t>(number * static_cast<double>(unit));
  return out;
}

RunningServer::RunningServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

RunningServer::~RunningServer() {
  // The endpoint first, while everything that its calls use is alive; then the sampler's thread.
  parts_->grpc.reset();
  parts_->metrics->StopServing();
  // The engine outlives the directory.
  parts_->backend->pool().SetReclaimer(nullptr);
}

absl::StatusOr<std::unique_ptr<RunningServer>> RunningServer::Start(const ServerConfig& config) {
  // What a mistake in the flags can break comes first: a model takes a while to load.
  STILLHOUSE_ASSIGN_OR_RETURN(const std::string key_text, ReadFile("--admin-key-file", config.admin_key_file));
  std::string admin_key;
  if (!config.admin_key_file.empty()) {
    const absl::StatusOr<std::string> key = ParseAdminKey(key_text);
    if (!key.ok()) return Explain("--admin-key-file", key.status());
    admin_key = *key;
  }
  GrpcServerOptions grpc;
  grpc.address = config.address;
  grpc.reflection = config.reflection;
  STILLHOUSE_ASSIGN_OR_RETURN(grpc.tls_certificate, ReadFile("--tls-cert", config.tls_cert));
  STILLHOUSE_ASSIGN_OR_RETURN(grpc.tls_key, ReadFile("--tls-key", config.tls_key));
  STILLHOUSE_ASSIGN_OR_RETURN(grpc.tls_client_ca, ReadFile("--tls-client-ca", config.tls_client_ca));
  if (grpc.tls_certificate.empty() != grpc.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls-cert needs --tls-key, and --tls-key a certificate that is not empty");
  }
  ListenPlan plan;
  plan.address = config.address;
  plan.keys = !admin_key.empty();
  plan.tls = !grpc.tls_certificate.empty();
  plan.client_certificates = !grpc.tls_client_ca.empty();
  plan.insecure_listen = config.insecure_listen;
  STILLHOUSE_RETURN_IF_ERROR(CheckListenPlan(plan));
  if (plan.keys && !plan.tls && !IsLoopback(config.address)) {
    STILLHOUSE_LOG(WARNING) << "keys travel in the clear on " << config.address << ": give --tls-cert and --tls-key";
  }

  auto parts = std::make_unique<Parts>();
  Parts& p = *parts;
  p.config = config;
  StoreOptions store;
  store.directory = config.store;
  absl::StatusOr<std::unique_ptr<Store>> opened = OpenEmbeddedStore(store);
  if (!opened.ok()) return Explain(StrCat("--store ", config.store), opened.status());
  p.store = *std::move(opened);
  p.garbage = std::make_unique<GarbageCollector>(p.store.get(), absl::Hours(1));
  if (!plan.keys) STILLHOUSE_RETURN_IF_ERROR(p.store->EnsureTenant(kDefaultTenant).status());

  absl::Status why_cpu;
  STILLHOUSE_ASSIGN_OR_RETURN(p.backend, MakeBackend(config, &why_cpu));
  const Context ctx = p.context();
  EngineOptions engine;
  engine.max_sequences = config.max_sequences;
  engine.max_waiting = config.max_queue;
  engine.prefill_chunk = config.prefill_chunk;
  engine.context_limit = config.context;
  STILLHOUSE_ASSIGN_OR_RETURN(engine.kv_dtype, KvDType(config, *p.backend));

  // A GPU's memory is planned before the model is put there, from its shape, and then from what it took.
  const bool gpu = p.backend->device() != DeviceType::kCpu;
  int64_t device_memory = 0;
  if (gpu) {
    STILLHOUSE_ASSIGN_OR_RETURN(device_memory, LimitDeviceMemory(config, p.backend.get()));
  }
  const auto admit = [&](const ModelConfig& shape) -> absl::Status {
    if (!gpu) return absl::OkStatus();
    const bool bf16 = config.gpu_weights == GpuWeights::kBf16;
    const int64_t weights = WeightBytes(shape, bf16 ? 2 : 4);
    STILLHOUSE_RETURN_IF_ERROR(PlanFor(config, ctx, shape, device_memory, weights, engine).status());
    // Generated parameters are bf16 first, all of them.
    const int64_t generated = config.random_weights.empty() || bf16 ? 0 : WeightBytes(shape, 2);
    if (weights + generated <= device_memory) return absl::OkStatus();
    return absl::ResourceExhaustedError(StrCat("generating weights takes ", BytesForPeople(weights + generated),
                                               " for a moment: give --device-memory as much, or --gpu-weights bf16"));
  };
  absl::StatusOr<GgufModel> model = LoadGgufModel(ctx, config.model, config.random_weights, admit);
  if (!model.ok()) {
    if (absl::IsResourceExhausted(model.status())) return model.status();
    return Explain(StrCat("--model ", config.model), model.status());
  }
  p.model = *std::move(model);
  if (gpu) {
    p.backend->Synchronize();
    ctx.pool().Trim();  // the file's bytes, before they were decoded
    if (ctx.pool().overflowed_bytes() > 0) {
      return absl::ResourceExhaustedError(StrCat("the GPU had no memory left while the model was loaded, although ",
                                                 BytesForPeople(device_memory),
                                                 " of it were free before: end what else uses the GPU"));
    }
    const ModelConfig& shape = p.model.weights->config;
    STILLHOUSE_ASSIGN_OR_RETURN(p.memory, PlanFor(config, ctx, shape, device_memory, p.model.weights->bytes(), engine));
    STILLHOUSE_LOG(INFO) << "of " << BytesForPeople(device_memory) << " of GPU memory: weights "
                         << BytesForPeople(p.memory.weights) << ", work " << BytesForPeople(p.memory.work)
                         << ", builds " << BytesForPeople(p.memory.builds) << ", running queries "
                         << BytesForPeople(p.memory.sequences) << ", caches " << BytesForPeople(p.memory.memories);
    const TensorDevice::MemoryUse use = p.backend->memory();
    STILLHOUSE_LOG(INFO) << "beside that the GPU's driver counts " << BytesForPeople(use.used - use.taken)
                         << ", for this process (about 0.8 GiB once queries and builds run) and for other programs";
  } else {
    p.memory.sequences = static_cast<int64_t>(config.kv_memory.value_or(uint64_t{1} << 30));
    p.memory.memories = static_cast<int64_t>(config.resident_memory.value_or(uint64_t{2} << 30));
  }
  p.host_memory = static_cast<int64_t>(config.host_memory.value_or(gpu ? uint64_t{4} << 30 : 0));
  if (!config.random_weights.empty()) {
    STILLHOUSE_LOG(WARNING) << "the parameters of " << p.model.weights->config.name
                            << " are generated: answers are noise, for measuring only";
  }
  if (p.model.chat == nullptr) return Explain("the model's chat template", p.model.chat_status);
  if (!why_cpu.ok()) STILLHOUSE_LOG(INFO) << "running on the processor: " << why_cpu.message();

  p.metrics = std::make_unique<Metrics>(MetricsOptions{config.metrics_tenants});
  p.engine_metrics = std::make_unique<EngineMetrics>(p.metrics.get());
  p.directory_metrics = std::make_unique<DirectoryMetrics>(p.metrics.get());
  p.build_metrics = std::make_unique<BuildMetrics>(p.metrics.get());

  if (gpu) {
    // What is scored has pages of its own, of the same part.
    const ModelConfig& shape = p.model.weights->config;
    const int64_t context = config.context > 0 ? std::min(config.context, shape.context_length) : shape.context_length;
    p.scorer_memory = std::min(PagePool::BytesFor(ctx, shape, engine.kv_dtype, context), p.memory.sequences / 4);
  }
  engine.page_budget_bytes = p.memory.sequences - p.scorer_memory;
  engine.vocabulary = p.model.tokenizer->vocab_size();
  engine.observer = p.engine_metrics.get();
  p.engine = std::make_unique<Engine>(ctx, p.model.weights, engine);

  DirectoryOptions directory;
  directory.budget_bytes = p.memory.memories;
  directory.host_budget_bytes = p.host_memory;
  directory.dtype = engine.kv_dtype;
  directory.observer = p.directory_metrics.get();
  p.directory = std::make_unique<Directory>(ctx, p.model.weights, Fingerprints(p.model), p.store.get(), directory);
  p.backend->pool().SetReclaimer(
      [d = p.directory.get()](size_t bytes) { return d->GiveUp(static_cast<int64_t>(bytes)); });

  QuotaLimits limits;
  limits.streams_per_tenant = config.max_streams;
  limits.corpus_bytes = config.max_corpus;
  limits.artifact_bytes = config.max_artifact;
  limits.stored_corpora_bytes = config.max_stored_corpora;
  limits.stored_caches_bytes = config.max_stored_caches;
  limits.requests_per_minute = config.requests_per_minute;
  limits.tokens_per_minute = config.tokens_per_minute;
  p.quota = std::make_unique<Quota>(limits);

  BuildServices services;
  services.engine = p.engine.get();
  services.store = p.store.get();
  services.directory = p.directory.get();
  services.tokenizer = p.model.tokenizer.get();
  services.chat = p.model.chat.get();
  if (gpu) services.device_bytes = p.memory.builds;
  BuildQueueOptions builds;
  builds.observer = p.build_metrics.get();
  builds.admit_bytes = [store = p.store.get(), quota = p.quota.get()](
                           std::string_view tenant, uint64_t bytes,
                           uint64_t freed) -> absl::StatusOr<std::shared_ptr<void>> {
    STILLHOUSE_ASSIGN_OR_RETURN(Quota::Lease lease, quota->AdmitBytes(store, tenant, Stored::kCaches, bytes, freed));
    return std::make_shared<Quota::Lease>(std::move(lease));
  };
  p.builds = std::make_unique<BuildQueue>(services, builds);
  p.scorer = std::make_unique<Scorer>(ctx, p.engine.get(), p.scorer_memory);

  p.authenticator = std::make_unique<Authenticator>(p.store.get(), admin_key);
  p.tenants = std::make_unique<TenantRegistry>(p.store.get());

  p.service = std::make_unique<ServiceContext>();
  ServiceContext& s = *p.service;
  s.store = p.store.get();
  s.authenticator = p.authenticator.get();
  s.tenants = p.tenants.get();
  s.quota = p.quota.get();
  s.metrics = p.metrics.get();
  s.tokenizer = p.model.tokenizer.get();
  s.chat = p.model.chat.get();
  s.engine = p.engine.get();
  s.directory = p.directory.get();
  s.builds = p.builds.get();
  s.doors.submit = [e = p.engine.get()](GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
    return e->Submit(std::move(request), std::move(sink));
  };
  s.doors.cancel = [e = p.engine.get()](GenerationHandle handle) { e->Cancel(handle); };
  s.doors.pin = [d = p.directory.get()](std::string_view tenant, std::string_view corpus, std::string_view cache) {
    return d->Pin(tenant, corpus, cache);
  };
  s.doors.score = [scorer = p.scorer.get()](const ScoreRequest& request) { return scorer->Score(request); };
  ServerFacts& facts = s.facts;
  facts.version = STILLHOUSE_VERSION;
  facts.backend = p.backend->device() == DeviceType::kCpu ? "cpu" : "cuda";
  facts.device = p.backend->name();
  facts.threads = p.backend->threads().num_threads();
  facts.start_time = absl::Now();
  facts.context_tokens = p.engine->context_limit();
  facts.chat_template = p.model.chat->name();
  facts.kernels = Kernels(*p.backend);
  facts.max_sequences = static_cast<int>(config.max_sequences);
  facts.max_queue = static_cast<int>(config.max_queue);
  FillModelFacts(*p.model.weights, &facts);

  p.metrics->Set(Metric::kWeightsBytes, static_cast<double>(facts.weight_bytes));
  p.metrics->Set(Metric::kBuildInfo, 1, {facts.version, facts.backend});
  p.sampler = std::make_unique<GaugeSampler>(p.metrics.get(), p.engine.get(), p.directory.get(), p.store.get(),
                                             p.backend.get(), facts.weight_bytes);
  p.metrics->AddSampler([&p] {
    std::lock_guard<std::mutex> lock(p.sampler_mutex);
    p.sampler->Sample();
  });
  auto server = std::unique_ptr<RunningServer>(new RunningServer(std::move(parts)));
  if (!config.metrics_address.empty()) {
    STILLHOUSE_ASSIGN_OR_RETURN(p.metrics_port, p.metrics->Serve(config.metrics_address));
  }
  STILLHOUSE_ASSIGN_OR_RETURN(p.grpc, GrpcServer::Start(p.service.get(), grpc));
  return server;
}

std::string RunningServer::ReadyLine() const {
  const auto with_port = [](const std::string& address, int port) {
    return port == 0 ? address : StrCat(address.substr(0, address.rfind(':')), ":", port);
  };
  const ServerConfig& config = parts_->config;
  std::string line = StrCat("stillhouse listening on ", with_port(config.address, parts_->grpc->port()));
  if (!config.metrics_address.empty()) {
    line += StrCat(", metrics on http://", with_port(config.metrics_address, parts_->metrics_port), "/metrics");
  }
  const ServerFacts& facts = parts_->service->facts;
  return line + StrCat(", model ", facts.model.name, ", ", facts.device, ", ", facts.threads, " threads");
}

void RunningServer::Drain(absl::Time deadline) { parts_->grpc->Drain(deadline); }

}  // namespace stillhouse
