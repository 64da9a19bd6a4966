// The test program's main: which instruction set and which seed this run uses.
#include <gtest/gtest.h>

#include <cstdio>

#include "kernels/cpu/simd.h"
#include "tests/kernels/fp64_reference.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // Death tests start the program anew: a forked copy would have the backend without its threads.
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const stillhouse::CpuIsa isa = stillhouse::testing::IsaForTests();
  if (!stillhouse::cpu::MachineHas(isa)) {
    std::printf("skipped: this machine lacks the instruction set of STILLHOUSE_TEST_ISA\n");
    return 77;
  }
  if (stillhouse::testing::CudaForTests() && !stillhouse::testing::MakeBackendForTests(1)) {
    std::printf("skipped: there is no GPU for STILLHOUSE_TEST_DEVICE=cuda\n");
    return 77;
  }
  std::printf("%s, STILLHOUSE_TEST_SEED=%u\n", stillhouse::testing::BackendForTests().name(),
              stillhouse::testing::TestSeed());
  return RUN_ALL_TESTS();
}
