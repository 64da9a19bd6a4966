// Decompose-K with ReLU beside cuBLAS and a ReLU kernel, all in graphs, in one run. Every plan of a sweep is checked
// before it is timed; the best is reported beside the one that is chosen by shape.
// decompose_k_bench RESULT.json COMMIT
#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <cmath>
#include <random>

#include "kernels/cuda/decompose_k_launch.h"
#include "tests/bench/gpu_bench.h"

namespace stillhouse::bench {
namespace {

using cuda::DecomposeKShape;

void CheckCublas(cublasStatus_t status) {
  STILLHOUSE_CHECK(status == CUBLAS_STATUS_SUCCESS) << static_cast<int>(status);
}

__global__ void Relu(__nv_bfloat16* x, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) x[i] = __hmax(x[i], __float2bfloat16(0.0f));
}

struct Bench {
  cudaStream_t stream;
  cublasHandle_t cublas;
  float* exchange;
  std::mt19937 rng{11};

  std::vector<__nv_bfloat16> Random(int64_t count, float scale) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<__nv_bfloat16> values(static_cast<size_t>(count));
    for (auto& v : values) v = __float2bfloat16(normal(rng));
    return values;
  }

  // b_rows: B is row-major [K, N]; otherwise its columns are contiguous (a weight [N, K]). weight: B is constant.
  void Run(const char* name, int64_t m, int64_t n, int64_t k, bool b_rows, bool weight, double floor, double goal,
           std::vector<ResultRow>& results) {
    const auto host_a = Random(m * k, 1.0f), host_b = Random(k * n, 1.0f / std::sqrt(static_cast<float>(k)));
    auto* a = DeviceArray<__nv_bfloat16>(m * k);
    auto* b = DeviceArray<__nv_bfloat16>(k * n);
    auto* c = DeviceArray<__nv_bfloat16>(m * n);
    auto* reference = DeviceArray<float>(m * n);
    auto* out = DeviceArray<float>(m * n);
    auto* partials = DeviceArray<float>(cuda::kMostSlices * m * n);
    STILLHOUSE_CUDA_CHECK(cudaMemcpy(a, host_a.data(), host_a.size() * 2, cudaMemcpyHostToDevice));
    STILLHOUSE_CUDA_CHECK(cudaMemcpy(b, host_b.data(), host_b.size() * 2, cudaMemcpyHostToDevice));
    // Row-major products as column-major ones of the transposed.
    const auto gemm = [&](void* to, cudaDataType_t type) {
      const float one = 1.0f, zero = 0.0f;
      CheckCublas(cublasGemmEx(cublas, b_rows ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n),
                               static_cast<int>(m), static_cast<int>(k), &one, b, CUDA_R_16BF,
                               static_cast<int>(b_rows ? n : k), a, CUDA_R_16BF, static_cast<int>(k), &zero, to, type,
                               static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    };
    gemm(reference, CUDA_R_32F);
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<float> want(static_cast<size_t>(m * n)), got(want.size());
    STILLHOUSE_CUDA_CHECK(cudaMemcpy(want.data(), reference, want.size() * 4, cudaMemcpyDeviceToHost));
    const double peer = MicrosecondsInGraph(stream, 30, 20, [&] {
      gemm(c, CUDA_R_16BF);
      const int count = static_cast<int>(m * n);
      Relu<<<(count + 255) / 256, 256, 0, stream>>>(c, count);
    });

    DecomposeKShape shape;
    shape.a = {a, true, k, 1};
    shape.b = {b, true, b_rows ? 1 : k, b_rows ? n : 1};
    shape.m = m;
    shape.n = n;
    shape.k = k;
    shape.op = cuda::ElementOp::kRelu;
    shape.out = out;
    shape.out_stride = n;
    shape.constant_b = weight;
    const auto time = [&](const DecomposeKPlan& plan) {
      STILLHOUSE_CUDA_CHECK(cudaMemset(out, 0xff, want.size() * 4));
      STILLHOUSE_CUDA_CHECK(cudaDeviceSynchronize());
      const auto work = [&] {
        if (plan.way == DecomposeKWay::kLibrary) gemm(partials, CUDA_R_32F);
        cuda::LaunchDecomposeK(shape, plan, nullptr, plan.way == DecomposeKWay::kExchange ? exchange : partials,
                               stream);
      };
      work();
      STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
      STILLHOUSE_CUDA_CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
      double difference = 0.0, norm = 0.0;
      for (size_t i = 0; i < want.size(); ++i) {
        const double w = std::max(want[i], 0.0f);
        difference += (got[i] - w) * (got[i] - w);
        norm += w * w;
      }
      STILLHOUSE_CHECK(std::sqrt(difference / norm) < 2e-5) << name << ": " << std::sqrt(difference / norm);
      return MicrosecondsInGraph(stream, 30, 20, work);
    };
    const auto words = [](const DecomposeKPlan& p) {
      if (p.way == DecomposeKWay::kLibrary) return std::string("cuBLAS, then the epilogue");
      return std::to_string(p.tile_m) + "x" + std::to_string(p.tile_n) + " tiles, " + std::to_string(p.splits) +
             (p.way == DecomposeKWay::kCluster      ? " in a cluster"
              : p.way == DecomposeKWay::kExchange   ? " slices in one launch"
              : p.way == DecomposeKWay::kWarpgroups ? " slices of warpgroups"
              : p.way == DecomposeKWay::kFragments  ? " slices from memory"
                                                    : " slices through shared memory");
    };
    const auto row_of = [&](const char* what, double t, const DecomposeKPlan& plan) {
      results.push_back({std::string(name) + what, t, peer, "cuBLAS + ReLU", floor, goal, words(plan)});
    };
    DecomposeKPlan best;
    double best_time = 1e9;
    constexpr DecomposeKPlan kLibrary{DecomposeKWay::kLibrary, 16, 16, 1};
    for (const DecomposeKPlan& plan : cuda::DecomposeKCandidates(shape, 132, false)) {
      if (plan.way == DecomposeKWay::kLibrary && plan != kLibrary) continue;  // slices and tiles are the backend's
      const double t = time(plan);
      std::printf("  %-38s %-44s %8.2f us\n", name, words(plan).c_str(), t);
      if (t < best_time) {
        best_time = t;
        best = plan;
      }
    }
    const DecomposeKPlan chosen = cuda::ChooseDecomposeKPlan(shape, 132, false, 0, cuda::DecomposeKCut::kAny);
    row_of("", time(chosen), chosen);
    row_of(", best of the sweep", best_time, best);
    for (void* p : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(c), static_cast<void*>(reference),
                    static_cast<void*>(out), static_cast<void*>(partials)}) {
      STILLHOUSE_CUDA_CHECK(cudaFree(p));
    }
  }
};

void Main(const char* path, const char* commit) {
  Bench bench;
  STILLHOUSE_CUDA_CHECK(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking));
  CheckCublas(cublasCreate(&bench.cublas));
  CheckCublas(cublasSetStream(bench.cublas, bench.stream));
  void* workspace = DeviceArray<char>(64 << 20);
  CheckCublas(cublasSetWorkspace(bench.cublas, workspace, 64 << 20));
  bench.exchange = DeviceArray<float>(cuda::kExchangeBytes / 4);
  STILLHOUSE_CUDA_CHECK(cudaMemset(bench.exchange, 0xff, cuda::kExchangeBytes));
  std::vector<ResultRow> results;
  bench.Run("16x16, K 8192", 16, 16, 8192, true, false, 0.06, 2.5, results);
  bench.Run("16x16, K 32768", 16, 16, 32768, true, false, 0.5, 3.0, results);
  bench.Run("64x64, K 8192", 64, 64, 8192, true, false, 0.0, 3.0, results);
  bench.Run("64x64, K 32768", 64, 64, 32768, true, false, 0.0, 4.0, results);
  for (const bool weight : {false, true}) {
    const std::string how = weight ? ", a weight" : "";
    bench.Run(("router 1x256, K 7168" + how).c_str(), 1, 256, 7168, true, weight, 0.9, 3.5, results);
    bench.Run(("router 64x256, K 7168" + how).c_str(), 64, 256, 7168, true, weight, 0.9, 4.0, results);
    bench.Run(("router 256x256, K 7168" + how).c_str(), 256, 256, 7168, true, weight, 0.9, 5.5, results);
  }
  bench.Run("router 1x256, K 7168, a weight by columns", 1, 256, 7168, false, true, 0.9, 3.5, results);
  bench.Run("64x64, K 32768, B by columns", 64, 64, 32768, false, false, 0.0, 4.0, results);
  WriteResults(path, commit, "decompose_k_bench", results);
}

}  // namespace
}  // namespace stillhouse::bench

int main(int argc, char** argv) {
  stillhouse::bench::Main(argc > 1 ? argv[1] : "/dev/null", argc > 2 ? argv[2] : "");
  return 0;
}
