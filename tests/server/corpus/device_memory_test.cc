// What the server says of a GPU's memory against what the driver says, and the host tier's copies beside an engine at
// work, on the default model. Needs a GPU: STILLHOUSE_TEST_DEVICE=cuda build/cuda/bin/corpus_test
// --gtest_filter='DeviceMemory*'. Prints what it measured.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <thread>

#include "server/model/forward.h"
#include "tests/server/corpus/directory_fixture.h"
#include "tests/support/default_model.h"

namespace stillhouse {
namespace {

constexpr int kMemories = 6;
constexpr int64_t kSlots = 2048;
constexpr double kTolerance = 0.02;

class Gaps final : public EngineObserver {
 public:
  void OnTokenGap(absl::Duration gap) override {
    std::lock_guard<std::mutex> lock(mutex_);
    gaps_.push_back(absl::ToDoubleMilliseconds(gap));
  }
  std::vector<double> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double> gaps = std::move(gaps_);
    gaps_.clear();
    std::sort(gaps.begin(), gaps.end());
    return gaps;
  }

 private:
  std::mutex mutex_;
  std::vector<double> gaps_;
};

class Answer final : public GenerationSink {
 public:
  bool OnToken(const SampledToken& token) override {
    ids.push_back(token.id);
    return true;
  }
  void OnFinish(FinishReason, const GenerationUsage&, const absl::Status& end) override {
    std::lock_guard<std::mutex> lock(mutex_);
    status = end;
    done_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  std::vector<int32_t> ids;
  absl::Status status;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

class DeviceMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    backend_ = testing::MakeTestBackend();
    if (backend_->device() == DeviceType::kCpu) GTEST_SKIP() << "no GPU: set STILLHOUSE_TEST_DEVICE=cuda";
    ctx_.backend = backend_.get();
    std::string pattern = ::testing::TempDir() + "memoryXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    before_ = backend_->memory();
    absl::StatusOr<GgufModel> loaded = LoadGgufModel(ctx_, testing::DefaultModelPath());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    model_ = *std::move(loaded);
    backend_->Synchronize();
    ctx_.pool().Trim();
    bf16_ = std::string(backend_->name()).find("bf16") != std::string::npos;
    StoreOptions options;
    options.directory = folder_ + "/store";
    store_ = *OpenEmbeddedStore(options);
    ASSERT_TRUE(store_->EnsureTenant("acme").ok());
    UploadSpec upload;
    upload.tenant = "acme";
    upload.corpus_id = "book";
    upload.size = 4;
    upload.sha256 = Sha256Hex("text");
    const absl::StatusOr<UploadState> state = store_->BeginUpload(upload);
    ASSERT_TRUE(state.ok()) << state.status();
    ASSERT_TRUE(store_->WriteChunk("acme", state->upload_id, 0, "text").ok());
    ASSERT_TRUE(store_->Seal("acme", state->upload_id).ok());
    prints_.model = model_.weights->fingerprint;
    prints_.tokenizer = model_.tokenizer->Fingerprint();
    prints_.chat_template = model_.chat->Fingerprint();
    prints_.rope_layout = model_.weights->config.RopeLayoutName();
    prints_.rope_scaling = model_.weights->config.rope.Fingerprint();
    prints_.dtype = "F32";
    for (int i = 0; i < kMemories; ++i) Put(i);
    ctx_.pool().Trim();
  }
  void TearDown() override {
    engine_.reset();
    directory_.reset();
    store_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  static std::string IdOf(int i) { return std::string(1, static_cast<char>('a' + i)); }
  DType kv_dtype() const { return bf16_ ? DType::kBF16 : DType::kF32; }

  void Put(int i) {
    const ModelConfig& c = model_.weights->config;
    std::mt19937 rng(static_cast<unsigned>(i));
    std::normal_distribution<float> normal(0.0f, 0.5f);
    std::vector<float> values(static_cast<size_t>(c.kv_heads * kSlots * c.head_dim));
    for (float& v : values) v = normal(rng);
    Memory memory;
    memory.slots = kSlots;
    memory.next_position = kSlots;
    for (int64_t l = 0; l < c.layers; ++l) {
      std::rotate(values.begin(), values.begin() + 4099, values.end());
      const Tensor rows = ctx_.Floats(values, {c.kv_heads, kSlots, c.head_dim});
      memory.layers.push_back({rows, rows, Tensor()});
    }
    ArtifactHeader header;
    header.fingerprints = prints_;
    header.method = "CARTRIDGE";
    header.corpus_sha256 = std::string(64, 'a');
    auto blob = store_->NewBlob();
    ASSERT_TRUE(StoreMemory(ctx_, c, memory, header, blob->get()).ok());
    ArtifactSpec spec;
    spec.tenant = "acme";
    spec.corpus_id = "book";
    spec.cache_id = IdOf(i);
    spec.method = "CARTRIDGE";
    spec.summary_json = "{}";
    ASSERT_TRUE(store_->PutArtifact(spec, blob->get()).ok());
  }

  int64_t MemoryBytes() {
    ArtifactHeader header;
    const ModelConfig& c = model_.weights->config;
    header.layers = static_cast<uint32_t>(c.layers);
    header.kv_heads = static_cast<uint32_t>(c.kv_heads);
    header.head_dim = static_cast<uint32_t>(c.head_dim);
    header.slots = kSlots;
    return LoadedBytes(ctx_, header, kv_dtype());
  }

  void Open(int64_t budget, int64_t host_budget) {
    DirectoryOptions options;
    options.budget_bytes = budget;
    options.host_budget_bytes = host_budget;
    options.dtype = kv_dtype();
    options.observer = &routes_;
    directory_ = std::make_unique<Directory>(ctx_, model_.weights, prints_, store_.get(), options);
    EngineOptions engine;
    engine.kv_dtype = kv_dtype();
    engine.page_budget_bytes = int64_t{256} << 20;
    engine.observer = &gaps_;
    engine_ = std::make_unique<Engine>(ctx_, model_.weights, engine);
  }

  absl::StatusOr<PinnedMemory> Pin(int i) { return directory_->Pin("acme", "book", IdOf(i)); }

  // Greedy tokens behind a memory (none: i < 0).
  std::vector<int32_t> Generate(int i, int64_t tokens) {
    GenerationRequest request;
    request.prompt = {1, 504, 827, 29, 315};
    if (i >= 0) request.memories.push_back(Pin(i)->memory);
    request.sampling.temperature = 0;
    request.max_tokens = tokens;
    request.ignore_stop_ids = true;
    auto answer = std::make_shared<Answer>();
    EXPECT_TRUE(engine_->Submit(std::move(request), answer).ok());
    answer->Wait();
    EXPECT_TRUE(answer->status.ok()) << answer->status;
    return answer->ids;
  }

  std::vector<float> LogitsBehind(const std::shared_ptr<const Memory>& memory) {
    std::vector<float> logits;
    const absl::Status ran = engine_->Execute(Priority::kInteractive, [&](const Context& ctx) {
      PagePool pages(ctx, model_.weights->config, int64_t{32} << 20, kv_dtype());
      SequenceState state({memory}, &pages);
      const std::vector<int32_t> tokens = {1, 504, 827, 29, 315};
      const absl::Status reserved = state.Reserve(static_cast<int64_t>(tokens.size()));
      if (!reserved.ok()) return reserved;
      Batch batch;
      batch.Add(&state, tokens, Batch::Outputs::kLast);
      logits = ctx.ToFloats(Logits(ctx, *model_.weights, Forward(ctx, *model_.weights, batch).hidden));
      return absl::OkStatus();
    });
    EXPECT_TRUE(ran.ok()) << ran;
    return logits;
  }

  // The books against the driver: what was taken, and what was there beside it after the warm-up.
  void Compare(const char* phase, int64_t other) {
    backend_->Synchronize();
    const TensorDevice::MemoryUse use = backend_->memory();
    const ResidentStats stats = directory_ ? directory_->stats() : ResidentStats();
    const double driver = static_cast<double>(use.used), ours = static_cast<double>(use.taken + other);
    std::printf(
        "%-24s driver %9.1f MiB, ours %9.1f (taken %.1f, cached %.1f, memories %.1f, host %.1f): off %+.2f %%\n", phase,
        driver / 1048576, ours / 1048576, static_cast<double>(use.taken) / 1048576,
        static_cast<double>(use.cached) / 1048576, static_cast<double>(stats.allocated_bytes) / 1048576,
        static_cast<double>(stats.host_bytes) / 1048576, 100 * (ours / driver - 1));
    EXPECT_NEAR(ours, driver, kTolerance * driver) << phase;
    // And what came since before the model, without the context.
    const double grown = driver - static_cast<double>(before_.used + other - other_before_);
    const double counted = static_cast<double>(use.taken - before_.taken);
    EXPECT_NEAR(counted, grown, kTolerance * grown + (4 << 20)) << phase;
  }

  std::unique_ptr<Backend> backend_;
  Context ctx_;
  std::string folder_;
  TensorDevice::MemoryUse before_;
  int64_t other_before_ = 0;
  GgufModel model_;
  bool bf16_ = false;
  std::unique_ptr<Store> store_;
  ArtifactFingerprints prints_;
  CountingObserver routes_;
  Gaps gaps_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<Engine> engine_;
};

double At(const std::vector<double>& sorted, double share) {
  return sorted.empty() ? 0 : sorted[std::min(sorted.size() - 1, static_cast<size_t>(share * sorted.size()))];
}

TEST_F(DeviceMemoryTest, TheBooksAreTheDriversAndReloadsAreExact) {
  other_before_ = before_.used - before_.taken;
  const int64_t bytes = MemoryBytes();
  {
    const TensorDevice::MemoryUse use = backend_->memory();
    const int64_t weights = model_.weights->bytes();
    std::printf("model: driver %+.1f MiB, taken %.1f MiB, weights %.1f MiB; a memory %.1f MiB\n",
                static_cast<double>(use.used - before_.used) / 1048576, static_cast<double>(use.taken) / 1048576,
                static_cast<double>(weights) / 1048576, static_cast<double>(bytes) / 1048576);
    EXPECT_NEAR(static_cast<double>(use.taken), static_cast<double>(weights),
                kTolerance * static_cast<double>(weights));
  }
  Open(3 * bytes, 4 * bytes + (int64_t{64} << 20));
  // Loads kernels and libraries, makes recordings.
  Generate(-1, 40);
  Generate(0, 40);
  LogitsBehind(Pin(0)->memory);
  const TensorDevice::MemoryUse warm = backend_->memory();
  const int64_t other = warm.used - warm.taken;
  std::printf("beside the pools: %.1f MiB before the model, %.1f MiB warm\n",
              static_cast<double>(other_before_) / 1048576, static_cast<double>(other) / 1048576);
  Compare("warm", other);

  std::vector<std::vector<float>> logits;
  std::vector<double> cold_ms, warm_ms;
  for (int i = 0; i < kMemories; ++i) {
    const absl::StatusOr<PinnedMemory> pin = Pin(i);
    ASSERT_TRUE(pin.ok()) << pin.status();
    if (!pin->was_resident) cold_ms.push_back(absl::ToDoubleMilliseconds(pin->load_time));
    logits.push_back(LogitsBehind(pin->memory));
    EXPECT_LE(directory_->stats().allocated_bytes, 3 * bytes);
  }
  EXPECT_EQ(directory_->stats().allocated_bytes, 3 * bytes);
  Compare("three of six resident", other);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < kMemories; ++i) {
      const absl::StatusOr<PinnedMemory> pin = Pin(i);
      ASSERT_TRUE(pin.ok()) << pin.status();
      if (!pin->was_resident) warm_ms.push_back(absl::ToDoubleMilliseconds(pin->load_time));
      ASSERT_EQ(LogitsBehind(pin->memory), logits[static_cast<size_t>(i)]) << "round " << round << ", memory " << i;
    }
  }
  EXPECT_GT(routes_.routes["warm"], 0);
  std::sort(cold_ms.begin(), cold_ms.end());
  std::sort(warm_ms.begin(), warm_ms.end());
  std::printf("loads: cold %zu, median %.1f ms; later %zu (%d warm), median %.1f ms, fastest %.1f, slowest %.1f\n",
              cold_ms.size(), At(cold_ms, 0.5), warm_ms.size(), routes_.routes["warm"], At(warm_ms, 0.5),
              At(warm_ms, 0), At(warm_ms, 1));
  Compare("evicted and reloaded", other);

  // What the engine notices: an answer while memories come and go on another thread. Its own stays.
  gaps_.Take();
  const std::vector<int32_t> alone = Generate(0, 400);
  const std::vector<double> quiet = gaps_.Take();
  std::atomic<bool> stop{false};
  std::atomic<int> reloads{0};
  std::thread traffic([&] {
    for (int i = 0; !stop; ++i) {
      const absl::StatusOr<PinnedMemory> pin = Pin(1 + i % (kMemories - 1));
      if (pin.ok() && !pin->was_resident) ++reloads;
    }
  });
  const std::vector<int32_t> beside = Generate(0, 400);
  stop = true;
  traffic.join();
  const std::vector<double> busy = gaps_.Take();
  EXPECT_EQ(beside, alone);
  std::printf(
      "token gaps, ms: alone median %.3f, p99 %.3f, most %.3f; beside %d reloads median %.3f, p99 %.3f, most %.3f\n",
      At(quiet, 0.5), At(quiet, 0.99), At(quiet, 1), reloads.load(), At(busy, 0.5), At(busy, 0.99), At(busy, 1));
  Compare("after traffic", other);

  directory_->Forget("acme", "book", "");
  ctx_.pool().Trim();
  EXPECT_EQ(directory_->stats().allocated_bytes, 0);
  EXPECT_EQ(directory_->stats().host_memories, 0);
  Compare("forgotten", other);
}

// Blocks take what the pool says that they take, whatever their size.
TEST(DeviceMemoryGrains, AreTheDrivers) {
  const std::unique_ptr<Backend> backend = testing::MakeTestBackend();
  if (backend->device() == DeviceType::kCpu) GTEST_SKIP() << "no GPU: set STILLHOUSE_TEST_DEVICE=cuda";
  for (const auto& [kib, count] :
       {std::pair<size_t, int>{100, 3000}, {700, 400}, {1100, 200}, {3000, 100}, {5000, 60}, {9000, 40}, {47000, 8}}) {
    backend->pool().Trim();
    const TensorDevice::MemoryUse before = backend->memory();
    std::vector<std::shared_ptr<Buffer>> blocks;
    for (int i = 0; i < count; ++i) blocks.push_back(backend->pool().Allocate(kib << 10));
    const TensorDevice::MemoryUse use = backend->memory();
    const double driver = static_cast<double>(use.used - before.used),
                 ours = static_cast<double>(use.taken - before.taken);
    std::printf("%d blocks of %zu KiB: driver %.1f MiB, ours %.1f\n", count, kib, driver / 1048576, ours / 1048576);
    EXPECT_NEAR(ours, driver, kTolerance * driver) << kib;
  }
}

TEST_F(DeviceMemoryTest, ALimitRefusesAndNothingDies) {
  const int64_t bytes = MemoryBytes();
  Open(kMemories * bytes, 0);
  Generate(-1, 20);
  ctx_.pool().Trim();
  const TensorDevice::MemoryUse use = backend_->memory();
  // The budget says six, the device has room for two and a half.
  backend_->LimitMemory(use.taken + 2 * bytes + bytes / 2);
  ctx_.pool().SetReclaimer([this](size_t n) { return directory_->GiveUp(static_cast<int64_t>(n)); });
  {
    const absl::StatusOr<PinnedMemory> a = Pin(0), b = Pin(1);
    ASSERT_TRUE(a.ok() && b.ok());
    const absl::Status status = Pin(2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ctx_.pool().TryAllocate(static_cast<size_t>(bytes)), nullptr);
  }
  EXPECT_TRUE(Pin(2).ok());
  EXPECT_EQ(Generate(2, 20).size(), 20u);
  EXPECT_LE(backend_->memory().taken, backend_->memory().limit);
  ctx_.pool().SetReclaimer(nullptr);
}

TEST_F(DeviceMemoryTest, WorkThatFindsNoMemoryEndsInTheHosts) {
  Open(2 * MemoryBytes(), 0);
  const std::shared_ptr<const Memory> memory = Pin(0)->memory;
  const std::vector<float> logits = LogitsBehind(memory);
  const size_t before = ctx_.pool().overflowed_bytes();
  EXPECT_EQ(before, 0u);
  const auto fill_device = [this](int64_t pages) {
    backend_->Synchronize();
    ctx_.pool().Trim();
    backend_->LimitMemory(backend_->memory().taken + pages * engine_->pages().page_bytes());
  };
  fill_device(1);
  EXPECT_EQ(LogitsBehind(memory), logits);
  EXPECT_GT(ctx_.pool().overflowed_bytes(), before);
  EXPECT_GE(backend_->memory().overflowed, static_cast<int64_t>(ctx_.pool().overflowed_bytes()));
  fill_device(0);
  const absl::Status build = engine_->Execute(Priority::kBackground, [](const Context& ctx) {
    ctx.backend->Zero(ctx.EmptyF32({int64_t{1} << 20}));
    return absl::OkStatus();
  });
  EXPECT_EQ(build.code(), absl::StatusCode::kResourceExhausted) << build;
  // Steps that cannot be recorded for want of memory have their tokens all the same.
  fill_device(3);
  std::vector<std::shared_ptr<Answer>> answers;
  for (int i = 0; i < 3; ++i) {
    GenerationRequest request;
    request.prompt = {1, 504, 827, 29, 315};
    request.memories.push_back(memory);
    request.sampling.temperature = 0;
    request.max_tokens = 20;
    request.ignore_stop_ids = true;
    answers.push_back(std::make_shared<Answer>());
    ASSERT_TRUE(engine_->Submit(std::move(request), answers.back()).ok());
  }
  for (const auto& answer : answers) {
    answer->Wait();
    EXPECT_TRUE(answer->status.ok()) << answer->status;
    EXPECT_EQ(answer->ids.size(), 20u);
  }
  EXPECT_LE(backend_->memory().taken, backend_->memory().limit);
  backend_->LimitMemory(int64_t{1} << 60);
  EXPECT_EQ(LogitsBehind(memory), logits);
  EXPECT_EQ(Generate(0, 20).size(), 20u);
  EXPECT_GT(engine_->stats().recorded_steps, 0);
}

}  // namespace
}  // namespace stillhouse
