// The directory with a tier of host memory below the device. On the rig's own backend the copies are real (those of a
// GPU with STILLHOUSE_TEST_DEVICE=cuda); on TierBackend they end when a test says so.
#include "server/corpus/host_tier.h"

#include <gmock/gmock.h>

#include <random>
#include <thread>

#include "server/model/forward.h"
#include "tests/server/corpus/directory_fixture.h"
#include "tests/server/corpus/tier_backend.h"

namespace stillhouse {
namespace {

using ::testing::HasSubstr;
using testing::TierBackend;

constexpr int64_t kSlots = 16;
constexpr int64_t kPlenty = int64_t{1} << 26;

class HostTierTest : public DirectoryTest {
 protected:
  // Values by the cache's name: 'a' is 1, 'b' is 2, …
  static float ValueOf(const std::string& id) { return static_cast<float>(id[0] - 'a' + 1); }

  void PutAll(std::initializer_list<const char*> ids) {
    for (const char* id : ids) Put(id, *MakeMemory(kSlots, ValueOf(id)), rig_->prints);
  }

  // All of a memory's values, downloaded.
  std::vector<std::vector<float>> ValuesOf(const Memory& memory) {
    std::vector<std::vector<float>> all;
    for (const LayerKv& layer : memory.layers) {
      for (const Tensor& t : {layer.k, layer.v, layer.beta}) all.push_back(rig_->ctx.ToFloats(t));
    }
    return all;
  }

  static absl::StatusOr<PinnedMemory> Pin(Directory& directory, const std::string& id) {
    return directory.Pin("acme", "book", id);
  }
};

TEST_F(HostTierTest, WhatWentComesBackBitByBit) {
  // Not a constant anywhere, BOS column and all.
  const std::shared_ptr<Memory> memory = MakeMemory(kSlots, 0.0f);
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  for (LayerKv& layer : memory->layers) {
    for (Tensor* t : {&layer.k, &layer.v, &layer.beta}) {
      std::vector<float> values(static_cast<size_t>(t->elements()));
      for (float& v : values) v = normal(rng);
      *t = rig_->ctx.Floats(values, t->shape());
    }
  }
  Put("a", *memory, rig_->prints, {}, /*has_bos=*/true);
  PutAll({"b"});
  CountingObserver observer;
  const int64_t bytes = BytesLoaded(kSlots, *rig_->backend);
  auto directory = MakeDirectory(bytes + bytes / 2, &observer, kPlenty);
  const auto logits = [&](std::shared_ptr<const Memory> of) {
    SequenceState state({std::move(of)});
    Batch batch;
    const std::vector<int32_t> tokens = {5, 9, 11};
    batch.Add(&state, tokens, Batch::Outputs::kLast);
    const Weights& weights = *rig_->model.weights;
    return rig_->ctx.ToFloats(Logits(rig_->ctx, weights, Forward(rig_->ctx, weights, batch).hidden));
  };
  std::vector<std::vector<float>> values, behind;
  std::vector<float> answer;
  {
    const absl::StatusOr<PinnedMemory> cold = Pin(*directory, "a");
    ASSERT_TRUE(cold.ok()) << cold.status();
    values = ValuesOf(*cold->memory);
    behind = ValuesOf(*cold->behind_another);
    answer = logits(cold->memory);
  }
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(Pin(*directory, "b").ok());
    EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
    const absl::StatusOr<PinnedMemory> warm = Pin(*directory, "a");
    ASSERT_TRUE(warm.ok()) << warm.status();
    EXPECT_FALSE(warm->was_resident);
    EXPECT_GT(warm->load_time, absl::ZeroDuration());
    EXPECT_EQ(warm->memory->next_position, memory->next_position);
    EXPECT_EQ(warm->method, "CARTRIDGE");
    EXPECT_EQ(ValuesOf(*warm->memory), values);
    EXPECT_EQ(ValuesOf(*warm->behind_another), behind);
    EXPECT_EQ(warm->behind_another->slots, kSlots - 1);
    EXPECT_TRUE(IsPacked(*warm->memory, DType::kF32));
    EXPECT_EQ(logits(warm->memory), answer);
  }
  EXPECT_EQ(observer.routes["cold"], 2);
  EXPECT_EQ(observer.routes["warm"], 5);
  EXPECT_EQ(observer.tiers["disk"], 2);
  EXPECT_EQ(observer.tiers["host"], 5);
  const ResidentStats stats = directory->stats();
  EXPECT_EQ(stats.memories, 1);
  EXPECT_EQ(stats.host_memories, 2);
  EXPECT_GE(stats.host_bytes, 2 * memory->canonical_bytes());
  EXPECT_LE(stats.host_bytes, kPlenty);
}

TEST_F(HostTierTest, ACopyThatIsThereIsNotMadeAgain) {
  PutAll({"a", "b"});
  TierBackend device;
  const int64_t bytes = BytesLoaded(kSlots, device);
  auto directory = MakeDirectory(bytes, nullptr, kPlenty, &device);
  for (int round = 0; round < 4; ++round) {
    for (const char* id : {"a", "b"}) {
      const absl::StatusOr<PinnedMemory> pin = Pin(*directory, id);
      ASSERT_TRUE(pin.ok()) << pin.status();
      EXPECT_EQ(pin->memory->layers[0].k.f32()[0], ValueOf(id));
    }
  }
  EXPECT_EQ(device.copies_down, 4);  // keys and values, and biases, of two
  EXPECT_EQ(device.copies_up, 2 * 6);
}

TEST_F(HostTierTest, TheBudgetIsKeptAndTheLeastUsedGo) {
  PutAll({"a", "b", "c", "d"});
  TierBackend device;
  CountingObserver observer;
  const int64_t bytes = BytesLoaded(kSlots, device);
  auto directory = MakeDirectory(bytes, &observer, 2 * bytes, &device);
  for (const char* id : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(Pin(*directory, id).ok());
    EXPECT_LE(directory->stats().host_bytes, 2 * bytes);
  }
  // a, b and c went, in this order; a's copy made room for c's.
  EXPECT_EQ(directory->stats().host_memories, 2);
  ASSERT_TRUE(Pin(*directory, "b").ok());
  EXPECT_EQ(observer.routes["warm"], 1);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  EXPECT_EQ(observer.routes["cold"], 5);
  EXPECT_LE(directory->stats().host_bytes, 2 * bytes);
}

TEST_F(HostTierTest, OneThatNeverFitsDrivesNothingOut) {
  PutAll({"a", "b"});
  Put("large", *MakeMemory(8 * kSlots, 1.0f), rig_->prints);
  TierBackend device;
  CountingObserver observer;
  const int64_t bytes = BytesLoaded(kSlots, device), large = BytesLoaded(8 * kSlots, device);
  auto directory = MakeDirectory(large, &observer, 2 * bytes, &device);
  for (const char* id : {"a", "large", "b"}) ASSERT_TRUE(Pin(*directory, id).ok());
  EXPECT_FALSE(directory->IsResident("acme", "book", "large"));
  EXPECT_EQ(directory->stats().host_memories, 1);  // a's
  ASSERT_TRUE(Pin(*directory, "large").ok());
  EXPECT_EQ(observer.routes["cold"], 4);
}

TEST_F(HostTierTest, WithoutHostMemoryItIsReadFromTheStoreAgain) {
  PutAll({"a", "b"});
  TierBackend device;
  device.HostHasMemory(false);
  CountingObserver observer;
  auto directory = MakeDirectory(BytesLoaded(kSlots, device), &observer, kPlenty, &device);
  for (const char* id : {"a", "b", "a", "b"}) {
    const absl::StatusOr<PinnedMemory> pin = Pin(*directory, id);
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(pin->memory->layers[0].k.f32()[0], ValueOf(id));
  }
  EXPECT_EQ(observer.routes["cold"], 4);
  EXPECT_EQ(directory->stats().host_memories, 0);
  EXPECT_EQ(directory->stats().host_bytes, 0);
  device.HostHasMemory(true);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  ASSERT_TRUE(Pin(*directory, "b").ok());
  EXPECT_EQ(observer.routes["warm"], 1);
}

TEST_F(HostTierTest, ItsRoomIsTakenUntilItWasCopied) {
  PutAll({"a", "b"});
  TierBackend device;
  const int64_t bytes = BytesLoaded(kSlots, device);
  auto directory = MakeDirectory(bytes, nullptr, kPlenty, &device);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  device.gate_down.Open(false);
  std::atomic<bool> answered{false};
  std::thread other([&] {
    const absl::StatusOr<PinnedMemory> pin = Pin(*directory, "b");
    answered = true;
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(pin->memory->layers[1].v.f32()[0], ValueOf("b") + 1);
  });
  device.gate_down.AwaitOneWaiting();
  EXPECT_EQ(directory->stats().allocated_bytes, bytes);
  EXPECT_EQ(directory->stats().memories, 0);
  EXPECT_EQ(device.taken(), bytes);
  EXPECT_FALSE(answered);
  device.gate_down.Open(true);
  other.join();
  EXPECT_EQ(device.taken(), bytes);
}

TEST_F(HostTierTest, OneThatIsWantedWhileItIsCopiedStays) {
  PutAll({"a", "b"});
  TierBackend device;
  CountingObserver observer;
  auto directory = MakeDirectory(BytesLoaded(kSlots, device), &observer, kPlenty, &device);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  device.gate_down.Open(false);
  absl::Status refused;
  std::thread other([&] { refused = Pin(*directory, "b").status(); });
  device.gate_down.AwaitOneWaiting();
  {
    const absl::StatusOr<PinnedMemory> held = Pin(*directory, "a");
    ASSERT_TRUE(held.ok()) << held.status();
    EXPECT_TRUE(held->was_resident);
    device.gate_down.Open(true);
    other.join();
    // In use, it leaves no room.
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(held->memory->layers[0].k.f32()[0], ValueOf("a"));
  }
  EXPECT_TRUE(Pin(*directory, "b").ok());
  EXPECT_EQ(device.copies_down, 2);  // a's copy of then is good
}

TEST_F(HostTierTest, NobodySeesAMemoryBeforeItsBytesAreThere) {
  PutAll({"a", "b"});
  TierBackend device;
  auto directory = MakeDirectory(BytesLoaded(kSlots, device), nullptr, kPlenty, &device);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  ASSERT_TRUE(Pin(*directory, "b").ok());
  device.gate_up.Open(false);
  std::atomic<int> answered{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const absl::StatusOr<PinnedMemory> pin = Pin(*directory, "a");
      ++answered;
      ASSERT_TRUE(pin.ok()) << pin.status();
      for (const LayerKv& layer : pin->memory->layers) EXPECT_EQ(layer.beta.f32()[kSlots - 1], -ValueOf("a"));
    });
  }
  device.gate_up.AwaitOneWaiting();
  EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  EXPECT_EQ(answered, 0);
  device.gate_up.Open(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device.copies_up, 2);  // one load for all
}

TEST_F(HostTierTest, DeletedAndReplacedCachesLeaveBothTiers) {
  PutAll({"a", "b"});
  const ArtifactRow row = Put("a", *MakeMemory(kSlots, 1.0f), rig_->prints);
  TierBackend device;
  const int64_t bytes = BytesLoaded(kSlots, device);
  auto directory = MakeDirectory(bytes, nullptr, kPlenty, &device);
  const ArtifactHeader header = Pin(*directory, "a")->header;
  ASSERT_TRUE(Pin(*directory, "b").ok());
  EXPECT_EQ(directory->stats().host_memories, 1);
  // Replaced: not the old copy.
  directory->Publish("acme", "book", "a", row, header,
                     PackMemory({&device}, *MakeMemory({&device}, kSlots, 7.0f), DType::kF32));
  EXPECT_EQ(Pin(*directory, "a")->memory->layers[0].k.f32()[0], 7.0f);
  ASSERT_TRUE(Pin(*directory, "b").ok());
  EXPECT_EQ(Pin(*directory, "a")->memory->layers[0].k.f32()[0], 7.0f);
  ASSERT_TRUE(Pin(*directory, "b").ok());
  // Deleted while its copy lies there, and while one is being made.
  ASSERT_TRUE(rig_->store->DeleteArtifact("acme", "book", "a").ok());
  directory->Forget("acme", "book", "a");
  EXPECT_EQ(Pin(*directory, "a").status().code(), absl::StatusCode::kNotFound);
  PutAll({"a", "c"});
  directory->Forget("acme", "book", "");
  EXPECT_EQ(directory->stats().host_memories, 0);
  ASSERT_TRUE(Pin(*directory, "a").ok());
  device.gate_down.Open(false);
  std::thread other([&] { EXPECT_TRUE(Pin(*directory, "c").ok()); });
  device.gate_down.AwaitOneWaiting();
  directory->Forget("acme", "book", "a");
  EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  EXPECT_EQ(directory->stats().allocated_bytes, bytes);  // until the copy lets go of it
  device.gate_down.Open(true);
  other.join();
  EXPECT_EQ(directory->stats().host_memories, 0);
}

TEST_F(HostTierTest, WorkThatFindsNoMemoryGetsThatOfUnusedMemories) {
  PutAll({"a", "b"});
  const int64_t bytes = BytesLoaded(kSlots, *rig_->backend);
  const size_t half = static_cast<size_t>(bytes) / 2;
  const int64_t block = static_cast<int64_t>(rig_->ctx.pool().BlockBytes(half));
  TierBackend device(2 * bytes + block);
  auto directory = MakeDirectory(2 * bytes, nullptr, kPlenty, &device);
  device.pool().SetReclaimer([&](size_t n) { return directory->GiveUp(static_cast<int64_t>(n)); });
  ASSERT_TRUE(Pin(*directory, "a").ok());
  {
    const absl::StatusOr<PinnedMemory> held = Pin(*directory, "b");
    const auto scratch = device.pool().Allocate(half);
    const auto more = device.pool().TryAllocate(half);
    EXPECT_NE(more, nullptr);
    EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
    EXPECT_EQ(device.pool().TryAllocate(half), nullptr);
    EXPECT_TRUE(directory->IsResident("acme", "book", "b"));
    EXPECT_EQ(held->memory->layers[0].k.f32()[0], ValueOf("b"));
    // The budget has room for it, the device has not: refused, and nothing dies.
    const absl::Status status = Pin(*directory, "a").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("try again"));
  }
  EXPECT_TRUE(Pin(*directory, "a").ok());
  device.pool().SetReclaimer(nullptr);
}

// Many callers, few places: everybody gets the memory that was asked for, the device never holds more than the budget
// (it has no more), and nothing is refused but for memories in use.
TEST_F(HostTierTest, RacingCallersStayWithinTheBudgets) {
  const std::vector<std::string> ids = {"a", "b", "c", "d", "e", "f", "g", "h"};
  PutAll({"a", "b", "c", "d", "e", "f", "g", "h"});
  const int64_t bytes = BytesLoaded(kSlots, *rig_->backend);
  for (const int64_t host : {int64_t{0}, 3 * bytes, kPlenty}) {
    TierBackend device(4 * bytes);
    CountingObserver observer;
    auto directory = MakeDirectory(4 * bytes, &observer, host, &device);
    std::atomic<int> answered{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 rng(t);
        for (int i = 0; i < 60; ++i) {
          const std::string& id = ids[rng() % ids.size()];
          const absl::StatusOr<PinnedMemory> pin = Pin(*directory, id);
          if (!pin.ok()) {
            EXPECT_THAT(std::string(pin.status().message()), HasSubstr("memories in use leave no room"));
            continue;
          }
          ++answered;
          for (const LayerKv& layer : pin->memory->layers) {
            ASSERT_EQ(layer.k.f32()[i], ValueOf(id));
            ASSERT_EQ(layer.beta.f32()[0], -ValueOf(id));
          }
          EXPECT_LE(directory->stats().host_bytes, host);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(answered, 60);
    EXPECT_EQ(observer.routes["warm"] > 0, host > 0);
    EXPECT_LE(device.taken(), 4 * bytes);
  }
}

// The same with caches that are deleted and made again meanwhile: never one's values under another's name, and nothing
// stays behind.
TEST_F(HostTierTest, RacingDeletionsLeaveNothing) {
  const std::vector<std::string> ids = {"a", "b", "c", "d"};
  PutAll({"a", "b", "c", "d"});
  TierBackend device;
  const int64_t bytes = BytesLoaded(kSlots, device);
  auto directory = MakeDirectory(2 * bytes, nullptr, 2 * bytes, &device);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 5; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (int i = 0; i < 60; ++i) {
        const std::string& id = ids[rng() % ids.size()];
        if (t == 0) {
          directory->Forget("acme", "book", id);
          continue;
        }
        const absl::StatusOr<PinnedMemory> pin = Pin(*directory, id);
        if (!pin.ok()) continue;
        ASSERT_EQ(pin->memory->layers[1].v.f32()[0], ValueOf(id) + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  directory->Forget("acme", "book", "");
  EXPECT_EQ(directory->stats().memories, 0);
  EXPECT_EQ(directory->stats().host_memories, 0);
  directory.reset();
  EXPECT_EQ(device.pool().lent_bytes(), 0u);
}

}  // namespace
}  // namespace stillhouse
