// Times of work on a stream, as replays of a CUDA graph: what is measured is the work, not its launches from the host.
#ifndef STILLHOUSE_KERNELS_CUDA_GRAPH_TIMER_H_
#define STILLHOUSE_KERNELS_CUDA_GRAPH_TIMER_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {

// Median microseconds of one `work`, which enqueues on the stream and does not wait: graphs of `each` of them are
// replayed.
inline double MicrosecondsInGraph(cudaStream_t stream, int each, int replays, const std::function<void()>& work) {
  work();
  STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  STILLHOUSE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < each; ++i) work();
  STILLHOUSE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  STILLHOUSE_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  STILLHOUSE_CUDA_CHECK(cudaEventCreate(&begin));
  STILLHOUSE_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = -3; i < replays; ++i) {
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(begin, stream));
    STILLHOUSE_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(end, stream));
    STILLHOUSE_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0.0f;
    STILLHOUSE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(1e3 * static_cast<double>(ms) / each);
  }
  STILLHOUSE_CUDA_CHECK(cudaEventDestroy(begin));
  STILLHOUSE_CUDA_CHECK(cudaEventDestroy(end));
  STILLHOUSE_CUDA_CHECK(cudaGraphExecDestroy(exec));
  STILLHOUSE_CUDA_CHECK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_GRAPH_TIMER_H_
