// The CPU backend: complete, fp32 activations, the instruction set chosen at run time.
#ifndef STILLHOUSE_KERNELS_CPU_CPU_BACKEND_H_
#define STILLHOUSE_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>

#include "kernels/ops/context.h"

namespace stillhouse {

enum class CpuIsa : uint8_t { kAuto, kV2, kAvx2, kAvx512 };

struct CpuBackendOptions {
  int threads = 0;  // 0: one per core that this process may use
  CpuIsa isa = CpuIsa::kAuto;
};

// An isa that the machine lacks is a CHECK failure; kAuto takes the best.
std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options = {});

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_CPU_CPU_BACKEND_H_
