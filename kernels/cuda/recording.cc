#include "kernels/cuda/recording.h"

#include <utility>

#include "kernels/base/trace.h"
#include "kernels/cuda/cuda_check.h"

namespace stillhouse::cuda {
namespace {

class Graph final : public RecordedWork {
 public:
  explicit Graph(Device& device) : device_(device) {}

  ~Graph() override {
    const cudaStream_t stream = device_.Use();
    STILLHOUSE_CUDA_CHECK(cudaStreamSynchronize(stream));  // it may still run
    if (graph_) STILLHOUSE_CUDA_CHECK(cudaGraphExecDestroy(graph_));
  }

  // False where the device had no memory for what would be recorded.
  bool Make(BufferPool& pool, const std::function<void()>& work) {
    const cudaStream_t stream = device_.Use();
    Recording recording;
    recording.device = &device_;
    recording.pool = &pool;
    const size_t overflowed = pool.overflowed_bytes();
    {
      // The first time for real: kernels are loaded, cuBLAS is made, and the pool gets its blocks, none of which may
      // happen while a stream captures.
      recording.stream = stream;
      const RecordingScope scope(&recording);
      work();
    }
    recording.constants.clear();
    // Host memory goes back when the work ends, and no recording may name it.
    if (pool.overflowed_bytes() > overflowed) return false;
    // A stream of its own, so that what other threads ask of the device meanwhile is not recorded.
    cudaStream_t capture = nullptr;
    STILLHOUSE_CUDA_CHECK(cudaStreamCreateWithFlags(&capture, cudaStreamNonBlocking));
    recording.stream = capture;
    cudaGraph_t graph = nullptr;
    STILLHOUSE_CUDA_CHECK(cudaStreamBeginCapture(capture, cudaStreamCaptureModeRelaxed));
    {
      const RecordingScope scope(&recording);
      work();
    }
    STILLHOUSE_CUDA_CHECK(cudaStreamEndCapture(capture, &graph));
    STILLHOUSE_CUDA_CHECK(cudaGraphInstantiate(&graph_, graph, 0));
    STILLHOUSE_CUDA_CHECK(cudaGraphDestroy(graph));
    STILLHOUSE_CUDA_CHECK(cudaStreamDestroy(capture));
    STILLHOUSE_CUDA_CHECK(cudaGraphUpload(graph_, stream));
    constants_ = std::move(recording.constants);
    return true;
  }

  void Run() override { STILLHOUSE_CUDA_CHECK(cudaGraphLaunch(graph_, device_.Use())); }

 private:
  Device& device_;
  std::vector<std::shared_ptr<Buffer>> constants_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace

std::unique_ptr<RecordedWork> RecordWork(Device& device, BufferPool& pool, const std::function<void()>& work) {
  const Span span("record");
  auto graph = std::make_unique<Graph>(device);
  if (!graph->Make(pool, work)) return nullptr;
  return graph;
}

}  // namespace stillhouse::cuda
