// The CPU backend with recorded decode steps: what is told apart from plain launches on a GPU runs on any machine.
#ifndef STILLHOUSE_TESTS_SUPPORT_STEP_BACKEND_H_
#define STILLHOUSE_TESTS_SUPPORT_STEP_BACKEND_H_

#include <memory>

#include "kernels/cpu/cpu_backend.h"

namespace stillhouse::testing {

// Fused ops are compositions of the CPU's plain ones, f32 only; a step's attention is made anew from the bytes that a
// GPU would read, so that what a recording reads is what it is given. A recording is run by calling the recorded
// function again.
std::unique_ptr<Backend> MakeStepBackend(const CpuBackendOptions& options = {});

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SUPPORT_STEP_BACKEND_H_
