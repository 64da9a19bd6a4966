// What the GPU benchmarks share: times of graph replays, random device arrays, and a result file.
#ifndef STILLHOUSE_TESTS_BENCH_GPU_BENCH_H_
#define STILLHOUSE_TESTS_BENCH_GPU_BENCH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/graph_timer.h"

namespace stillhouse::bench {

// Device memory of a benchmark; never freed before its end.
template <typename T>
T* DeviceArray(int64_t count) {
  void* data = nullptr;
  STILLHOUSE_CUDA_CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)));
  return static_cast<T*>(data);
}

using cuda::MicrosecondsInGraph;

// One line of a result file; microseconds. A floor or goal of 0 is left out.
struct ResultRow {
  std::string name;
  double ours = 0.0, peer = 0.0;
  std::string peer_name;
  double floor = 0.0, goal = 0.0;
  std::string how;
};

inline void WriteResults(const char* path, const char* commit, const std::string& command,
                         const std::vector<ResultRow>& rows) {
  std::FILE* out = std::fopen(path, "w");
  STILLHOUSE_CHECK(out != nullptr) << path;
  cudaDeviceProp properties;
  STILLHOUSE_CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
  std::fprintf(out, "{\n \"commit\": \"%s\",\n \"date\": \"%s\",\n \"machine\": \"%s\",\n \"command\": \"%s\",\n",
               commit, date, properties.name, command.c_str());
  std::fprintf(out, " \"rows\": [\n");
  for (size_t i = 0; i < rows.size(); ++i) {
    const ResultRow& r = rows[i];
    std::fprintf(out, "  {\"name\": \"%s\", \"ours\": %.3f, ", r.name.c_str(), r.ours);
    if (r.peer > 0.0) {
      std::fprintf(out, "\"peer\": %.3f, \"peer_name\": \"%s\", \"ratio\": %.3f, ", r.peer, r.peer_name.c_str(),
                   r.peer / r.ours);
    }
    if (r.floor > 0.0) std::fprintf(out, "\"floor\": %.3f, ", r.floor);
    if (r.goal > 0.0) std::fprintf(out, "\"goal\": %.3f, \"met\": %s, ", r.goal, r.ours <= r.goal ? "true" : "false");
    std::fprintf(out, "\"unit\": \"us\", \"how\": \"%s\"}%s\n", r.how.c_str(), i + 1 < rows.size() ? "," : "");
    std::printf("%-44s ours %9.2f  peer %9.2f (%s)  floor %8.2f  goal %8.2f  %s\n", r.name.c_str(), r.ours, r.peer,
                r.peer_name.c_str(), r.floor, r.goal, r.how.c_str());
  }
  std::fprintf(out, " ]\n}\n");
  std::fclose(out);
}

}  // namespace stillhouse::bench

#endif  // STILLHOUSE_TESTS_BENCH_GPU_BENCH_H_
