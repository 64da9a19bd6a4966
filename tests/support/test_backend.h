// The backend that tests of the server's device work run on.
#ifndef STILLHOUSE_TESTS_SUPPORT_TEST_BACKEND_H_
#define STILLHOUSE_TESTS_SUPPORT_TEST_BACKEND_H_

#include <cstdlib>
#include <memory>
#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/support/step_backend.h"

namespace stillhouse::testing {

// The CPU; with STILLHOUSE_TEST_DEVICE=steps the CPU with recorded decode steps; with STILLHOUSE_TEST_DEVICE=cuda the
// first GPU, in fp32 storage or as STILLHOUSE_TEST_STORAGE=bf16 says.
inline std::unique_ptr<Backend> MakeTestBackend(const CpuBackendOptions& options = {}) {
  const char* device = std::getenv("STILLHOUSE_TEST_DEVICE");
  if (device && std::string(device) == "steps") return MakeStepBackend(options);
  if (!device || std::string(device) != "cuda") return MakeCpuBackend(options);
  CudaBackendOptions cuda;
  cuda.threads = options.threads;
  const char* storage = std::getenv("STILLHOUSE_TEST_STORAGE");
  if (storage && std::string(storage) == "bf16") cuda.storage = CudaStorage::kBf16;
  auto backend = MakeCudaBackend(cuda);
  STILLHOUSE_CHECK(backend.ok()) << backend.status().ToString();
  return *std::move(backend);
}

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SUPPORT_TEST_BACKEND_H_
