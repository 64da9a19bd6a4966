#include "kernels/plan/tune.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/base/strings.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/cuda/graph_timer.h"
#include "kernels/cuda/tune_launch.h"

namespace stillhouse {
namespace {

using cuda::DecomposeKShape;

// fp32 sums of exact products, relative to the norm of the fp64 product: what is good enough to be kept, and what can
// only be an error in a kernel.
constexpr double kTolerance = 2e-5, kWrong = 1e-3;
constexpr int64_t kMostBytes = int64_t{8} << 30;  // of one product's operands and partials

// One product on the device: operands, outputs, what is right.
struct Trial {
  Backend& backend;
  cudaStream_t stream;
  DecomposeKShape shape;
  cuda::DecomposeKRows rows;
  bool over_rows = false;
  Tensor a, b, out, partials;
  std::vector<double> want;

  Trial(Backend& device, const TuneProduct& product, int64_t m) : backend(device), stream(cuda::StreamOf(device)) {
    const bool bf16 = product.dtype == PlanDType::kBf16, b_rows = product.layout == PlanLayout::kBRows;
    const int64_t n = product.n, k = product.k;
    const DType dtype = bf16 ? DType::kBF16 : DType::kF32;
    BufferPool& pool = backend.pool();
    a = Tensor::Empty(pool, dtype, {m, k});
    b = Tensor::Empty(pool, dtype, {k, n});
    out = Tensor::Empty(pool, DType::kF32, {m, n});
    partials = Tensor::Empty(pool, DType::kF32, {cuda::kMostSlices, m, n});
    cuda::LaunchRandom(a.raw(), bf16, m * k, 1.0f, 1, stream);
    cuda::LaunchRandom(b.raw(), bf16, k * n, 2.0f / std::sqrt(static_cast<float>(k)), 2, stream);
    shape.a = {a.raw(), bf16, k, 1};
    shape.b = b_rows ? cuda::Operand{b.raw(), bf16, 1, n} : cuda::Operand{b.raw(), bf16, k, 1};
    shape.m = m;
    shape.n = n;
    shape.k = k;
    shape.out = out.f32();
    over_rows = product.epilogue == PlanEpilogue::kRow;
    rows.op = cuda::RowOp::kSoftmax;
    const Tensor exact = Tensor::Empty(pool, DType::kI64, {m, n});  // fp64 has the size of i64
    cuda::LaunchReferenceProduct(shape, static_cast<double*>(exact.raw()), stream);
    want.resize(static_cast<size_t>(m * n));
    backend.Download(exact, want.data());
    if (over_rows) {
      for (int64_t i = 0; i < m; ++i) Softmax(&want[static_cast<size_t>(i * n)], n);
    }
  }

  static void Softmax(double* x, int64_t n) {
    const double largest = *std::max_element(x, x + n);
    double sum = 0.0;
    for (int64_t j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] - largest);
    for (int64_t j = 0; j < n; ++j) x[j] /= sum;
  }

  void Run(const DecomposeKPlan& plan) {
    if (plan.way == DecomposeKWay::kLibrary) cuda::ProductByLibrary(backend, shape, partials.f32());
    cuda::LaunchDecomposeK(shape, plan, over_rows ? &rows : nullptr, partials.f32(), stream);
  }

  double Error(const DecomposeKPlan& plan) {
    STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(out.raw(), 0xff, static_cast<size_t>(out.bytes()), stream));  // NaN
    Run(plan);
    std::vector<float> got(want.size());
    backend.Download(out, got.data());
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    return std::sqrt(difference / norm);
  }

  double Time(const DecomposeKPlan& plan, int each, int replays) {
    return cuda::MicrosecondsInGraph(stream, each, replays, [&] { Run(plan); });
  }
};

std::string Words(const TuneProduct& product, RowBucket bucket, int64_t m) {
  return StrCat(m, " x ", product.n, ", K ", product.k);
}

}  // namespace

absl::StatusOr<PlanBook> TunePlans(int device, const std::vector<TuneProduct>& products,
                                   const std::function<void(const std::string&)>& report) {
  CudaBackendOptions options;
  options.device = device;
  auto backend = MakeCudaBackend(options);
  if (!backend.ok()) return backend.status();
  const int multiprocessors = cuda::DeviceOf(**backend).multiprocessors();
  PlanBook book;
  for (const TuneProduct& product : products) {
    for (RowBucket bucket : product.rows) {
      const int64_t m = RowsOf(bucket), n = product.n, k = product.k;
      const double bytes = 4.0 * (static_cast<double>(m) * k + static_cast<double>(k) * n +
                                  (cuda::kMostSlices + 4.0) * static_cast<double>(m) * n);
      if (bytes > static_cast<double>(kMostBytes)) {
        return absl::ResourceExhaustedError(
            StrCat(Words(product, bucket, m), " is too large to be tuned: leave it out"));
      }
      Trial trial(**backend, product, m);
      std::vector<std::pair<double, DecomposeKPlan>> timed;
      for (const DecomposeKPlan& plan : cuda::DecomposeKCandidates(trial.shape, multiprocessors, trial.over_rows)) {
        const double error = trial.Error(plan);
        const DecomposeKKey key = cuda::KeyOf(**backend, trial.shape, trial.over_rows);
        if (!(error <= kWrong)) {
          return absl::InternalError(
              StrCat("wrong result (relative error ", error, ") of ", PlanBook::PrintLine(key, {plan, 0.0})));
        }
        if (error <= kTolerance) timed.emplace_back(trial.Time(plan, 10, 5), plan);
      }
      std::sort(timed.begin(), timed.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
      // The first ones again, longer: what lies within the noise of a short look is told apart.
      if (timed.size() > 4) timed.resize(4);
      for (auto& [time, plan] : timed) time = trial.Time(plan, 30, 15);
      const auto best =
          std::min_element(timed.begin(), timed.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
      if (best == timed.end()) continue;
      const DecomposeKKey key = cuda::KeyOf(**backend, trial.shape, trial.over_rows);
      book.Add(key, {best->second, best->first});
      report(PlanBook::PrintLine(key, {best->second, best->first}));
    }
  }
  return book;
}

}  // namespace stillhouse
