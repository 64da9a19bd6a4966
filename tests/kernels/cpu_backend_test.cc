#include "kernels/cpu/cpu_backend.h"

#include <gtest/gtest.h>

#include <cstring>

#include "kernels/cpu/simd.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

TEST(CpuBackend, SaysWhatItIs) {
  auto backend = MakeCpuBackend({.threads = 2, .isa = CpuIsa::kV2});
  EXPECT_STREQ(backend->name(), "cpu v2");
  EXPECT_EQ(backend->device(), DeviceType::kCpu);
  EXPECT_EQ(backend->threads().num_threads(), 2);
  EXPECT_EQ(backend->pool().device(), DeviceType::kCpu);
  EXPECT_GE(MakeCpuBackend()->threads().num_threads(), 1);
}

TEST(CpuBackendDeathTest, AMissingInstructionSetIsRefused) {
  if (cpu::MachineHas(CpuIsa::kAvx512)) GTEST_SKIP() << "this machine has every set";
  EXPECT_DEATH(MakeCpuBackend({.isa = CpuIsa::kAvx512}), "choose auto");
}

TEST(Context, RoundTripsThroughTheDevice) {
  std::mt19937 rng = TestRng(70);
  const Context ctx = TestContext();
  const std::vector<float> floats = {1.5f, -2.0f, 0.0f, 7.25f, 3.0f, -0.5f};
  const std::vector<int32_t> ints = {4, -1, 7};
  EXPECT_EQ(ctx.ToFloats(ctx.Floats(floats, {2, 3})), floats);
  EXPECT_EQ(ctx.ToInts(ctx.Ints(ints, {3})), ints);
  EXPECT_TRUE(ctx.ToFloats(ctx.Floats({}, {0, 3})).empty());
  // Any strides.
  const Doubles values = RandomValues(rng, 4 * 5 * 6);
  const Tensor t = ToTensor(ctx, values, {4, 5, 6}, true);
  for (const Tensor& view : {t, t.Transpose(0, 2), t.Slice(1, 2, 4), t.Select(2, 3), t.Slice(0, 1, 1)}) {
    const std::vector<float> got = ctx.ToFloats(view);
    EXPECT_EQ(Doubles(got.begin(), got.end()), ToDoubles(view)) << view.DebugString();
  }
}

TEST(Context, ZeroClearsTheWholeBuffer) {
  const Context ctx = TestContext();
  const Tensor t = PoisonedEmpty(ctx, {3, 5});
  ctx.backend->Zero(t.Slice(0, 1, 2));
  for (double v : ToDoubles(t)) EXPECT_EQ(v, 0.0);
}

TEST(CudaBackend, SaysWhyThereIsNone) {
  const auto backend = MakeCudaBackend({});
  if (backend.ok()) {
    EXPECT_EQ((*backend)->device(), DeviceType::kCuda);
    return;
  }
  EXPECT_TRUE(absl::IsUnimplemented(backend.status()) || absl::IsNotFound(backend.status())) << backend.status();
}

}  // namespace
}  // namespace stillhouse::testing
