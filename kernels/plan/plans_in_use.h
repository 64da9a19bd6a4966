// The plans that this process runs by: those that come with the program, and over them those that it was given at
// start.
#ifndef STILLHOUSE_KERNELS_PLAN_PLANS_IN_USE_H_
#define STILLHOUSE_KERNELS_PLAN_PLANS_IN_USE_H_

#include "kernels/plan/plan_book.h"

namespace stillhouse {

// Before the first backend is made, from one thread.
void UsePlans(const PlanBook& book);
const PlanBook& PlansInUse();

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_PLAN_PLANS_IN_USE_H_
