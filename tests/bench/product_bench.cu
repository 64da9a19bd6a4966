// Products of few and of tens of rows with bf16 weights beside cuBLAS, and a layer's four in a row as a decode step
// runs them, all in graphs over weights that no cache holds. Each is checked against sums in fp64 first. product_bench
// RESULT.json COMMIT [sweep]
#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cmath>
#include <cstring>

#include "kernels/cuda/skinny_launch.h"
#include "kernels/cuda/wide_product_launch.h"
#include "tests/bench/gpu_bench.h"

namespace stillhouse::bench {
namespace {

using cuda::SkinnyParams;
using cuda::SkinnySchedule;
using Bf16 = __nv_bfloat16;

constexpr double kBandwidth = 4.0e12;  // bytes a second: what floors are made of

void CheckCublas(cublasStatus_t status) {
  STILLHOUSE_CHECK(status == CUBLAS_STATUS_SUCCESS) << static_cast<int>(status);
}

__global__ void Fill(Bf16* x, int64_t count, float scale, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t h = (static_cast<uint64_t>(i) + (static_cast<uint64_t>(seed) << 40)) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9ull;
    h ^= h >> 32;
    x[i] = __float2bfloat16(scale * (static_cast<float>(h & 0xffffff) / 8388608.0f - 1.0f));
  }
}

// Adds up |y − Σ x·w|² and |Σ x·w|² of all elements: a warp takes one. y is in slices.
__global__ void Errors(const Bf16* x, const Bf16* w, const float* y, int slices, int m, int64_t n, int k,
                       double* sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (at >= m * n) return;
  const int64_t r = at / n, c = at % n;
  double sum = 0.0;
  for (int i = lane; i < k; i += 32) {
    sum += static_cast<double>(__bfloat162float(x[r * k + i])) * static_cast<double>(__bfloat162float(w[c * k + i]));
  }
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (lane != 0) return;
  double difference = -sum;
  for (int s = 0; s < slices; ++s) difference += static_cast<double>(y[s * m * n + at]);
  atomicAdd(&sums[0], difference * difference);
  atomicAdd(&sums[1], sum * sum);
}

struct Layer {
  const char* name;
  int64_t width, qkv, attended, ffn;
  int layers;
  int64_t vocabulary;
};

class Bench {
 public:
  explicit Bench(bool sweep) : sweep_(sweep) {
    STILLHOUSE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CheckCublas(cublasCreate(&cublas_));
    CheckCublas(cublasSetStream(cublas_, stream_));
    CheckCublas(cublasSetWorkspace(cublas_, DeviceArray<char>(64 << 20), 64 << 20));
    weights_ = DeviceArray<Bf16>(kWeights);
    Fill<<<4096, 256>>>(weights_, kWeights, 0.02f, 1);
    rows_ = DeviceArray<Bf16>(kRows);
    Fill<<<512, 256>>>(rows_, kRows, 1.0f, 2);
    out_ = DeviceArray<float>(kOut);
    bf16_ = DeviceArray<Bf16>(kRows);
    scaled_ = DeviceArray<Bf16>(kRows);
    squares_ = DeviceArray<float>(kRows);
    norm_ = DeviceArray<float>(1 << 16);
    partials_ = DeviceArray<char>(132 * cuda::kSkinnyPartials);
    STILLHOUSE_CUDA_CHECK(cudaMemset(norm_, 0, 4 << 16));
    STILLHOUSE_CUDA_CHECK(cudaMemset(squares_, 0, kRows * 4));
    STILLHOUSE_CUDA_CHECK(cudaMemset(partials_, 0xff, 132 * cuda::kSkinnyPartials));
    errors_ = DeviceArray<double>(2);
    STILLHOUSE_CUDA_CHECK(cudaDeviceSynchronize());
  }

  void Product(int m, int64_t n, int64_t k) {
    SkinnyParams p = Params(m, n, k);
    p.out = out_;
    p.out_stride = n;
    const SkinnySchedule chosen = cuda::ScheduleSkinny(p);
    Check(m, n, k, 1, [&] { cuda::LaunchSkinny(p, chosen, stream_); });
    const auto time = [&](const SkinnySchedule& s) {
      return Time(n * k, [&](const Bf16* weight) {
        p.weight = weight;
        cuda::LaunchSkinny(p, s, stream_);
      });
    };
    const std::string name = Name(m, n, k);
    Add({name, time(chosen), Library(m, n, k), "cuBLAS", Floor(n, k), 0.0, Words(chosen)});
    if (!sweep_ || chosen.small) return;
    for (const int stages : {2, 3, 4, 5, 8}) {
      SkinnySchedule schedule = chosen;
      schedule.stages = stages;
      std::printf("  %-32s %-40s %8.2f us\n", name.c_str(), Words(schedule).c_str(), time(schedule));
    }
  }

  // Of tens of rows, in slices that are left to what follows.
  void Wide(int m, int64_t n, int64_t k, int tile_n, int splits) {
    const DecomposeKPlan plan{DecomposeKWay::kWide, 64, tile_n, splits};
    cuda::DecomposeKShape s;
    s.a = {rows_, true, k, 1};
    s.b = {weights_, true, k, 1};
    s.m = m;
    s.n = n;
    s.k = k;
    s.constant_b = true;
    Check(m, n, k, splits, [&] { cuda::LaunchWide(s, plan, out_, stream_); });
    const double ours = Time(n * k, [&](const Bf16* weight) {
      s.b.data = weight;
      cuda::LaunchWide(s, plan, out_, stream_);
    });
    Add({Name(m, n, k), ours, Library(m, n, k), "cuBLAS", Floor(n, k), 0.0,
         "tiles of 64x" + std::to_string(tile_n) + ", " + std::to_string(splits) + " slices"});
  }

  // Four products of each layer and nothing between them: microseconds a layer.
  void Chain(const Layer& layer, int m) {
    const int64_t sizes[4] = {layer.qkv * layer.width, layer.width * layer.attended, 2 * layer.ffn * layer.width,
                              layer.width * layer.ffn};
    const auto run = [&](int stages, int count) {
      int64_t at = 0;
      const auto launch = [&](SkinnyParams p, int which) {
        if (at + sizes[which] > kWeights) at = 0;
        p.weight = weights_ + at;
        at += (sizes[which] + 7) / 8 * 8;
        SkinnySchedule s = cuda::ScheduleSkinny(p);
        if (stages > 0 && s.stages > stages) s.stages = stages;
        cuda::LaunchSkinny(p, s, stream_);
      };
      for (int l = 0; l < count; ++l) {
        SkinnyParams p = Params(m, layer.qkv, layer.width);
        p.squares = squares_;
        p.parts = static_cast<int>(layer.width / 64);
        p.out = out_;
        p.out_stride = p.n;
        launch(p, 0);
        p = Params(m, layer.width, layer.attended);
        p.out = out_;
        p.out_stride = p.n;
        p.add = true;
        p.next_norm = norm_;
        p.scaled = scaled_;
        p.squares_out = squares_;
        const int parts = cuda::ScheduleSkinny(p).tiles;
        launch(p, 1);
        p = Params(m, 2 * layer.ffn, layer.width);
        p.x = scaled_;
        p.squares = squares_;
        p.parts = parts;
        p.glu = bf16_;
        launch(p, 2);
        p = Params(m, layer.width, layer.ffn);
        p.x = bf16_;
        p.out = out_;
        p.out_stride = p.n;
        p.add = true;
        p.next_norm = norm_;
        p.scaled = scaled_;
        p.squares_out = squares_;
        launch(p, 3);
      }
    };
    const int count = layer.layers;
    const double bytes = 2.0 * static_cast<double>(sizes[0] + sizes[1] + sizes[2] + sizes[3]);
    const std::string name = std::string(layer.name) + ", four products of a layer, " + std::to_string(m) + " rows";
    const double best = MicrosecondsInGraph(stream_, 1, 5, [&] { run(0, count); }) / count;
    Add({name, best, 0.0, "", 1e6 * bytes / kBandwidth, 0.0,
         std::to_string(bytes / best / 1e6).substr(0, 5) + " TB/s"});
    if (!sweep_) return;
    for (const int stages : {3, 4}) {
      const double t = MicrosecondsInGraph(stream_, 1, 5, [&] { run(stages, count); }) / count;
      std::printf("  %-56s stages %2d %8.2f us %6.3f TB/s\n", name.c_str(), stages, t, bytes / t / 1e6);
    }
  }

  const std::vector<ResultRow>& results() const { return results_; }

 private:
  void Add(ResultRow row) {
    std::printf("  %-56s %9.2f us, peer %9.2f, floor %8.2f  %s\n", row.name.c_str(), row.ours, row.peer, row.floor,
                row.how.c_str());
    results_.push_back(std::move(row));
  }

  static std::string Name(int m, int64_t n, int64_t k) {
    return std::to_string(m) + " rows, " + std::to_string(k) + " to " + std::to_string(n);
  }
  static double Floor(int64_t n, int64_t k) { return 1e6 * static_cast<double>(n * k * 2) / kBandwidth; }

  double Library(int m, int64_t n, int64_t k) {
    return Time(n * k, [&](const Bf16* weight) {
      const float one = 1.0f, zero = 0.0f;
      CheckCublas(cublasGemmEx(cublas_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n), m, static_cast<int>(k), &one,
                               weight, CUDA_R_16BF, static_cast<int>(k), rows_, CUDA_R_16BF, static_cast<int>(k), &zero,
                               out_, CUDA_R_32F, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    });
  }

  static constexpr int64_t kWeights = int64_t{3} << 29, kRows = int64_t{4} << 20, kOut = int64_t{16} << 20;

  SkinnyParams Params(int m, int64_t n, int64_t k) const {
    SkinnyParams p;
    p.weight = weights_;
    p.n = n;
    p.k = k;
    p.x = rows_;
    p.x_stride = k;
    p.m = m;
    p.eps = 1e-5f;
    p.partials = partials_;
    return p;
  }

  static std::string Words(const SkinnySchedule& s) {
    return std::to_string(s.blocks) + " blocks, " + std::to_string(s.stages) + " stages" +
           (s.small   ? ", small"
            : s.whole ? ", whole tiles"
                      : "");
  }

  // rows_ times weights_, which `launch` leaves in slices in out_.
  template <typename Launch>
  void Check(int m, int64_t n, int64_t k, int slices, const Launch& launch) {
    const size_t elements = static_cast<size_t>(m) * static_cast<size_t>(n), count = elements * slices;
    std::vector<float> first(count), again(count);
    for (std::vector<float>* to : {&first, &again}) {
      STILLHOUSE_CUDA_CHECK(cudaMemset(out_, 0xff, count * 4));
      STILLHOUSE_CUDA_CHECK(cudaDeviceSynchronize());
      launch();
      STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream_));
      STILLHOUSE_CUDA_CHECK(cudaMemcpy(to->data(), out_, count * 4, cudaMemcpyDeviceToHost));
    }
    STILLHOUSE_CHECK(std::memcmp(first.data(), again.data(), count * 4) == 0) << "other bits";
    STILLHOUSE_CUDA_CHECK(cudaMemset(errors_, 0, 16));
    Errors<<<static_cast<unsigned>((elements + 7) / 8), 256>>>(rows_, weights_, out_, slices, m, n, static_cast<int>(k),
                                                               errors_);
    double sums[2];
    STILLHOUSE_CUDA_CHECK(cudaMemcpy(sums, errors_, 16, cudaMemcpyDeviceToHost));
    const double error = std::sqrt(sums[0] / sums[1]);
    if (!(error < 1e-5)) std::printf("%d rows, %ld to %ld: error %g\n", m, k, n, error);
    STILLHOUSE_CHECK(error < 1e-5) << error;
  }

  template <typename Launch>
  double Time(int64_t size, const Launch& launch) {
    const int64_t places = std::max<int64_t>(1, std::min<int64_t>(30, kWeights / size));
    return MicrosecondsInGraph(stream_, 1, 7,
                               [&] {
                                 for (int64_t i = 0; i < 2 * places; ++i) {
                                   launch(weights_ + i % places * (kWeights / places / 8 * 8));
                                 }
                               }) /
           static_cast<double>(2 * places);
  }

  bool sweep_;
  cudaStream_t stream_;
  cublasHandle_t cublas_;
  Bf16 *weights_, *rows_, *bf16_, *scaled_;
  float *out_, *squares_, *norm_;
  void* partials_;
  double* errors_;
  std::vector<ResultRow> results_;
};

void Main(const char* path, const char* commit, bool sweep) {
  Bench bench(sweep);
  const Layer llama{"llama-3.1-8b", 4096, 6144, 4096, 14336, 32, 128256};
  const Layer small{"smollm2-135m", 576, 960, 576, 1536, 30, 49152};
  for (const Layer& layer : {llama, small}) {
    for (const int m : {1, 8, 16}) {
      if (layer.width > 1024 || m == 1 || m == 16) {
        bench.Product(m, layer.qkv, layer.width);
        bench.Product(m, layer.width, layer.attended);
        bench.Product(m, 2 * layer.ffn, layer.width);
        bench.Product(m, layer.width, layer.ffn);
      }
      if (m == 1) bench.Product(m, layer.vocabulary, layer.width);
      bench.Chain(layer, m);
    }
  }
  for (const int m : {32, 64, 128}) {
    bench.Wide(m, llama.qkv, llama.width, 96, 2);
    bench.Wide(m, llama.width, llama.attended, 128, 4);
    bench.Wide(m, llama.width, llama.ffn, 128, 4);
  }
  WriteResults(path, commit, "product_bench", bench.results());
}

}  // namespace
}  // namespace stillhouse::bench

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  stillhouse::bench::Main(argc > 1 ? argv[1] : "/dev/null", argc > 2 ? argv[2] : "", argc > 3);
  return 0;
}
