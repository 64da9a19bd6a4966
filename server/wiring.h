// The only place that builds the server's object graph.
#ifndef STILLHOUSE_SERVER_WIRING_H_
#define STILLHOUSE_SERVER_WIRING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace stillhouse {

enum class Device : uint8_t { kAuto, kCpu, kCuda };
enum class GpuWeights : uint8_t { kF32, kBf16 };
enum class KvType : uint8_t { kAuto, kF32, kBf16 };

// A share of what a GPU has free when the server starts, or bytes.
struct DeviceMemory {
  double percent = 90;
  uint64_t bytes = 0;  // 0: the share
};
// "90%", "60GiB", "1500000000". INVALID_ARGUMENT says what there may be.
absl::StatusOr<DeviceMemory> ParseDeviceMemory(const std::string& text);

// What the flags say. Paths are the operator's own.
struct ServerConfig {
  std::string model;           // GGUF file
  std::string random_weights;  // a shape whose parameters are generated: the file gives the tokenizer only
  std::string store;           // folder; made if missing
  std::string address = "127.0.0.1:7070";
  std::string metrics_address = "127.0.0.1:9464";  // empty: none
  std::vector<std::string> metrics_tenants;        // that may appear as a label

  Device device = Device::kAuto;
  GpuWeights gpu_weights = GpuWeights::kF32;
  std::string plans;          // file of stillhouse-tune; empty: what comes with the program
  KvType kv = KvType::kAuto;  // auto: as the weights on a GPU, f32 on the processor
  int threads = 0;            // 0: one per core
  int64_t context = 0;        // positions; 0: the model's
  int64_t max_sequences = 16;
  int64_t max_queue = 256;
  int64_t prefill_chunk = 0;                // 0: the engine's
  DeviceMemory device_memory;               // all that the server takes of a GPU
  std::optional<uint64_t> kv_memory;        // of running sequences; none: 1 GiB, or a share of the GPU's
  std::optional<uint64_t> resident_memory;  // of resident caches; none: 2 GiB, or what is left of the GPU's
  std::optional<uint64_t> host_memory;      // copies of caches that left the GPU; none: 4 GiB beside a GPU

  uint64_t max_corpus = uint64_t{1} << 30;
  uint64_t max_artifact = uint64_t{16} << 30;
  int max_streams = 256;            // these five per tenant
  int64_t requests_per_minute = 0;  // 0: any number
  int64_t tokens_per_minute = 0;
  uint64_t max_stored_corpora = 0;  // bytes; 0: what the disk holds
  uint64_t max_stored_caches = 0;

  std::string admin_key_file;
  std::string tls_cert, tls_key, tls_client_ca;
  bool insecure_listen = false;
  bool reflection = false;
};

// A server that serves, from Start to destruction.
class RunningServer {
 public:
  // Loads the model, opens the store, takes up unfinished builds, listens. The status says what to do; it may name
  // paths, for it is the operator who reads it.
  static absl::StatusOr<std::unique_ptr<RunningServer>> Start(const ServerConfig& config);
  ~RunningServer();

  // "stillhouse listening on 127.0.0.1:7070, metrics on http://127.0.0.1:9464/metrics, …": one line.
  std::string ReadyLine() const;

  // Refuses new calls and lets those in flight end until `deadline`.
  void Drain(absl::Time deadline);

 private:
  struct Parts;
  explicit RunningServer(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_WIRING_H_
