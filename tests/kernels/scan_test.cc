#include "kernels/ops/scan.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

constexpr ScanAlgorithm kAlgorithms[] = {ScanAlgorithm::kAuto,
                                         ScanAlgorithm::kKoggeStone,
                                         ScanAlgorithm::kKoggeStoneDoubleBuffered,
                                         ScanAlgorithm::kKoggeStoneCoarsened,
                                         ScanAlgorithm::kBrentKung,
                                         ScanAlgorithm::kBrentKungCoarsened,
                                         ScanAlgorithm::kWarpTiled,
                                         ScanAlgorithm::kWarpTiledCoarsened,
                                         ScanAlgorithm::kDomino,
                                         ScanAlgorithm::kLookBack,
                                         ScanAlgorithm::kLookBackWindow,
                                         ScanAlgorithm::kTree,
                                         ScanAlgorithm::kPipeline,
                                         ScanAlgorithm::kResident,
                                         ScanAlgorithm::kTotalsFirst};

struct Case {
  int64_t rows, n;
};
// Around a vector, a warp's stretch, a tile and a group of tiles (of 4-byte elements: 4, 1024, 8192, 262144).
const Case kCases[] = {{1, 1},    {1, 3},    {1, 4},      {1, 255},    {1, 1024},   {1, 1025},  {1, 8192},
                       {1, 8193}, {3, 7},    {70, 64},    {5, 1023},   {9, 2049},   {3, 20000}, {1, 70001},
                       {2, 9000}, {33, 129}, {1, 262144}, {1, 300007}, {2, 1048579}};

// A few tiles of each kernel are enough for a sanitizer.
bool TooLong(int64_t n) { return SmallTests() && n > 20000 && n != 70001; }

template <typename T>
Tensor Upload(const Context& ctx, const std::vector<T>& values, DType dtype, const Shape& shape) {
  Tensor t = ctx.Empty(dtype, shape);
  ctx.backend->Upload(values.data(), t);
  return t;
}

template <typename T>
std::vector<T> Download(const Context& ctx, const Tensor& t) {
  std::vector<T> values(static_cast<size_t>(t.elements()));
  ctx.backend->Download(t, values.data());
  return values;
}

std::vector<uint8_t> RandomHeads(std::mt19937& rng, int64_t count, int64_t every) {
  std::vector<uint8_t> heads(static_cast<size_t>(count));
  for (uint8_t& h : heads) h = static_cast<int64_t>(rng() % static_cast<uint64_t>(every)) == 0 ? 1 + rng() % 255 : 0;
  return heads;
}

// Sum holds sums as exactly as they are wanted.
template <typename T, typename Sum>
std::vector<Sum> Reference(const std::vector<T>& in, const std::vector<uint8_t>& heads, int64_t rows, int64_t n,
                           bool exclusive) {
  std::vector<Sum> out(in.size());
  for (int64_t r = 0; r < rows; ++r) {
    Sum sum{};
    for (int64_t i = r * n; i < (r + 1) * n; ++i) {
      if (!heads.empty() && heads[i]) sum = Sum{};
      const Sum next = sum + static_cast<Sum>(in[i]);
      out[i] = exclusive ? sum : next;
      sum = next;
    }
  }
  return out;
}

template <typename T>
void CheckIntegers(DType dtype) {
  using Unsigned = std::make_unsigned_t<T>;
  std::mt19937 rng = TestRng(1);
  const Context ctx = TestContext();
  for (ScanAlgorithm algorithm : kAlgorithms) {
    for (const auto& [rows, n] : kCases) {
      if (algorithm != ScanAlgorithm::kAuto && algorithm != ScanAlgorithm::kTree &&
          algorithm != ScanAlgorithm::kPipeline && algorithm != ScanAlgorithm::kResident && n > 300007)
        continue;
      if (TooLong(n)) continue;
      for (bool exclusive : {false, true}) {
        for (int64_t every : {0, 3, 5000}) {
          if (SmallTests() && exclusive != (every == 3)) continue;
          std::vector<T> in(static_cast<size_t>(rows * n));
          // All bits: sums wrap around.
          for (T& v : in) v = static_cast<T>(static_cast<uint64_t>(rng()) << 32 | rng());
          const std::vector<uint8_t> heads = every ? RandomHeads(rng, rows * n, every) : std::vector<uint8_t>();
          ScanOptions options;
          options.exclusive = exclusive;
          options.algorithm = algorithm;
          const Tensor out = Scan(ctx, Upload(ctx, in, dtype, {rows, n}), options,
                                  every ? Upload(ctx, heads, DType::kU8, {rows, n}) : Tensor());
          const auto want =
              Reference<Unsigned, Unsigned>(std::vector<Unsigned>(in.begin(), in.end()), heads, rows, n, exclusive);
          ASSERT_EQ(Download<Unsigned>(ctx, out), want)
              << int(algorithm) << " " << rows << "x" << n << " exclusive " << exclusive << " heads " << every;
        }
      }
    }
  }
}

TEST(Scan, Int32IsExact) { CheckIntegers<int32_t>(DType::kI32); }
TEST(Scan, Int64IsExact) { CheckIntegers<int64_t>(DType::kI64); }

TEST(Scan, FloatMatchesReference) {
  std::mt19937 rng = TestRng(2);
  const Context ctx = TestContext();
  for (ScanAlgorithm algorithm : kAlgorithms) {
    for (const auto& [rows, n] : kCases) {
      if (TooLong(n)) continue;
      for (bool strided : {false, true}) {
        const Doubles in = RandomValues(rng, rows * n);
        const std::vector<uint8_t> heads = strided ? RandomHeads(rng, rows * n, 100) : std::vector<uint8_t>();
        ScanOptions options;
        options.exclusive = strided;
        options.algorithm = algorithm;
        options.deterministic = algorithm != ScanAlgorithm::kLookBack && algorithm != ScanAlgorithm::kLookBackWindow;
        const Tensor out = Scan(ctx, ToTensor(ctx, in, {rows, n}, strided), options,
                                strided ? Upload(ctx, heads, DType::kU8, {rows, n}) : Tensor());
        const Doubles want = Reference<double, double>(in, heads, rows, n, strided);
        EXPECT_LE(RelativeError(out, want), kForwardTolerance) << int(algorithm) << " " << rows << "x" << n;
      }
    }
  }
}

// Many groups of the largest tiles; rows that end within a vector; rows that begin within a group.
TEST(Scan, LongRows) {
  std::mt19937 rng = TestRng(4);
  const Context ctx = TestContext();
  for (const auto& [rows, n] : {Case{1, 9000037}, Case{3, 3000001}, Case{2, 4500000}}) {
    for (bool segmented : {false, true}) {
      std::vector<int32_t> in(static_cast<size_t>(rows * n));
      for (int32_t& v : in) v = static_cast<int32_t>(rng());
      const std::vector<uint8_t> heads = segmented ? RandomHeads(rng, rows * n, 1000000) : std::vector<uint8_t>();
      const Tensor out = Scan(ctx, Upload(ctx, in, DType::kI32, {rows, n}), {},
                              segmented ? Upload(ctx, heads, DType::kU8, {rows, n}) : Tensor());
      const auto want =
          Reference<uint32_t, uint32_t>(std::vector<uint32_t>(in.begin(), in.end()), heads, rows, n, false);
      EXPECT_TRUE(Download<uint32_t>(ctx, out) == want) << rows << "x" << n << " segmented " << segmented;
    }
  }
}

TEST(Scan, FloatsRepeatTheirBits) {
  std::mt19937 rng = TestRng(3);
  const Context ctx = TestContext();
  const int64_t n = SmallTests() ? 70001 : 3000017;
  const Tensor in = ToTensor(ctx, RandomValues(rng, n), {n});
  for (ScanAlgorithm algorithm : {ScanAlgorithm::kAuto, ScanAlgorithm::kTree, ScanAlgorithm::kPipeline,
                                  ScanAlgorithm::kDomino, ScanAlgorithm::kResident, ScanAlgorithm::kTotalsFirst}) {
    ScanOptions options;
    options.algorithm = algorithm;
    const std::vector<float> first = ctx.ToFloats(Scan(ctx, in, options));
    for (int run = 0; run < (SmallTests() ? 1 : 5); ++run) {
      const std::vector<float> again = ctx.ToFloats(Scan(ctx, in, options));
      ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0) << int(algorithm);
    }
  }
}

TEST(Scan, TakesNothing) {
  const Context ctx = TestContext();
  EXPECT_EQ(Scan(ctx, ctx.EmptyF32({0})).elements(), 0);
  EXPECT_EQ(Scan(ctx, ctx.EmptyF32({0, 5})).elements(), 0);
  EXPECT_EQ(Scan(ctx, ctx.EmptyF32({5, 0})).elements(), 0);
}

TEST(ScanDeathTest, RefusesALookBackThatShouldRepeat) {
  const Context ctx = TestContext();
  ScanOptions options;
  options.algorithm = ScanAlgorithm::kLookBack;
  EXPECT_DEATH(Scan(ctx, ctx.Floats({1.0f}, {1}), options), "does not repeat");
}

}  // namespace
}  // namespace stillhouse::testing
