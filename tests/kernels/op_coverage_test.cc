// Every op of op_list.inc has a test suite of its name, every gradient a test in it whose name says so, and each
// backend has them all.
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/fp64_reference.h"

namespace stillhouse::testing {
namespace {

bool HasTest(const char* suite_name, const char* word) {
  const auto& unit = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < unit.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *unit.GetTestSuite(i);
    if (std::strcmp(suite.name(), suite_name) != 0) continue;
    for (int j = 0; j < suite.total_test_count(); ++j) {
      if (std::strstr(suite.GetTestInfo(j)->name(), word)) return true;
    }
  }
  return false;
}

TEST(OpCoverage, EveryOpAndEveryGradientHasATest) {
#define STILLHOUSE_OP(Name) EXPECT_TRUE(HasTest(#Name, "")) << "no TEST(" #Name ", …)";
#define STILLHOUSE_OP_GRAD(Name) \
  STILLHOUSE_OP(Name)            \
  EXPECT_TRUE(HasTest(#Name, "Gradient")) << "no TEST(" #Name ", …Gradient…)";
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
}

TEST(MissingOps, TheBackendUnderTestLacksNone) {
  EXPECT_EQ(MissingOps(BackendForTests().kernels()), std::vector<std::string>());
}

TEST(MissingOps, NamesWhatIsMissingInTheOrderOfTheList) {
  KernelTable table = BackendForTests().kernels();
  table.Rope = nullptr;
  table.RmsNormGrad = nullptr;
  EXPECT_EQ(MissingOps(table), (std::vector<std::string>{"RmsNormGrad", "Rope"}));
  EXPECT_GT(MissingOps(KernelTable()).size(), 20u);
}

}  // namespace
}  // namespace stillhouse::testing
