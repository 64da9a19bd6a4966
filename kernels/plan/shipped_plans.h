// The plan files of this folder, as the build found them (shipped_plans.cc is made by CMake).
#ifndef STILLHOUSE_KERNELS_PLAN_SHIPPED_PLANS_H_
#define STILLHOUSE_KERNELS_PLAN_SHIPPED_PLANS_H_

#include <vector>

namespace stillhouse {

const std::vector<const char*>& ShippedPlans();

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_PLAN_SHIPPED_PLANS_H_
