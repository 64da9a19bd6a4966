// Stored memories of known values, and directories over them.
#ifndef STILLHOUSE_TESTS_SERVER_CORPUS_DIRECTORY_FIXTURE_H_
#define STILLHOUSE_TESTS_SERVER_CORPUS_DIRECTORY_FIXTURE_H_

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/server/corpus/corpus_fixture.h"

namespace stillhouse {

class CountingObserver : public DirectoryObserver {
 public:
  void OnRoute(std::string_view, std::string_view outcome) override {
    std::lock_guard<std::mutex> lock(mutex);
    ++routes[std::string(outcome)];
  }
  void OnLoad(std::string_view tier, absl::Duration) override {
    std::lock_guard<std::mutex> lock(mutex);
    ++loads;
    ++tiers[std::string(tier)];
  }
  void OnResident(const ArtifactHeader& header) override {
    std::lock_guard<std::mutex> lock(mutex);
    resident_slots.push_back(static_cast<int64_t>(header.slots));
  }
  void OnChecksumFailure() override { ++failures; }
  std::mutex mutex;
  std::map<std::string, int> routes, tiers;
  std::vector<int64_t> resident_slots;  // of memories, as they became resident
  std::atomic<int> loads{0}, failures{0};
};

class DirectoryTest : public CorpusTest {
 protected:
  DirectoryTest() { rig_->Upload("book", "some text"); }

  std::shared_ptr<Memory> MakeMemory(int64_t slots, float value) { return MakeMemory(rig_->ctx, slots, value); }
  std::shared_ptr<Memory> MakeMemory(const Context& ctx, int64_t slots, float value) {
    const ModelConfig& c = rig_->model.weights->config;
    auto memory = std::make_shared<Memory>();
    memory->slots = slots;
    memory->next_position = slots + 3;
    for (int64_t l = 0; l < c.layers; ++l) {
      const auto filled = [&](float x, const Shape& shape) {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return ctx.Floats(std::vector<float>(static_cast<size_t>(n), x), shape);
      };
      memory->layers.push_back({filled(value, {c.kv_heads, slots, c.head_dim}),
                                filled(value + 1, {c.kv_heads, slots, c.head_dim}),
                                filled(-value, {c.kv_heads, slots})});
    }
    return memory;
  }

  ArtifactRow Put(const std::string& cache_id, const Memory& memory, ArtifactFingerprints prints,
                  const std::vector<std::vector<int32_t>>& positions = {}, bool has_bos = false) {
    ArtifactHeader header;
    header.has_bos = has_bos;
    header.fingerprints = prints;
    header.method = "CARTRIDGE";
    header.corpus_sha256 = std::string(64, 'a');
    auto blob = rig_->store->NewBlob();
    const absl::Status stored =
        StoreMemory(rig_->ctx, rig_->model.weights->config, memory, header, blob->get(), positions);
    STILLHOUSE_CHECK(stored.ok()) << stored.ToString();
    ArtifactSpec spec;
    spec.tenant = "acme";
    spec.corpus_id = "book";
    spec.cache_id = cache_id;
    spec.method = "CARTRIDGE";
    spec.summary_json = "{}";
    spec.replace = true;
    const absl::StatusOr<ArtifactRow> row = rig_->store->PutArtifact(spec, blob->get());
    STILLHOUSE_CHECK(row.ok()) << row.status().ToString();
    return *row;
  }

  std::unique_ptr<Directory> MakeDirectory(int64_t budget, CountingObserver* observer = nullptr,
                                           int64_t host_budget = 0, Backend* backend = nullptr) {
    DirectoryOptions options;
    options.budget_bytes = budget;
    options.host_budget_bytes = host_budget;
    options.observer = observer;
    const Context ctx{backend != nullptr ? backend : rig_->backend.get()};
    return std::make_unique<Directory>(ctx, rig_->model.weights, rig_->prints, rig_->store.get(), options);
  }

  // What a stored memory of so many slots takes of `backend` once it is loaded.
  int64_t BytesLoaded(int64_t slots, Backend& backend) {
    const ModelConfig& c = rig_->model.weights->config;
    ArtifactHeader header;
    header.layers = static_cast<uint32_t>(c.layers);
    header.kv_heads = static_cast<uint32_t>(c.kv_heads);
    header.head_dim = static_cast<uint32_t>(c.head_dim);
    header.slots = static_cast<uint32_t>(slots);
    header.has_beta = true;
    return LoadedBytes({&backend}, header, DType::kF32);
  }
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_SERVER_CORPUS_DIRECTORY_FIXTURE_H_
