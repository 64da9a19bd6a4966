// What the kernel tests share: the backend under test, random tensors on it (also strided ones), poisoned outputs,
// errors against fp64 values, and gradients by central differences of an fp64 function. Tests never touch a tensor's
// memory themselves: what holds for one backend is asked of every backend.
#ifndef STILLHOUSE_TESTS_KERNELS_FP64_REFERENCE_H_
#define STILLHOUSE_TESTS_KERNELS_FP64_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/ops/context.h"
#include "kernels/ops/kernel_table.h"

namespace stillhouse::testing {

using Doubles = std::vector<double>;

// The instruction set under test: STILLHOUSE_TEST_ISA is v2, avx2 or avx512; unset, the machine's best.
inline CpuIsa IsaForTests() {
  const char* name = std::getenv("STILLHOUSE_TEST_ISA");
  const std::string isa = name ? name : "";
  return isa == "v2" ? CpuIsa::kV2 : isa == "avx2" ? CpuIsa::kAvx2 : isa == "avx512" ? CpuIsa::kAvx512 : CpuIsa::kAuto;
}

// Fresh for every run and printed by it; STILLHOUSE_TEST_SEED repeats a run.
inline uint32_t TestSeed() {
  static const uint32_t seed = [] {
    const char* fixed = std::getenv("STILLHOUSE_TEST_SEED");
    return fixed ? static_cast<uint32_t>(std::strtoul(fixed, nullptr, 10)) : std::random_device()();
  }();
  return seed;
}

// A generator of a test's own: `stream` tells tests apart.
inline std::mt19937 TestRng(uint32_t stream) {
  std::seed_seq seed{TestSeed(), stream};
  return std::mt19937(seed);
}

// STILLHOUSE_TEST_SMALL=1: fewer cases that still reach every kernel, for compute-sanitizer.
inline bool SmallTests() {
  const char* small = std::getenv("STILLHOUSE_TEST_SMALL");
  return small && std::string(small) == "1";
}

// STILLHOUSE_TEST_DEVICE=cuda runs the tests on the first GPU (fp32 storage) instead of the CPU.
inline bool CudaForTests() {
  const char* device = std::getenv("STILLHOUSE_TEST_DEVICE");
  return device && std::string(device) == "cuda";
}

// For tests of the CPU backend's own parts.
#define STILLHOUSE_CPU_ONLY() \
  if (CudaForTests()) GTEST_SKIP() << "a test of the CPU backend"

// A backend of the kind under test with this many host threads; null where the machine has no GPU.
inline std::unique_ptr<Backend> MakeBackendForTests(int threads) {
  if (!CudaForTests()) return MakeCpuBackend({.threads = threads, .isa = IsaForTests()});
  auto backend = MakeCudaBackend({.threads = threads});
  return backend.ok() ? *std::move(backend) : nullptr;
}

// Three threads, so that work is split even where the machine has fewer cores.
inline Backend& BackendForTests() {
  static Backend* backend = MakeBackendForTests(3).release();
  return *backend;
}

inline Context TestContext(Tape* tape = nullptr) { return {&BackendForTests(), tape}; }

// Values that floats hold exactly, so that the fp64 reference and the kernel see the same inputs.
inline Doubles RandomValues(std::mt19937& rng, int64_t count, double scale = 1.0) {
  std::normal_distribution<double> normal(0.0, scale);
  Doubles values(static_cast<size_t>(count));
  for (double& v : values) v = static_cast<double>(static_cast<float>(normal(rng)));
  return values;
}

inline int64_t Count(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

inline Tensor PoisonedEmpty(const Context& ctx, const Shape& shape) {
  return ctx.Floats(std::vector<float>(static_cast<size_t>(Count(shape)), std::numeric_limits<float>::quiet_NaN()),
                    shape);
}

// A tensor of `shape` inside a larger poisoned one: every dimension but the last is padded, so no two rows touch.
inline Tensor StridedEmpty(const Context& ctx, const Shape& shape) {
  Shape wide = shape;
  for (size_t i = 1; i < wide.size(); ++i) wide[i] += 3;
  Tensor t = PoisonedEmpty(ctx, wide);
  for (int i = 1; i < t.rank(); ++i) t = t.Slice(i, 1, 1 + shape[static_cast<size_t>(i)]);
  return t;
}

// Leaves a block full of NaN in the pool: the next tensor of this shape gets it.
inline void PoisonNext(const Context& ctx, const Shape& shape) { PoisonedEmpty(ctx, shape); }

inline Tensor ToTensor(const Context& ctx, const Doubles& values, const Shape& shape, bool strided = false) {
  std::vector<float> floats(values.begin(), values.end());
  Tensor flat = ctx.Floats(floats, shape);
  if (!strided) return flat;
  Tensor t = StridedEmpty(ctx, shape);
  ctx.backend->Copy(flat, t);
  return t;
}

// Bytes of storage (a quantised weight, say) on the backend, as they are. On the CPU a view: `bytes` must live on.
inline Tensor StorageTensor(const Context& ctx, const std::vector<uint8_t>& bytes, DType dtype, const Shape& shape) {
  const Tensor host = Tensor::Wrap(bytes.data(), dtype, shape);
  if (ctx.backend->device() == DeviceType::kCpu) return host;
  Tensor t = ctx.Empty(dtype, shape);
  ctx.backend->Upload(host.raw(), t);
  return t;
}

inline Doubles ToDoubles(const Tensor& t) {
  const std::vector<float> floats = TestContext().ToFloats(t);
  return Doubles(floats.begin(), floats.end());
}

// ‖got − want‖ / ‖want‖; infinite if anything is NaN, or if infinities differ.
inline double RelativeError(const Doubles& got, const Doubles& want) {
  constexpr double kBad = std::numeric_limits<double>::infinity();
  if (got.size() != want.size()) return kBad;
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) || std::isnan(want[i])) return kBad;
    if (std::isinf(got[i]) || std::isinf(want[i])) {
      if (got[i] != want[i]) return kBad;
      continue;
    }
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

// ‖got − want‖ / (‖want‖ + floor): for values that are differences of terms of about `floor`/6e-8 and may nearly
// cancel.
inline double RelativeError(const Doubles& got, const Doubles& want, double floor) {
  const Doubles zero(want.size(), 0.0);
  const double norm = RelativeError(want, zero);
  return RelativeError(got, want) * (norm > 0.0 ? norm : 1.0) / (norm + floor);
}

inline double RelativeError(const Tensor& got, const Doubles& want) { return RelativeError(ToDoubles(got), want); }

// Central differences of f at x (f reads x through the reference it captured). Steps of 1e-5 in fp64: about 1e-9 off.
inline Doubles CentralDifferences(Doubles& x, const std::function<double()>& f) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double saved = x[i];
    x[i] = saved + kStep;
    const double up = f();
    x[i] = saved - kStep;
    const double down = f();
    x[i] = saved;
    gradient[i] = (up - down) / (2 * kStep);
  }
  return gradient;
}

inline double Inner(const Doubles& a, const Doubles& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// fp32 paths against fp64, and gradients of fp32 paths: sums of thousands of terms of 6e-8 each, with room.
constexpr double kForwardTolerance = 1e-5;
constexpr double kGradientTolerance = 1e-4;

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_KERNELS_FP64_REFERENCE_H_
