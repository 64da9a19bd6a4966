// Scans on the GPU beside CUB and a plain copy, in one run. Results are checked before they are timed.
// scan_bench RESULT.json COMMIT [quick]
#include <cub/device/device_scan.cuh>

#include <cmath>
#include <random>

#include "kernels/cuda/scan_launch.h"
#include "tests/bench/gpu_bench.h"

namespace stillhouse::bench {
namespace {

using cuda::ScanElement;
using cuda::ScanShape;
using cuda::TilePrefix;

// A plain copy, 16 bytes a thread and step. The better of this and the driver's is the floor.
__global__ void CopyKernel(const uint4* from, uint4* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < count; i += step) to[i] = from[i];
}

struct Way {
  const char* name;
  void (*launch)(const ScanShape& shape, void* scratch, cudaStream_t stream);
  bool repeats;  // its bits
  int64_t most;  // elements it is meant for
};
const Way kWays[] = {{"pipeline", cuda::LaunchPipelineScan, true, INT64_MAX},
                     {"tree",
                      [](const ScanShape& s, void* scratch, cudaStream_t stream) {
                        cuda::LaunchSinglePassScan(s, TilePrefix::kTree, scratch, stream);
                      },
                      true, INT64_MAX},
                     {"resident", cuda::LaunchResidentScan, true, 1 << 22},
                     {"totals first", cuda::LaunchTotalsFirstScan, true, 1 << 22},
                     {"look-back window",
                      [](const ScanShape& s, void* scratch, cudaStream_t stream) {
                        cuda::LaunchSinglePassScan(s, TilePrefix::kLookBackWindow, scratch, stream);
                      },
                      false, INT64_MAX}};

// Largest difference to the fp64 sums of the same numbers, relative to the largest sum.
template <typename T>
double Error(const std::vector<T>& in, const T* device_out, bool exclusive, int64_t row) {
  std::vector<T> out(in.size());
  STILLHOUSE_CUDA_CHECK(cudaMemcpy(out.data(), device_out, out.size() * sizeof(T), cudaMemcpyDeviceToHost));
  double worst = 0.0, largest = 1.0;
  long double sum = 0.0L;
  uint64_t whole = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    if (static_cast<int64_t>(i) % row == 0) {
      sum = 0.0L;
      whole = 0;
    }
    if (!exclusive) {
      sum += in[i];
      whole += static_cast<uint64_t>(in[i]);
    }
    if constexpr (std::is_same_v<T, float>) {
      worst = std::max(worst, std::fabs(static_cast<double>(out[i] - static_cast<float>(sum))));
      largest = std::max(largest, std::fabs(static_cast<double>(sum)));
    } else if (out[i] != static_cast<T>(whole)) {
      return 1.0;
    }
    if (exclusive) {
      sum += in[i];
      whole += static_cast<uint64_t>(in[i]);
    }
  }
  return worst / largest;
}

template <typename T>
void Bench(const char* name, ScanElement element, int64_t rows, int64_t n, cudaStream_t stream,
           std::vector<ResultRow>& results) {
  const int64_t count = rows * n;
  std::mt19937 rng(7);
  std::vector<T> host(static_cast<size_t>(count));
  for (T& v : host) v = std::is_same_v<T, float> ? static_cast<T>(rng() * 0x1p-32) : static_cast<T>(rng());
  T* in = DeviceArray<T>(count);
  T* out = DeviceArray<T>(count);
  STILLHOUSE_CUDA_CHECK(cudaMemcpy(in, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  ScanShape shape;
  shape.element = element;
  shape.in = in;
  shape.in_stride = n;
  shape.out = out;
  shape.rows = rows;
  shape.n = n;
  void* scratch = DeviceArray<char>(std::max({cuda::SinglePassScanScratch(shape), cuda::PipelineScanScratch(shape),
                                              cuda::ResidentScanScratch(shape)}) +
                                    16);
  const int each = count <= (1 << 22) ? 50 : 4, replays = count <= (1 << 25) ? 40 : 15;

  size_t cub_bytes = 0;
  cub::DeviceScan::InclusiveSum(nullptr, cub_bytes, in, out, n, stream);
  void* cub_scratch = DeviceArray<char>(static_cast<int64_t>(cub_bytes) + 16);
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  const double copy =
      std::min(MicrosecondsInGraph(stream, each, replays,
                                   [&] {
                                     CopyKernel<<<132 * 8, 512, 0, stream>>>(reinterpret_cast<const uint4*>(in),
                                                                             reinterpret_cast<uint4*>(out), bytes / 16);
                                   }),
               MicrosecondsInGraph(stream, each, replays, [&] {
                 STILLHOUSE_CUDA_CHECK(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream));
               }));
  double peer = 0.0;
  if (rows == 1) {
    peer = MicrosecondsInGraph(stream, each, replays, [&] {
      STILLHOUSE_CUDA_CHECK(cub::DeviceScan::InclusiveSum(cub_scratch, cub_bytes, in, out, n, stream));
    });
  }
  for (const Way& way : kWays) {
    if (count > way.most || (way.launch == cuda::LaunchResidentScan && !cuda::FitsResident(shape))) continue;
    STILLHOUSE_CUDA_CHECK(cudaMemset(out, 0xff, static_cast<size_t>(count) * sizeof(T)));
    STILLHOUSE_CUDA_CHECK(cudaDeviceSynchronize());
    way.launch(shape, scratch, stream);
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
    const double error = Error(host, out, false, n);
    STILLHOUSE_CHECK(error < 1e-5) << name << " " << way.name << ": error " << error;
    ResultRow row;
    row.name = std::string(name) + ", " + way.name;
    row.ours = MicrosecondsInGraph(stream, each, replays, [&] { way.launch(shape, scratch, stream); });
    row.peer = peer;
    row.peer_name = peer > 0.0 ? "cub::DeviceScan" : "";
    row.floor = copy;
    row.goal = std::is_same_v<T, float> && rows == 1 ? (count == int64_t{1} << 28 ? copy / 0.9 : peer) : 0.0;
    row.how = way.repeats ? "the same bits in every run" : "bits differ from run to run";
    results.push_back(row);
  }
  for (void* p : {static_cast<void*>(in), static_cast<void*>(out), scratch, cub_scratch}) {
    STILLHOUSE_CUDA_CHECK(cudaFree(p));
  }
}

void Main(const char* path, const char* commit, bool quick) {
  cudaStream_t stream;
  STILLHOUSE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<ResultRow> results;
  Bench<float>("inclusive fp32, 2^16", ScanElement::kFloat, 1, int64_t{1} << 16, stream, results);
  Bench<float>("inclusive fp32, 2^18", ScanElement::kFloat, 1, int64_t{1} << 18, stream, results);
  Bench<float>("inclusive fp32, 2^20", ScanElement::kFloat, 1, int64_t{1} << 20, stream, results);
  if (quick) {
    Bench<float>("inclusive fp32, 2^24", ScanElement::kFloat, 1, int64_t{1} << 24, stream, results);
    Bench<float>("inclusive fp32, 2^27", ScanElement::kFloat, 1, int64_t{1} << 27, stream, results);
    WriteResults(path, commit, "scan_bench quick", results);
    return;
  }
  Bench<float>("inclusive fp32, 2^21", ScanElement::kFloat, 1, int64_t{1} << 21, stream, results);
  Bench<float>("inclusive fp32, 2^22", ScanElement::kFloat, 1, int64_t{1} << 22, stream, results);
  Bench<float>("inclusive fp32, 2^23", ScanElement::kFloat, 1, int64_t{1} << 23, stream, results);
  Bench<float>("inclusive fp32, 2^24", ScanElement::kFloat, 1, int64_t{1} << 24, stream, results);
  Bench<float>("inclusive fp32, 2^26", ScanElement::kFloat, 1, int64_t{1} << 26, stream, results);
  Bench<float>("inclusive fp32, 2^28", ScanElement::kFloat, 1, int64_t{1} << 28, stream, results);
  Bench<uint32_t>("inclusive int32, 2^26", ScanElement::kInt32, 1, int64_t{1} << 26, stream, results);
  Bench<unsigned long long>("inclusive int64, 2^26", ScanElement::kInt64, 1, int64_t{1} << 26, stream, results);
  Bench<float>("inclusive fp32, 256 rows of 151936", ScanElement::kFloat, 256, 151936, stream, results);
  WriteResults(path, commit, "scan_bench", results);
}

}  // namespace
}  // namespace stillhouse::bench

int main(int argc, char** argv) {
  stillhouse::bench::Main(argc > 1 ? argv[1] : "/dev/null", argc > 2 ? argv[2] : "", argc > 3);
  return 0;
}
