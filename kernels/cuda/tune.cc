#include "kernels/plan/tune.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/base/strings.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/cuda/fused_launch.h"
#include "kernels/cuda/graph_timer.h"
#include "kernels/cuda/skinny_launch.h"
#include "kernels/cuda/tune_launch.h"
#include "kernels/ops/decompose_k.h"
#include "kernels/ops/matmul.h"

namespace stillhouse {
namespace {

// fp32 sums of exact products, relative to the norm of the fp64 product: what is good enough to be kept, and what can
// only be an error in a kernel. Gates are rounded to bf16.
constexpr double kTolerance = 2e-5, kWrong = 1e-3, kOfBf16 = 8e-3;
constexpr int64_t kMostBytes = int64_t{8} << 30;  // of one product's operands and partials
// Weights of a decode step come from memory: as many are read in turn as the L2 cache does not hold.
constexpr int64_t kWeightBytes = int64_t{128} << 20;
// What a product runs by without a plan is kept where nothing is faster than this much of its time: a plan holds for
// more rows than those that were timed.
constexpr double kWorthwhile = 0.97;
constexpr int64_t kMostChecked = 1 << 16;  // elements
constexpr int64_t kHeadWidth = 64;

// One product on the device, run as its op runs it: operands, outputs, what is right.
class Trial {
 public:
  Trial(Backend& backend, const TuneProduct& product, int64_t m)
      : backend_(backend), ctx_{&backend}, epilogue_(product.epilogue), m_(m), n_(product.n), k_(product.k) {
    const bool bf16 = product.dtype == PlanDType::kBf16;
    const DType dtype = bf16 ? DType::kBF16 : DType::kF32;
    copies_ = IsLinear(epilogue_) ? std::max<int64_t>(1, kWeightBytes / RowBytes(dtype, n_ * k_)) : 1;
    x_ = ctx_.Empty(dtype, {m_, k_});
    const bool b_rows = product.layout == PlanLayout::kBRows;
    weights_ = ctx_.Empty(dtype, b_rows ? Shape{k_, n_} : Shape{copies_ * n_, k_});
    cuda::LaunchRandom(x_.raw(), bf16, m_ * k_, 1.0f, 1, stream());
    cuda::LaunchRandom(weights_.raw(), bf16, weights_.elements(), 2.0f / std::sqrt(static_cast<float>(k_)), 2,
                       stream());
    const Tensor b = b_rows ? weights_ : Weight(0).Transpose(0, 1);
    shape_.a = {x_.raw(), bf16, k_, 1};
    shape_.b = {b.raw(), bf16, b.stride(1), b.stride(0)};
    shape_.m = m_;
    shape_.n = n_;
    shape_.k = k_;
    shape_.constant_b = IsLinear(epilogue_);
    if (IsLinear(epilogue_) && epilogue_ != PlanEpilogue::kNone && epilogue_ != PlanEpilogue::kScaledRows) MakeNormed();
    if (epilogue_ == PlanEpilogue::kTurn) {
      std::vector<float> angles(static_cast<size_t>(m_ * kHeadWidth), 0.0f);  // none: cos 1, sin 0
      for (size_t i = 0; i < angles.size(); ++i) angles[i] = i % kHeadWidth < kHeadWidth / 2 ? 1.0f : 0.0f;
      angles_ = ctx_.Floats(angles, {m_, kHeadWidth});
    }
    if (epilogue_ == PlanEpilogue::kScaledRows) norm_ = Ones(n_);
    out_ = epilogue_ == PlanEpilogue::kGlu ? ctx_.Empty(DType::kBF16, {m_, n_ / 2}) : ctx_.EmptyF32({m_, n_});
    const int64_t elements = out_.elements();
    step_ = epilogue_ == PlanEpilogue::kRow ? 1 : elements / kMostChecked | 1;
    checked_ = (elements + step_ - 1) / step_;
    MakeWanted();
    cuda::DeviceOf(backend_).plans() = PlanTable();
    if (IsLinear(epilogue_)) own_ = cuda::WayOfLinear(backend_, shape_, epilogue_);
  }

  std::vector<DecomposeKPlan> Candidates() const {
    std::vector<DecomposeKPlan> plans =
        cuda::DecomposeKCandidates(shape_, cuda::DeviceOf(backend_).multiprocessors(), epilogue_ == PlanEpilogue::kRow);
    if (IsLinear(epilogue_) && m_ <= cuda::kSkinnyRows && k_ % 8 == 0) plans.push_back({DecomposeKWay::kSkinny});
    return plans;
  }

  // Linear's, without a plan.
  bool IsOwn(const DecomposeKPlan& plan) const { return IsLinear(epilogue_) && plan == own_; }

  DecomposeKKey key() const {
    DecomposeKKey key = cuda::KeyOf(shape_, epilogue_);
    key.gpu = cuda::DeviceOf(backend_).name();
    return key;
  }
  double tolerance() const { return epilogue_ == PlanEpilogue::kGlu ? kOfBf16 : kTolerance; }
  double wrong() const { return std::max(tolerance(), kWrong); }

  double Error(const DecomposeKPlan& plan) {
    // What is added to is zero; everything else is NaN.
    const int fill = epilogue_ == PlanEpilogue::kScaledRows ? 0 : 0xff;
    STILLHOUSE_CUDA_CHECK(cudaMemsetAsync(out_.raw(), fill, static_cast<size_t>(out_.bytes()), stream()));
    Use(plan);
    next_ = 0;
    Run();
    const Tensor sums = ctx_.Empty(DType::kI64, {cuda::kErrorSums});
    cuda::LaunchErrors(wanted_.data<double>(), out_.raw(), out_.dtype() == DType::kBF16, step_, checked_,
                       static_cast<double*>(sums.raw()), stream());
    std::vector<double> host(cuda::kErrorSums);
    backend_.Download(sums, host.data());
    double difference = 0.0, norm = 0.0;
    for (size_t i = 0; i < host.size(); i += 2) {
      difference += host[i];
      norm += host[i + 1];
    }
    return std::sqrt(difference / norm);
  }

  // Of a graph of so many launches, where they do not have to be as many as there are weights.
  double Time(const DecomposeKPlan& plan, int64_t each, int replays) {
    Use(plan);
    next_ = 0;
    if (IsLinear(epilogue_)) each = std::max<int64_t>(copies_, 4);
    return cuda::MicrosecondsInGraph(stream(), static_cast<int>(each), replays, [&] { Run(); });
  }

 private:
  cudaStream_t stream() const { return cuda::StreamOf(backend_); }
  Tensor Weight(int64_t i) const { return weights_.Slice(0, i * n_, (i + 1) * n_); }
  Tensor Ones(int64_t count) const {
    return ctx_.Floats(std::vector<float>(static_cast<size_t>(count), 1.0f), {count});
  }

  // Rows of ones with random signs: their norm is 1, so that what is normalised before or after the product is the
  // same.
  void MakeNormed() {
    std::vector<uint16_t> bits(static_cast<size_t>(m_ * k_));
    std::vector<float> values(bits.size());
    uint64_t state = 1;
    for (size_t i = 0; i < bits.size(); ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const bool minus = state >> 63 != 0;
      bits[i] = minus ? 0xbf80 : 0x3f80;
      values[i] = minus ? -1.0f : 1.0f;
    }
    backend_.Upload(bits.data(), x_);
    residual_ = ctx_.Floats(values, {m_, k_});
    norm_ = Ones(k_);
    const int64_t parts = (k_ + 63) / 64;
    const std::vector<float> squares(static_cast<size_t>(m_ * parts),
                                     static_cast<float>(k_) / static_cast<float>(parts));
    scaled_ = {x_, ctx_.Floats(squares, {m_, parts})};
  }

  std::vector<double> Product(const cuda::DecomposeKShape& shape) const {
    const Tensor exact = ctx_.Empty(DType::kI64, {checked_});  // fp64 has the size of i64
    cuda::LaunchReferenceProduct(shape, step_, checked_, static_cast<double*>(exact.raw()), stream());
    std::vector<double> values(static_cast<size_t>(checked_));
    backend_.Download(exact, values.data());
    return values;
  }

  void MakeWanted() {
    cuda::DecomposeKShape shape = shape_;
    if (epilogue_ == PlanEpilogue::kGlu) shape.n = n_ / 2;
    std::vector<double> want = Product(shape);
    if (epilogue_ == PlanEpilogue::kGlu) {
      shape.b.data = Weight(0).Slice(0, n_ / 2, n_).raw();
      const std::vector<double> up = Product(shape);
      for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] / (1.0 + std::exp(-want[i])) * up[i];
    } else if (epilogue_ == PlanEpilogue::kRow) {
      for (int64_t i = 0; i < m_; ++i) Softmax(&want[static_cast<size_t>(i * n_)], n_);
    }
    wanted_ = ctx_.Empty(DType::kI64, {checked_});
    backend_.Upload(want.data(), wanted_);
  }

  static void Softmax(double* x, int64_t n) {
    const double largest = *std::max_element(x, x + n);
    double sum = 0.0;
    for (int64_t j = 0; j < n; ++j) sum += x[j] = std::exp(x[j] - largest);
    for (int64_t j = 0; j < n; ++j) x[j] /= sum;
  }

  void Use(const DecomposeKPlan& plan) { cuda::DeviceOf(backend_).plans().Put(cuda::KeyOf(shape_, epilogue_), plan); }

  void Run() {
    const FusedKernels& fused = backend_.fused();
    const Tensor weight = IsLinear(epilogue_) ? Weight(next_++ % copies_) : Tensor();
    switch (epilogue_) {
      case PlanEpilogue::kElement:
      case PlanEpilogue::kRow: {
        DecomposeKArgs args{x_, shape_.b.stride_outer == 1 ? weights_ : weights_.Transpose(0, 1)};
        args.out = out_;
        if (epilogue_ == PlanEpilogue::kRow) args.options.epilogue = Epilogue::kSoftmax;
        return cuda::DecomposeK(backend_, args);
      }
      case PlanEpilogue::kNone:
        return cuda::Linear(backend_, {x_, weight, Tensor(), out_});
      case PlanEpilogue::kScaledRows: {
        ScaledRows scaled;
        fused.LinearAdd(backend_, {x_, weight, out_, norm_, 0.0f, &scaled});
        if (scaled.values) return;
        // Then the product that comes next has to make them.
        scaled.values = ctx_.Empty(DType::kBF16, {m_, n_});
        cuda::NormToBf16Params norm{out_.f32(), n_, norm_.f32(), 0.0f, m_, n_, scaled.values.raw()};
        norm.multiprocessors = cuda::DeviceOf(backend_).multiprocessors();
        cuda::LaunchNormToBf16(norm, stream());
        return;
      }
      case PlanEpilogue::kNormed:
        return fused.NormLinear(backend_, {residual_, norm_, weight, out_, 0.0f, scaled_});
      case PlanEpilogue::kGlu:
        return fused.NormSwiGlu(backend_, {residual_, norm_, weight, 0.0f, scaled_, &out_});
      case PlanEpilogue::kTurn: {
        const int64_t heads = n_ / kHeadWidth;
        QkvRopeArgs turn{out_.Reshape({m_, heads, kHeadWidth}), heads - 2, 1};
        turn.angles = angles_;
        return fused.NormQkvRope(backend_, {{residual_, norm_, weight, out_, 0.0f, scaled_}, turn});
      }
    }
  }

  Backend& backend_;
  const Context ctx_;
  const PlanEpilogue epilogue_;
  const int64_t m_, n_, k_;
  int64_t copies_ = 1, next_ = 0;
  cuda::DecomposeKShape shape_;
  Tensor x_, weights_, out_, residual_, norm_, angles_;
  ScaledRows scaled_;
  int64_t step_ = 1, checked_ = 0;
  Tensor wanted_;  // fp64: every step-th element
  DecomposeKPlan own_;
};

bool Faster(const std::pair<double, DecomposeKPlan>& a, const std::pair<double, DecomposeKPlan>& b) {
  return a.first < b.first;
}

}  // namespace

absl::StatusOr<PlanBook> TunePlans(int device, const std::vector<TuneProduct>& products,
                                   const std::function<void(const std::string&)>& report) {
  CudaBackendOptions options;
  options.device = device;
  options.storage = CudaStorage::kBf16;
  auto backend = MakeCudaBackend(options);
  if (!backend.ok()) return backend.status();
  PlanBook book;
  for (const TuneProduct& product : products) {
    for (RowBucket bucket : product.rows) {
      const int64_t m = RowsOf(bucket), n = product.n, k = product.k;
      // With more rows it is Linear.
      if (product.epilogue == PlanEpilogue::kNormed && m > cuda::kSkinnyRows) continue;
      const double bytes = 4.0 * (static_cast<double>(m) * k + static_cast<double>(k) * n +
                                  (cuda::kMostSlices + 4.0) * static_cast<double>(m) * std::min<int64_t>(n, 1024));
      if (bytes > static_cast<double>(kMostBytes)) {
        return absl::ResourceExhaustedError(StrCat(m, " x ", n, ", K ", k, " is too large to be tuned: leave it out"));
      }
      Trial trial(**backend, product, m);
      const DecomposeKKey key = trial.key();
      std::vector<std::pair<double, DecomposeKPlan>> timed;
      for (const DecomposeKPlan& plan : trial.Candidates()) {
        const double error = trial.Error(plan);
        if (!(error <= trial.wrong())) {
          return absl::InternalError(
              StrCat("wrong result (relative error ", error, ") of ", PlanBook::PrintLine(key, {plan, 0.0})));
        }
        if (error <= trial.tolerance()) timed.emplace_back(trial.Time(plan, 10, 3), plan);
      }
      std::sort(timed.begin(), timed.end(), Faster);
      // The first ones again, and what the product runs by without a plan, longer: what lies within the noise of a
      // short look is told apart.
      const auto others =
          std::stable_partition(timed.begin(), timed.end(), [&](const auto& x) { return trial.IsOwn(x.second); });
      const size_t most = 4 + static_cast<size_t>(others - timed.begin());
      if (timed.size() > most) timed.resize(most);
      for (auto& [time, plan] : timed) time = trial.Time(plan, 30, 15);
      auto best = std::min_element(timed.begin(), timed.end(), Faster);
      if (best == timed.end()) continue;
      const auto own = std::find_if(timed.begin(), timed.end(), [&](const auto& x) { return trial.IsOwn(x.second); });
      if (own != timed.end() && best->first > kWorthwhile * own->first) best = own;
      book.Add(key, {best->second, best->first});
      report(PlanBook::PrintLine(key, {best->second, best->first}));
    }
  }
  return book;
}

}  // namespace stillhouse
