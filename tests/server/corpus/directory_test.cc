#include "server/corpus/directory.h"

#include <gmock/gmock.h>

#include <fstream>
#include <thread>

#include "kernels/tensor/bounded_memory.h"
#include "server/model/forward.h"
#include "tests/server/corpus/directory_fixture.h"

namespace stillhouse {
namespace {

TEST_F(DirectoryTest, LoadsWhatWasStored) {
  Put("a", *MakeMemory(5, 0.5f), rig_->prints, {{0, 1, 2, 3, 9, 0, 1, 2, 3, 9}, {0, 1, 2, 3, 9, 0, 4, 5, 6, 7}});
  CountingObserver observer;
  auto directory = MakeDirectory(1 << 24, &observer);
  EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  const absl::StatusOr<PinnedMemory> pin = directory->Pin("acme", "book", "a");
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_FALSE(pin->was_resident);
  EXPECT_EQ(pin->memory->slots, 5);
  EXPECT_EQ(pin->memory->next_position, 8);
  EXPECT_TRUE(pin->header.has_positions);
  EXPECT_EQ(rig_->ctx.ToFloats(pin->memory->layers[1].k)[3], 0.5f);
  EXPECT_EQ(rig_->ctx.ToFloats(pin->memory->layers[1].v)[3], 1.5f);
  EXPECT_EQ(rig_->ctx.ToFloats(pin->memory->layers[0].beta)[3], -0.5f);
  const absl::StatusOr<PinnedMemory> again = directory->Pin("acme", "book", "a");
  EXPECT_TRUE(again->was_resident);
  EXPECT_EQ(again->memory, pin->memory);
  EXPECT_EQ(observer.routes["cold"], 1);
  EXPECT_EQ(observer.routes["hot"], 1);
  EXPECT_EQ(directory->stats().memories, 1);
  EXPECT_EQ(directory->stats().canonical_bytes, pin->memory->canonical_bytes());
}

TEST_F(DirectoryTest, BehindAnotherMemoryOneHasNoBosColumn) {
  const Context& ctx = rig_->ctx;
  const Weights& weights = *rig_->model.weights;
  const std::shared_ptr<Memory> memory = MakeMemory(5, 0.5f);
  for (LayerKv& kv : memory->layers) {
    std::vector<float> values = ctx.ToFloats(kv.v);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7) * 0.25f - 0.5f;
    kv.v = ctx.Floats(values, kv.v.shape());
  }
  Put("plain", *memory, rig_->prints);
  Put("bos", *memory, rig_->prints, {}, /*has_bos=*/true);
  Put("only", *MakeMemory(1, 0.5f), rig_->prints, {}, /*has_bos=*/true);
  const int64_t bytes = PackMemory(ctx, *memory, DType::kF32)->allocated_bytes();  // as it is loaded
  auto directory = MakeDirectory(3 * bytes);
  for (const char* whole : {"plain", "only"}) {
    const absl::StatusOr<PinnedMemory> pin = directory->Pin("acme", "book", whole);
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(pin->behind_another, pin->memory);
  }
  std::shared_ptr<const Memory> behind;
  {
    const absl::StatusOr<PinnedMemory> pin = directory->Pin("acme", "book", "bos");
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(pin->memory->slots, 5);
    behind = pin->behind_another;
    EXPECT_EQ(behind->layers[0].k.buffer(), pin->memory->layers[0].k.buffer());
    EXPECT_EQ(directory->Pin("acme", "book", "bos")->behind_another, behind);  // so that queries share its rows
  }
  EXPECT_EQ(behind->slots, 4);
  EXPECT_EQ(behind->next_position, 8);
  // Held by this alone, it takes its room.
  directory->Forget("acme", "book", "");
  EXPECT_EQ(directory->stats().allocated_bytes, bytes);
  // It answers as a copy without the column does, and not as the whole.
  const auto logits = [&](std::shared_ptr<const Memory> second) {
    SequenceState state({memory, std::move(second)});
    Batch batch;
    const std::vector<int32_t> tokens = {5, 9, 11};
    batch.Add(&state, tokens, Batch::Outputs::kLast);
    return ctx.ToFloats(Logits(ctx, weights, Forward(ctx, weights, batch).hidden));
  };
  const std::vector<float> got = logits(behind);
  EXPECT_THAT(got, ::testing::Pointwise(::testing::FloatNear(1e-5f), logits(SliceMemory(ctx, *memory, 1, 5))));
  EXPECT_NE(got, logits(memory));
}

TEST_F(DirectoryTest, HalfPrecisionIsRead) {
  for (const char* dtype : {"F16", "BF16"}) {
    ArtifactFingerprints prints = rig_->prints;
    prints.dtype = dtype;
    Put("h", *MakeMemory(4, 0.5f), prints);
    auto directory = MakeDirectory(1 << 24);
    const absl::StatusOr<PinnedMemory> pin = directory->Pin("acme", "book", "h");
    ASSERT_TRUE(pin.ok()) << pin.status();
    EXPECT_EQ(rig_->ctx.ToFloats(pin->memory->layers[1].v)[7], 1.5f);
  }
}

TEST_F(DirectoryTest, NoNameNoMemory) {
  auto directory = MakeDirectory(1 << 24);
  EXPECT_EQ(directory->Pin("acme", "book", "missing").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(directory->Pin("acme", "missing", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(directory->Pin("acme", "book", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(directory->Pin("other", "book", "a").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DirectoryTest, WithoutANameTheNewest) {
  Put("b", *MakeMemory(4, 1.0f), rig_->prints);
  Put("a", *MakeMemory(5, 2.0f), rig_->prints);
  auto directory = MakeDirectory(1 << 24);
  EXPECT_EQ(directory->Pin("acme", "book", "")->cache_id, "a");
}

TEST_F(DirectoryTest, ForeignArtifactsAreRefusedByName) {
  ArtifactFingerprints prints = rig_->prints;
  prints.model = "another model";
  Put("f", *MakeMemory(4, 1.0f), prints);
  auto directory = MakeDirectory(1 << 24);
  const absl::Status status = directory->Pin("acme", "book", "f").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("model"));
  EXPECT_FALSE(rig_->store->GetArtifact("acme", "book", "f")->quarantined);
}

TEST_F(DirectoryTest, DamagedArtifactsAreSetAside) {
  const ArtifactRow row = Put("d", *MakeMemory(40, 1.0f), rig_->prints);
  // One byte of the largest file that the store holds.
  std::filesystem::path victim;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) {
    if (entry.is_regular_file() && entry.file_size() == row.size) victim = entry.path();
  }
  ASSERT_FALSE(victim.empty());
  std::filesystem::permissions(victim, std::filesystem::perms::owner_write, std::filesystem::perm_options::add);
  {
    std::fstream file(victim, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<int64_t>(row.size) - 9);
    file.put('\x55');
  }
  CountingObserver observer;
  auto directory = MakeDirectory(1 << 24, &observer);
  EXPECT_EQ(directory->Pin("acme", "book", "d").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(observer.failures, 1);
  EXPECT_EQ(observer.routes["failed"], 1);
  EXPECT_TRUE(rig_->store->GetArtifact("acme", "book", "d")->quarantined);
  EXPECT_FALSE(directory->Pin("acme", "book", "d").ok());
  // Built anew it is served again.
  Put("d", *MakeMemory(4, 2.0f), rig_->prints);
  EXPECT_TRUE(directory->Pin("acme", "book", "d").ok());
}

TEST_F(DirectoryTest, ManyCallersOneLoad) {
  Put("a", *MakeMemory(30, 1.0f), rig_->prints);
  CountingObserver observer;
  auto directory = MakeDirectory(1 << 24, &observer);
  std::vector<std::thread> threads;
  std::array<std::shared_ptr<const Memory>, 8> pins;
  for (size_t i = 0; i < pins.size(); ++i) {
    threads.emplace_back([&, i] { pins[i] = directory->Pin("acme", "book", "a")->memory; });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(observer.loads, 1);
  for (const auto& pin : pins) EXPECT_EQ(pin, pins[0]);
}

TEST_F(DirectoryTest, LeastRecentlyUsedGoesFirstAndPinnedStay) {
  const int64_t bytes = MakeMemory(16, 0.0f)->allocated_bytes();
  for (const char* id : {"a", "b", "c"}) Put(id, *MakeMemory(16, 1.0f), rig_->prints);
  auto directory = MakeDirectory(2 * bytes + bytes / 2);
  ASSERT_TRUE(directory->Pin("acme", "book", "a").ok());
  ASSERT_TRUE(directory->Pin("acme", "book", "b").ok());
  ASSERT_TRUE(directory->Pin("acme", "book", "a").ok());
  ASSERT_TRUE(directory->Pin("acme", "book", "c").ok());
  EXPECT_TRUE(directory->IsResident("acme", "book", "a"));
  EXPECT_FALSE(directory->IsResident("acme", "book", "b"));
  const absl::StatusOr<PinnedMemory> a = directory->Pin("acme", "book", "a");
  const absl::StatusOr<PinnedMemory> c = directory->Pin("acme", "book", "c");
  EXPECT_EQ(directory->Pin("acme", "book", "b").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(directory->IsResident("acme", "book", "a"));
}

TEST_F(DirectoryTest, WhatCanNeverFitDrivesNothingOut) {
  Put("small", *MakeMemory(4, 1.0f), rig_->prints);
  Put("large", *MakeMemory(64, 1.0f), rig_->prints);
  auto directory = MakeDirectory(2 * BytesLoaded(4, *rig_->backend));
  ASSERT_TRUE(directory->Pin("acme", "book", "small").ok());
  const absl::Status status = directory->Pin("acme", "book", "large").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("--resident-memory"));
  EXPECT_TRUE(directory->IsResident("acme", "book", "small"));
}

TEST_F(DirectoryTest, AHeldMemoryOutlivesItsName) {
  const ArtifactRow row = Put("a", *MakeMemory(16, 1.0f), rig_->prints);
  const int64_t bytes = PackMemory(rig_->ctx, *MakeMemory(16, 0.0f), DType::kF32)->allocated_bytes();
  auto directory = MakeDirectory(bytes + bytes / 2);
  absl::StatusOr<PinnedMemory> held = directory->Pin("acme", "book", "a");
  directory->Forget("acme", "book", "");
  EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  EXPECT_EQ(rig_->ctx.ToFloats(held->memory->layers[0].k)[0], 1.0f);
  // It still takes its room, until it is let go.
  EXPECT_GE(directory->stats().allocated_bytes, bytes);
  EXPECT_EQ(directory->Pin("acme", "book", "a").status().code(), absl::StatusCode::kResourceExhausted);
  *held = PinnedMemory();
  EXPECT_TRUE(directory->Pin("acme", "book", "a").ok());
}

TEST_F(DirectoryTest, WithoutDeviceMemoryNoCopyIsMade) {
  const Context& ctx = rig_->ctx;
  const std::shared_ptr<const Memory> memory = MakeMemory(16, 1.0f);
  const ArtifactRow row = Put("a", *memory, rig_->prints);
  auto directory = MakeDirectory(1 << 20);
  const ArtifactHeader header = directory->Pin("acme", "book", "a")->header;
  directory->Forget("acme", "book", "a");
  PagePool pages(ctx, rig_->model.weights->config, 1 << 20);
  ctx.pool().Trim();
  rig_->backend->LimitMemory(rig_->backend->memory().taken);
  EXPECT_EQ(PackMemory(ctx, *memory, DType::kF32), nullptr);
  if (ctx.backend->fused().has_steps()) {
    SequenceState state({memory}, &pages);
    const absl::Status status = state.Reserve(1);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("layout"));
    directory->Publish("acme", "book", "a", row, header, memory);
    EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  }
  EXPECT_EQ(ctx.pool().overflowed_bytes(), 0u);
  rig_->backend->LimitMemory(BoundedMemory::kNoLimit);
  EXPECT_TRUE(directory->Pin("acme", "book", "a").ok());
  SequenceState state({memory}, &pages);
  EXPECT_TRUE(state.Reserve(1).ok());
}

TEST_F(DirectoryTest, PublishReplacesAtOnce) {
  const ArtifactRow row = Put("a", *MakeMemory(4, 1.0f), rig_->prints);
  auto directory = MakeDirectory(1 << 24);
  const absl::StatusOr<PinnedMemory> old = directory->Pin("acme", "book", "a");
  directory->Publish("acme", "book", "a", row, old->header, MakeMemory(6, 7.0f));
  const absl::StatusOr<PinnedMemory> fresh = directory->Pin("acme", "book", "a");
  EXPECT_TRUE(fresh->was_resident);
  EXPECT_EQ(fresh->memory->slots, 6);
  EXPECT_EQ(old->memory->slots, 4);
}

TEST_F(DirectoryTest, WhatLeftTheStoreBeforeItWasPublishedIsNotServed) {
  const ArtifactRow deleted = Put("a", *MakeMemory(4, 1.0f), rig_->prints);
  const ArtifactRow replaced = Put("b", *MakeMemory(4, 1.0f), rig_->prints);
  auto directory = MakeDirectory(1 << 24);
  const ArtifactHeader header = directory->Pin("acme", "book", "a")->header;
  ASSERT_TRUE(rig_->store->DeleteArtifact("acme", "book", "a", "").ok());
  directory->Forget("acme", "book", "a");
  directory->Publish("acme", "book", "a", deleted, header, MakeMemory(4, 1.0f));
  EXPECT_FALSE(directory->IsResident("acme", "book", "a"));
  EXPECT_EQ(directory->Pin("acme", "book", "a").status().code(), absl::StatusCode::kNotFound);
  Put("b", *MakeMemory(6, 2.0f), rig_->prints);
  directory->Publish("acme", "book", "b", replaced, header, MakeMemory(4, 1.0f));
  EXPECT_EQ(directory->Pin("acme", "book", "b")->memory->slots, 6);
}

TEST_F(DirectoryTest, TheObserverSeesWhatBecomesResident) {
  const ArtifactRow row = Put("a", *MakeMemory(5, 1.0f), rig_->prints);
  CountingObserver observer;
  auto directory = MakeDirectory(1 << 24, &observer);
  ArtifactHeader header = directory->Pin("acme", "book", "a")->header;
  ASSERT_TRUE(directory->Pin("acme", "book", "a").ok());  // it is there already
  header.slots = 6;
  directory->Publish("acme", "book", "a", row, header, MakeMemory(6, 1.0f));
  EXPECT_THAT(observer.resident_slots, ::testing::ElementsAre(5, 6));
}

}  // namespace
}  // namespace stillhouse
