#include "kernels/tensor/buffer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <vector>

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

}  // namespace
}  // namespace stillhouse
