#include "kernels/ops/gather.h"

#include <gtest/gtest.h>

#include "kernels/ops/matmul.h"
#include "tests/kernels/quant_reference.h"

namespace stillhouse::testing {
namespace {

std::vector<int32_t> RandomIds(std::mt19937& rng, int64_t count, int64_t limit) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<uint32_t>(limit));
  return ids;
}

TEST(Embedding, DecodesRowsOfEveryStorageType) {
  std::mt19937 rng = TestRng(30);
  const Context ctx = TestContext();
  for (DType dtype : kStorageTypes) {
    const int64_t vocabulary = 21, width = 2 * std::max<int64_t>(BlockElements(dtype), 32);
    const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, vocabulary * width);
    const Doubles table = StorageValues(dtype, bytes, vocabulary * width);
    const Tensor raw = StorageTensor(ctx, bytes, dtype, {vocabulary, width});
    for (const Tensor& t : {raw, PrepareWeight(ctx, raw)}) {
      for (int64_t rows : {0, 1, 50}) {
        std::vector<int32_t> ids = RandomIds(rng, rows, vocabulary);
        if (rows > 1) ids[0] = 0, ids[1] = static_cast<int32_t>(vocabulary - 1);
        PoisonNext(ctx, {rows, width});
        const Doubles out = ToDoubles(Embedding(ctx, t, ctx.Ints(ids, {rows})));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < width; ++i) {
            ASSERT_EQ(out[r * width + i], static_cast<double>(static_cast<float>(table[ids[r] * width + i])))
                << DTypeName(dtype);
          }
        }
      }
    }
  }
}

TEST(Embedding, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(31);
  Tape tape(BackendForTests());
  const Context ctx = TestContext(&tape);
  const int64_t vocabulary = 7, width = 11;
  const std::vector<int32_t> ids = {3, 0, 3, 6, 3};
  Doubles table = RandomValues(rng, vocabulary * width);
  const Doubles w = RandomValues(rng, 5 * width);
  const Tensor t = ToTensor(ctx, table, {vocabulary, width});
  tape.Watch(t);
  const Tensor out = Embedding(ctx, t, ctx.Ints(ids, {5}));
  tape.BackwardFrom({out}, {ToTensor(ctx, w, {5, width})});
  const auto loss = [&] {
    double sum = 0.0;
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t i = 0; i < width; ++i) sum += w[r * width + i] * table[ids[r] * width + i];
    }
    return sum;
  };
  EXPECT_LE(RelativeError(tape.Grad(t), CentralDifferences(table, loss)), kGradientTolerance);
}

TEST(EmbeddingDeathTest, RefusesIdsOutsideOfTheTable) {
  STILLHOUSE_CPU_ONLY();  // a kernel traps: the process ends with the next checked call
  const Context ctx = TestContext();
  const Tensor table = ToTensor(ctx, Doubles(12, 1.0), {3, 4});
  for (int32_t id : {-1, 3}) EXPECT_DEATH(Embedding(ctx, table, ctx.Ints({id}, {1})), "token");
}

TEST(GatherRows, CopiesRows) {
  std::mt19937 rng = TestRng(32);
  const Context ctx = TestContext();
  for (int64_t width : {1, 5, 64, 577}) {
    for (bool strided : {false, true}) {
      const int64_t rows = 9, count = 14;
      const Doubles x = RandomValues(rng, rows * width);
      const std::vector<int32_t> ids = RandomIds(rng, count, rows);
      Doubles want;
      for (int32_t id : ids) want.insert(want.end(), x.begin() + id * width, x.begin() + (id + 1) * width);
      PoisonNext(ctx, {count, width});
      EXPECT_EQ(RelativeError(GatherRows(ctx, ToTensor(ctx, x, {rows, width}, strided), ctx.Ints(ids, {count})), want),
                0.0);
    }
  }
}

TEST(GatherRows, GradientsMatchCentralDifferences) {
  std::mt19937 rng = TestRng(33);
  for (bool strided : {false, true}) {
    Tape tape(BackendForTests());
    const Context ctx = TestContext(&tape);
    const int64_t rows = 6, width = 9;
    const std::vector<int32_t> ids = {5, 1, 1, 0};
    Doubles x = RandomValues(rng, rows * width);
    const Doubles w = RandomValues(rng, 4 * width);
    const Tensor tx = ToTensor(ctx, x, {rows, width}, strided);
    tape.Watch(tx);
    const Tensor out = GatherRows(ctx, tx, ctx.Ints(ids, {4}));
    tape.BackwardFrom({out}, {ToTensor(ctx, w, {4, width})});
    const auto loss = [&] {
      double sum = 0.0;
      for (int64_t r = 0; r < 4; ++r) {
        for (int64_t i = 0; i < width; ++i) sum += w[r * width + i] * x[ids[r] * width + i];
      }
      return sum;
    };
    EXPECT_LE(RelativeError(tape.Grad(tx), CentralDifferences(x, loss)), kGradientTolerance);
  }
}

}  // namespace
}  // namespace stillhouse::testing
