#include "kernels/cpu/cpu_backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/base/logging.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/tensor/bounded_memory.h"

namespace stillhouse {
namespace {

int UsableCores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options)
      : simd_(cpu::FindSimd(options.isa)),
        name_(std::string("cpu ") + simd_.name),
        threads_(options.threads > 0 ? options.threads : UsableCores()),
        memory_(std::make_shared<BoundedMemory>(HostMemory())),
        pool_(memory_, size_t{2} << 30, /*keeps=*/false, HostMemory()) {}

  DeviceType device() const override { return DeviceType::kCpu; }
  const char* name() const override { return name_.c_str(); }
  const KernelTable& kernels() const override { return cpu::Kernels(); }
  BufferPool& pool() override { return pool_; }
  ThreadPool& threads() override { return threads_; }

  void Upload(const void* host, const Tensor& device) override {
    STILLHOUSE_CHECK(device.contiguous()) << device.DebugString();
    if (device.bytes() > 0) std::memcpy(device.raw(), host, static_cast<size_t>(device.bytes()));
  }
  void Download(const Tensor& device, void* host) override {
    STILLHOUSE_CHECK(device.contiguous()) << device.DebugString();
    if (device.bytes() > 0) std::memcpy(host, device.raw(), static_cast<size_t>(device.bytes()));
  }
  void Copy(const Tensor& from, const Tensor& to) override { CopyElements(from, to); }
  void Zero(const Tensor& tensor) override {
    if (tensor.buffer()->bytes() > 0) std::memset(tensor.buffer()->data(), 0, tensor.buffer()->bytes());
  }

  void LimitMemory(int64_t bytes) override { memory_->SetLimit(bytes); }

  const cpu::SimdTable& simd() const { return simd_; }
  cpu::WeightArena& weights() { return weights_; }

 private:
  const cpu::SimdTable& simd_;
  std::string name_;
  ThreadPool threads_;
  const std::shared_ptr<BoundedMemory> memory_;
  BufferPool pool_;
  cpu::WeightArena weights_;
};

}  // namespace

namespace cpu {

#if defined(__x86_64__)
namespace {
// No compiler's __builtin_cpu_supports knows this one everywhere.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
}  // namespace
#endif

bool MachineHas(CpuIsa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case CpuIsa::kAuto:
    case CpuIsa::kV2:
      return true;
    case CpuIsa::kAvx2:
      return SimdAvx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
    case CpuIsa::kAvx512:
      return SimdAvx512() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && MachineHas(CpuIsa::kAvx2);
  }
  return false;
#else
  return isa == CpuIsa::kAuto || isa == CpuIsa::kV2;
#endif
}

const SimdTable& FindSimd(CpuIsa isa) {
  STILLHOUSE_CHECK(MachineHas(isa)) << "this machine lacks the instruction set asked for (isa " << static_cast<int>(isa)
                                    << "); choose auto";
  switch (isa) {
    case CpuIsa::kV2:
      return *SimdV2();
    case CpuIsa::kAvx2:
      return *SimdAvx2();
    case CpuIsa::kAvx512:
      return *SimdAvx512();
    case CpuIsa::kAuto:
      break;
  }
  if (MachineHas(CpuIsa::kAvx512)) return *SimdAvx512();
  if (MachineHas(CpuIsa::kAvx2)) return *SimdAvx2();
  return *SimdV2();
}

namespace {
CpuBackend& CpuOf(Backend& backend) {
  auto* cpu = dynamic_cast<CpuBackend*>(&backend);
  STILLHOUSE_CHECK(cpu != nullptr) << "a CPU kernel ran on " << backend.name();
  return *cpu;
}
}  // namespace

const SimdTable& SimdOf(Backend& backend) { return CpuOf(backend).simd(); }
WeightArena& WeightsOf(Backend& backend) { return CpuOf(backend).weights(); }

}  // namespace cpu

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace stillhouse
