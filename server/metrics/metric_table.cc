#include "server/metrics/metric_table.h"

namespace stillhouse {
namespace {

using enum MetricType;

const std::vector<double>& LatencyBuckets() {
  static const auto* buckets =
      new std::vector<double>{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300};
  return *buckets;
}

const std::vector<double>& StageBuckets() {
  static const auto* buckets =
      new std::vector<double>{0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 10800, 43200};
  return *buckets;
}

const std::vector<const char*>& Methods() {
  static const auto* methods = new std::vector<const char*>{"none", "CARTRIDGE", "ATTENTION_MATCHING", "FULL"};
  return *methods;
}

std::vector<MetricSpec> MakeTable() {
  const std::vector<const char*> tiers = {"disk", "host", "device"};
  const std::vector<const char*> token_kinds = {"prompt", "cached", "completion", "scored", "background"};
  const std::vector<const char*> stages = {"queued",   "tokenising", "self_study", "compacting",
                                           "training", "evaluating", "storing"};
  return {
      {Metric::kTimeToFirstToken,
       kHistogram,
       "stillhouse_time_to_first_token_seconds",
       "From a query's arrival to its first token.",
       {},
       LatencyBuckets()},
      {Metric::kInterTokenLatency,
       kHistogram,
       "stillhouse_inter_token_latency_seconds",
       "Between two tokens of one answer.",
       {},
       LatencyBuckets()},
      {Metric::kRequestQueue,
       kHistogram,
       "stillhouse_request_queue_seconds",
       "From admission to the first engine step.",
       {},
       LatencyBuckets()},
      {Metric::kRequestPrefill,
       kHistogram,
       "stillhouse_request_prefill_seconds",
       "From the first engine step to the first token.",
       {},
       LatencyBuckets()},
      {Metric::kRequestDecode,
       kHistogram,
       "stillhouse_request_decode_seconds",
       "From the first token to the last.",
       {},
       LatencyBuckets()},
      {Metric::kE2eRequest,
       kHistogram,
       "stillhouse_e2e_request_seconds",
       "From a query's arrival to its end.",
       {},
       LatencyBuckets()},
      {Metric::kCacheLoad,
       kHistogram,
       "stillhouse_cache_load_seconds",
       "Loading a memory, by where it came from.",
       {{"tier", tiers}},
       LatencyBuckets()},
      {Metric::kBuildStage,
       kHistogram,
       "stillhouse_build_stage_seconds",
       "Time a build spent in each of its stages.",
       {{"method", Methods()}, {"stage", stages}},
       StageBuckets()},

      {Metric::kKvCanonicalBytes,
       kGauge,
       "stillhouse_kv_canonical_bytes",
       "Key/value bytes of the resident memories by their definition, whatever holds them.",
       {{"method", Methods()}}},
      {Metric::kKvAllocatedBytes,
       kGauge,
       "stillhouse_kv_allocated_bytes",
       "Key/value bytes really allocated: memories, running sequences and padding; beside a GPU, host is the tier of "
       "memories that left it.",
       {{"tier", {"host", "device"}}}},
      {Metric::kWeightsBytes, kGauge, "stillhouse_weights_bytes", "Bytes of the model's weights in memory."},
      {Metric::kStoreBytes,
       kGauge,
       "stillhouse_store_bytes",
       "Bytes on disk.",
       {{"kind", {"corpora", "caches", "checkpoints", "uploads", "quarantine", "catalog"}}}},
      {Metric::kResidentCaches, kGauge, "stillhouse_resident_caches", "Memories that queries can use at once."},
      {Metric::kCompressionRatio,
       kHistogram,
       "stillhouse_compression_ratio",
       "Document tokens per slot, of memories as they become resident.",
       {},
       {1, 2, 4, 8, 10, 16, 20, 32, 40, 64, 100, 200}},
      {Metric::kDeviceMemoryBytes,
       kGauge,
       "stillhouse_device_memory_bytes",
       "Memory of the compute device, by its driver's count; on the host what the server's pool holds, and what is "
       "free.",
       {{"state", {"used", "free"}}}},
      {Metric::kDeviceAllocatedBytes,
       kGauge,
       "stillhouse_device_allocated_bytes",
       "What the device's memory is used for. On a GPU the parts add up to state=\"used\": other is the CUDA context, "
       "kernels, libraries, and other processes.",
       {{"use", {"weights", "memories", "sequences", "work", "cached", "other"}}}},
      {Metric::kDeviceMemoryLimit, kGauge, "stillhouse_device_memory_limit_bytes",
       "What --device-memory lets the server take of a GPU; no sample without a GPU."},
      {Metric::kDeviceMemoryOverflow, kCounter, "stillhouse_device_memory_overflow_bytes_total",
       "Blocks that running work took of the host's memory because the device had none left: that work was slow."},

      {Metric::kCacheRoute,
       kCounter,
       "stillhouse_cache_route_total",
       "Queries by the memory that answered, and how it was found.",
       {{"method", Methods()}, {"outcome", {"hot", "warm", "cold", "none", "not_found", "failed"}}}},
      {Metric::kAttentionMass,
       kHistogram,
       "stillhouse_attention_mass",
       "Share of an answer's attention on memories and on its own tokens, sampled while it is generated.",
       {{"segment", {"memory", "own"}}},
       {0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1}},

      {Metric::kRequests,
       kCounter,
       "stillhouse_requests_total",
       "Queries by how they ended.",
       {{"finish_reason",
         {"end_of_turn", "stop_string", "max_tokens", "context_full", "scored", "cancelled", "deadline", "rejected",
          "error"}}}},
      {Metric::kTokens,
       kCounter,
       "stillhouse_tokens_total",
       "Tokens: of prompts, slots of memories used, of answers, scored, and of builds.",
       {{"kind", token_kinds}}},
      {Metric::kRequestsRunning, kGauge, "stillhouse_requests_running", "Sequences in the engine's batch."},
      {Metric::kRequestsWaiting,
       kGauge,
       "stillhouse_requests_waiting",
       "Requests that wait, by what for.",
       {{"reason", {"queue", "load"}}}},
      {Metric::kAdmissionRejections,
       kCounter,
       "stillhouse_admission_rejections_total",
       "Requests refused before any work, by why.",
       {{"reason",
         {"queue_full", "invalid", "too_long", "no_memory", "quota", "unauthenticated", "draining", "duplicate",
          "not_found"}}}},
      {Metric::kPreemptions, kCounter, "stillhouse_preemptions_total",
       "Sequences that gave their place up and were computed again."},
      {Metric::kNanLogits, kCounter, "stillhouse_nan_logits_total", "Steps whose logits were not finite."},
      {Metric::kChecksumFailures, kCounter, "stillhouse_checksum_failures_total",
       "Stored or imported bytes that did not match their checksum."},
      {Metric::kTenantRequests, kCounter, "stillhouse_tenant_requests_total", "Queries by tenant.", {{"tenant", {}}}},
      {Metric::kTenantTokens,
       kCounter,
       "stillhouse_tenant_tokens_total",
       "Tokens by tenant.",
       {{"tenant", {}}, {"kind", token_kinds}}},
      {Metric::kUploadBytes, kCounter, "stillhouse_upload_bytes_total", "Bytes of documents received."},
      {Metric::kGrpcStarted, kCounter, "grpc_server_started_total", "Calls begun.", {{"grpc_method", {}}}},
      {Metric::kGrpcHandled,
       kCounter,
       "grpc_server_handled_total",
       "Calls ended, by status code.",
       {{"grpc_method", {}}, {"grpc_code", {}}}},

      {Metric::kBuilds,
       kCounter,
       "stillhouse_builds_total",
       "Builds by how they ended.",
       {{"method", Methods()}, {"outcome", {"succeeded", "failed", "cancelled"}}}},
      {Metric::kBuildsRunning, kGauge, "stillhouse_builds_running", "Builds at work."},
      {Metric::kBuildsWaiting, kGauge, "stillhouse_builds_waiting", "Builds in the queue."},

      {Metric::kBuildInfo,
       kGauge,
       "stillhouse_build_info",
       "Always 1; the labels say what is running.",
       {{"version", {}}, {"backend", {}}}},
  };
}

}  // namespace

absl::Span<const MetricSpec> MetricTable() {
  static const auto* table = new std::vector<MetricSpec>(MakeTable());
  return *table;
}

}  // namespace stillhouse
