#include "kernels/tensor/buffer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/tensor/bounded_memory.h"

namespace stillhouse {
namespace {

// Counts what is asked of the system.
class CountedMemory final : public RawMemory {
 public:
  DeviceType device() const override { return DeviceType::kCpu; }
  void* Allocate(size_t bytes) override {
    ++allocations;
    held += bytes;
    return std::malloc(bytes);
  }
  void Free(void* data, size_t bytes) override {
    held -= bytes;
    std::free(data);
  }

  int allocations = 0;
  size_t held = 0;
};

constexpr size_t kSmall = 1024, kLarge = 4096;

TEST(BufferPool, LendsAFreedBlockAgain) {
  auto memory = std::make_shared<CountedMemory>();
  BufferPool pool(memory);
  void* first = pool.Allocate(kSmall)->data();
  EXPECT_EQ(pool.lent_bytes(), 0u);
  EXPECT_EQ(pool.cached_bytes(), kSmall);
  EXPECT_EQ(pool.Allocate(kSmall)->data(), first);
  EXPECT_EQ(memory->allocations, 1);
  EXPECT_EQ(pool.peak_bytes(), kSmall);
  pool.Trim();
  EXPECT_EQ(memory->held, 0u);
}

TEST(BufferPool, KeepsAtMostItsLimit) {
  auto memory = std::make_shared<CountedMemory>();
  BufferPool pool(memory, 2 * kLarge);
  for (size_t size = kLarge; size < 2 * kLarge; size += kLarge / 4) pool.Allocate(size);
  EXPECT_EQ(memory->allocations, 4);
  EXPECT_LE(pool.cached_bytes(), 2 * kLarge);
  EXPECT_EQ(memory->held, pool.cached_bytes());
}

TEST(BufferPool, AStepLargerThanTheLimitFindsItsBlocksAgain) {
  auto memory = std::make_shared<CountedMemory>();
  BufferPool pool(memory, 2 * kLarge);
  const auto step = [&] {
    std::vector<std::shared_ptr<Buffer>> lent;
    for (int i = 0; i < 5; ++i) lent.push_back(pool.Allocate(kLarge));
  };
  step();
  step();
  EXPECT_EQ(memory->allocations, 5);
  EXPECT_EQ(memory->held, 5 * kLarge);
  pool.Trim();
  EXPECT_EQ(memory->held, 0u);
  pool.Allocate(kLarge);
  EXPECT_EQ(memory->held, kLarge);
}

TEST(BufferPool, BlocksOfAnEarlierShapeMakeRoom) {
  auto memory = std::make_shared<CountedMemory>();
  BufferPool pool(memory, 2 * kLarge);
  {
    std::vector<std::shared_ptr<Buffer>> lent;
    for (size_t i = 0; i < 2 * kLarge / kSmall; ++i) lent.push_back(pool.Allocate(kSmall));
  }
  EXPECT_EQ(pool.cached_bytes(), 2 * kLarge);
  const auto step = [&] { const auto a = pool.Allocate(kLarge), b = pool.Allocate(kLarge); };
  step();
  // From the second step on nothing is asked of the system: the small blocks went, not the large ones.
  const int allocations = memory->allocations;
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(memory->allocations, allocations);
  EXPECT_LE(memory->held, 2 * kLarge);
}

TEST(BufferPool, BuffersOutliveIt) {
  auto memory = std::make_shared<CountedMemory>();
  std::shared_ptr<Buffer> buffer;
  {
    BufferPool pool(memory);
    buffer = pool.Allocate(kSmall);
  }
  buffer.reset();
  EXPECT_EQ(memory->held, 0u);
}

TEST(BufferPool, ALimitIsMetByGivingCachedBlocksBack) {
  auto memory = std::make_shared<CountedMemory>();
  BufferPool pool(std::make_shared<BoundedMemory>(memory, 2 * kLarge));
  const auto held = pool.Allocate(kLarge);
  for (size_t i = 0; i < kLarge / kSmall; ++i) pool.Allocate(kSmall);
  EXPECT_EQ(pool.cached_bytes(), kSmall);
  EXPECT_NE(pool.TryAllocate(kLarge), nullptr);  // needs the room of the small one
  EXPECT_EQ(pool.TryAllocate(2 * kLarge), nullptr);
  EXPECT_EQ(pool.lent_bytes(), kLarge);
  EXPECT_LE(memory->held, 2 * kLarge);
}

TEST(BufferPool, WithoutMemoryTheReclaimerIsAsked) {
  BufferPool pool(std::make_shared<BoundedMemory>(std::make_shared<CountedMemory>(), 3 * kLarge));
  std::vector<std::shared_ptr<Buffer>> residents = {pool.Allocate(kLarge), pool.Allocate(kLarge),
                                                    pool.Allocate(kLarge)};
  std::vector<size_t> asked;
  pool.SetReclaimer([&](size_t bytes) {
    asked.push_back(bytes);
    if (residents.empty()) return false;
    residents.pop_back();
    return true;
  });
  EXPECT_NE(pool.TryAllocate(2 * kLarge), nullptr);
  EXPECT_EQ(asked, (std::vector<size_t>{2 * kLarge, 2 * kLarge}));
  EXPECT_EQ(residents.size(), 1u);
  EXPECT_EQ(pool.TryAllocate(4 * kLarge), nullptr);
  EXPECT_TRUE(residents.empty());
  pool.SetReclaimer(nullptr);
  EXPECT_EQ(pool.TryAllocate(4 * kLarge), nullptr);
}

TEST(BufferPool, OneThatKeepsItsBlocksAsksOthersOnly) {
  auto bound = std::make_shared<BoundedMemory>(std::make_shared<CountedMemory>(), 2 * kLarge);
  BufferPool pool(bound), keeping(bound, 0, /*keeps=*/true);
  keeping.SetReclaimer([&](size_t bytes) { return pool.Reclaim(bytes); });
  const void* block = keeping.Allocate(kSmall)->data();
  pool.Allocate(kLarge);
  const auto large = keeping.TryAllocate(kLarge + kLarge / 2);  // in the place of the other pool's block
  EXPECT_NE(large, nullptr);
  EXPECT_EQ(pool.cached_bytes(), 0u);
  EXPECT_EQ(keeping.TryAllocate(kLarge), nullptr);
  EXPECT_EQ(keeping.Allocate(kSmall)->data(), block);
}

TEST(BufferPool, WorkThatHasBegunEndsInTheOverflow) {
  auto memory = std::make_shared<CountedMemory>(), overflow = std::make_shared<CountedMemory>();
  BufferPool pool(std::make_shared<BoundedMemory>(memory, 2 * kLarge), 2 * kLarge, /*keeps=*/false, overflow);
  auto held = pool.Allocate(2 * kLarge);
  EXPECT_EQ(pool.overflowed_bytes(), 0u);
  {
    const auto beyond = pool.Allocate(kLarge);
    EXPECT_EQ(overflow->held, kLarge);
    EXPECT_EQ(pool.overflowed_bytes(), kLarge);
    EXPECT_EQ(pool.lent_bytes(), 2 * kLarge);
  }
  // It goes back at once: whoever can be refused is, and what comes later finds the device's own.
  EXPECT_EQ(overflow->held, 0u);
  EXPECT_EQ(pool.TryAllocate(kLarge), nullptr);
  held.reset();
  EXPECT_NE(pool.Allocate(kLarge), nullptr);
  EXPECT_EQ(pool.overflowed_bytes(), kLarge);
  EXPECT_EQ(overflow->held, 0u);
}

TEST(BufferPoolDeathTest, NoMemoryAnywhereIsSaid) {
  const auto full = std::make_shared<BoundedMemory>(HostMemory(), 0);
  EXPECT_DEATH(BufferPool(full).Allocate(kLarge), "out of memory: 4096 bytes");
  EXPECT_DEATH(BufferPool(full, 0, /*keeps=*/false, full).Allocate(kLarge), "the host has none left either");
}

TEST(BoundedMemory, RacingCallersStayWithinTheLimit) {
  BoundedMemory bound(HostMemory(), 10 * static_cast<int64_t>(kLarge));
  std::atomic<int64_t> most{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        std::vector<void*> blocks;
        for (int n = 0; n < 4; ++n) {
          if (void* block = bound.Allocate(kLarge)) blocks.push_back(block);
        }
        int64_t seen = most.load();
        while (seen < bound.taken() && !most.compare_exchange_weak(seen, bound.taken())) {
        }
        for (void* block : blocks) bound.Free(block, kLarge);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most.load(), bound.limit());
  EXPECT_EQ(bound.taken(), 0);
  EXPECT_EQ(bound.Allocate(11 * kLarge), nullptr);
}

}  // namespace
}  // namespace stillhouse
