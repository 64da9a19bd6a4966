// Times attention on the GPU: the kernels inside a CUDA graph, warm, medians of replays. Prints one JSON object per
// case; gpu_attention_peers.py sets them beside cuDNN and FlashAttention. attention_gpu_bench [only cases with this in
// the name]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_check.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/fused.h"
#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

const char* g_only = "";

// A tensor of normal values. Large ones repeat a block of values: what is read is as random, and is made in no time.
Tensor Random(Backend& backend, DType dtype, const Shape& shape) {
  static const std::vector<float> values = [] {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> v((1 << 20) + 7);
    for (float& x : v) x = normal(rng);
    return v;
  }();
  static size_t next = 0;
  Tensor t = Tensor::Empty(backend.pool(), dtype, shape);
  std::vector<char> bytes(static_cast<size_t>(t.bytes()));
  for (int64_t i = 0; i < t.elements(); ++i) {
    const float x = values[next++ % values.size()];
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &x, 4);
    } else {
      std::memcpy(bytes.data() + i * 2, reinterpret_cast<const char*>(&x) + 2, 2);  // towards zero
    }
  }
  backend.Upload(bytes.data(), t);
  return t;
}

// Median seconds of one call. Short ones recorded `calls` at a time, so that no gap between launches counts; long ones
// (one call) as they are.
double Time(Backend& backend, int calls, const std::function<void(int)>& body) {
  auto stream = static_cast<cudaStream_t>(backend.stream());
  for (int i = 0; i < calls; ++i) body(i);
  backend.Synchronize();
  std::unique_ptr<RecordedWork> recorded;
  if (calls > 1) {
    recorded = backend.Record([&] {
      for (int i = 0; i < calls; ++i) body(i);
    });
  }
  cudaEvent_t begin, end;
  STILLHOUSE_CUDA_CHECK(cudaEventCreate(&begin));
  STILLHOUSE_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  float total = 0.0f;
  for (int i = 0; i < 3 || (total < 150.0f && i < 200); ++i) {
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(begin, stream));
    if (recorded) {
      recorded->Run();
    } else {
      body(0);
    }
    STILLHOUSE_CUDA_CHECK(cudaEventRecord(end, stream));
    STILLHOUSE_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0.0f;
    STILLHOUSE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    total += ms;
    if (i > 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return 1e-3 * static_cast<double>(times[times.size() / 2]) / calls;
}

struct Case {
  const char* name;
  int heads, kv_heads, width;
  DType storage;
  std::vector<int64_t> memories;                                    // slots of each segment
  std::vector<std::pair<int64_t, std::vector<int32_t>>> sequences;  // rows, segments
  bool own = true;
  bool rows_as_storage = false;  // q, own keys and values, and the result are stored as the memories are
  bool backward = false;
};

void Run(Backend& backend, const Case& c) {
  if (!std::strstr(c.name, g_only)) return;
  // As many copies of the memories as overflow the second-level cache, taken in turn, so that a step's keys come from
  // memory as they do between the layers of a model; one copy where a call's own work is large.
  double bytes = 0.0, pairs = 0.0;
  for (int64_t slots : c.memories) {
    bytes += 2.0 * static_cast<double>(c.kv_heads * slots * c.width) * (c.storage == DType::kBF16 ? 2 : 4);
  }
  int64_t rows = 0;
  for (const auto& [count, list] : c.sequences) {
    rows += count;
    for (int32_t s : list) pairs += static_cast<double>(count * c.memories[s]);
    if (c.own) pairs += 0.5 * static_cast<double>(count * (count + 1));
  }
  const int copies = bytes > 0.0 && bytes < 256e6 && !c.backward ? static_cast<int>(std::min(16.0, 256e6 / bytes)) : 1;
  std::vector<std::vector<KvSegment>> segments(static_cast<size_t>(copies));
  std::vector<AttentionSequence> sequences;
  int64_t begin = 0;
  for (const auto& [count, list] : c.sequences) {
    sequences.push_back({begin, count, list});
    begin += count;
  }
  // Keys and values of all copies; a copy's are those of a layer.
  std::vector<KvLayers> layers;
  for (int64_t slots : c.memories) {
    const Shape shape = {copies, c.kv_heads, slots, c.width};
    const Tensor k = Random(backend, c.storage, shape), v = Random(backend, c.storage, shape);
    layers.push_back({k.Select(0, 0), v.Select(0, 0), Tensor(), k.stride(0), v.stride(0), 0, true});
    for (int i = 0; i < copies; ++i) {
      segments[static_cast<size_t>(i)].push_back({k.Select(0, i), v.Select(0, i), Tensor(), true});
    }
  }
  const DType dtype = c.rows_as_storage ? c.storage : DType::kF32;
  AttentionArgs args{Random(backend, dtype, {rows, c.heads, c.width})};
  if (c.own) {
    args.k = Random(backend, dtype, {rows, c.kv_heads, c.width});
    args.v = Random(backend, dtype, {rows, c.kv_heads, c.width});
  }
  args.sequences = &sequences;
  args.scale = 1.0f / std::sqrt(static_cast<float>(c.width));
  args.out = Tensor::Empty(backend.pool(), dtype, {rows, c.heads, c.width});
  args.lse = Tensor::Empty(backend.pool(), DType::kF32, {rows, c.heads});
  const int calls = c.backward || pairs > 1e8 ? 1 : c.memories.empty() ? 4 : std::max(copies, 16);
  // Steps are timed as decode steps run them: planned once, their tables on the device.
  const FusedKernels& fused = backend.fused();
  const bool is_step = fused.has_steps() && !c.memories.empty() && IsAttentionStep(sequences);
  AttentionOfStepArgs step{.q = args.q, .k = args.k, .v = args.v, .scale = args.scale, .out = args.out};
  if (is_step) {
    AttentionStep plan;
    fused.PlanAttentionStep(
        backend, {&layers, &sequences, copies, c.heads, c.kv_heads, c.width, c.storage == DType::kBF16, &plan});
    step.sizes = plan.sizes;
    step.bytes = Tensor::Empty(backend.pool(), DType::kU8, {static_cast<int64_t>(plan.bytes.size())});
    backend.Upload(plan.bytes.data(), step.bytes);
    fused.AttentionStepTables(backend, {step.sizes, step.bytes, &step.tables});
  }
  auto forward = [&](int i) {
    if (is_step) {
      step.layer = i % copies;
      return fused.AttentionOfStep(backend, step);
    }
    args.segments = &segments[static_cast<size_t>(i % copies)];
    backend.kernels().Attention(backend, args);
  };
  const double seconds = Time(backend, calls, forward);
  const double flops = 4.0 * pairs * c.heads * c.width;
  std::printf("{\"name\": \"%s\", \"us\": %.2f, \"gb_per_s\": %.0f, \"tflops\": %.1f}\n", c.name, 1e6 * seconds,
              bytes / seconds * 1e-9, flops / seconds * 1e-12);
  std::fflush(stdout);
  if (!c.backward) return;
  AttentionGradArgs grad{args.q, args.k, args.v, &segments[0], &sequences, args.scale, args.out, args.lse};
  grad.dout = Random(backend, DType::kF32, {rows, c.heads, c.width});
  grad.dq = Random(backend, DType::kF32, {rows, c.heads, c.width});
  grad.dk = Random(backend, DType::kF32, {rows, c.kv_heads, c.width});
  grad.dv = Random(backend, DType::kF32, {rows, c.kv_heads, c.width});
  for (const KvSegment& s : segments[0]) {
    grad.dsegment_k.push_back(Random(backend, DType::kF32, s.k.shape()));
    grad.dsegment_v.push_back(Random(backend, DType::kF32, s.v.shape()));
    grad.dsegment_beta.push_back(Tensor());
  }
  const double back = Time(backend, 1, [&](int) { backend.kernels().AttentionGrad(backend, grad); });
  std::printf("{\"name\": \"%s, backward\", \"us\": %.2f, \"tflops\": %.1f}\n", c.name, 1e6 * back,
              2.5 * flops / back * 1e-12);
  std::fflush(stdout);
}

std::vector<std::pair<int64_t, std::vector<int32_t>>> Repeat(int count, int64_t rows, bool shared) {
  std::vector<std::pair<int64_t, std::vector<int32_t>>> sequences;
  for (int32_t i = 0; i < count; ++i) sequences.push_back({rows, {shared ? 0 : i}});
  return sequences;
}

int Main() {
  auto made = MakeCudaBackend({});
  if (!made.ok()) {
    std::fprintf(stderr, "%s\n", std::string(made.status().message()).c_str());
    return 77;
  }
  Backend& backend = **made;
  const DType bf16 = DType::kBF16, f32 = DType::kF32;
  if (!*g_only) {  // what the floors are made of, on the machine as it is now
    const Tensor from = Random(backend, f32, {int64_t{1} << 27}), to = Tensor::Empty(backend.pool(), f32, from.shape());
    const double seconds = Time(backend, 1, [&](int) { backend.Copy(from, to); });
    std::printf("{\"name\": \"copy of 512 MiB\", \"us\": %.2f, \"gb_per_s\": %.0f}\n", 1e6 * seconds,
                2e-9 * static_cast<double>(from.bytes()) / seconds);
    std::fflush(stdout);
  }
  const std::vector<int64_t> private_memories(64, 2048);
  Run(backend, {"decode, B=64, 2048 private slots, bf16", 32, 8, 128, bf16, private_memories, Repeat(64, 1, false)});
  Run(backend, {"decode, B=64, 2048 shared slots, bf16", 32, 8, 128, bf16, {2048}, Repeat(64, 1, true)});
  Run(backend, {"decode, B=1, 2048 slots, bf16", 32, 8, 128, bf16, {2048}, Repeat(1, 1, true)});
  Run(backend, {"decode, B=1, 131072 slots, bf16", 32, 8, 128, bf16, {131072}, Repeat(1, 1, true)});
  // A served batch: one memory, and pages of each sequence's own.
  std::vector<int64_t> memory_and_pages(65, 192);
  memory_and_pages[0] = 2048;
  std::vector<std::pair<int64_t, std::vector<int32_t>>> served;
  for (int32_t i = 0; i < 64; ++i) served.push_back({1, {0, i + 1}});
  Run(backend, {"decode, B=64, 2048 shared and 192 private slots, bf16", 32, 8, 128, bf16, memory_and_pages, served});
  for (int64_t rows : {2048, 8192, 32768}) {
    const std::string name = "prefill, " + std::to_string(rows) + " rows, bf16";
    Run(backend, {name.c_str(), 32, 8, 128, bf16, {}, {{rows, {}}}, true, true});
  }
  // The default model: 9 heads on 3, width 64, f32.
  Run(backend, {"decode, B=1, 2048 slots, f32, small model", 9, 3, 64, f32, {2048}, Repeat(1, 1, true)});
  Run(backend, {"decode, B=16, 512 shared slots, f32, small model", 9, 3, 64, f32, {512}, Repeat(16, 1, true)});
  Run(backend,
      {"decode, B=64, 2048 shared and 192 private slots, f32, small model", 9, 3, 64, f32, memory_and_pages, served});
  Run(backend,
      {"decode, B=64, 2048 private slots, f32, small model", 9, 3, 64, f32, private_memories, Repeat(64, 1, false)});
  Run(backend, {"prefill, 2048 rows, f32, small model", 9, 3, 64, f32, {}, {{2048, {}}}});
  Run(backend, {"training, 4 x 1024 rows on 512 slots, f32, small model",
                9,
                3,
                64,
                f32,
                {512},
                Repeat(4, 1024, true),
                true,
                false,
                true});
  return 0;
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) {
  if (argc > 1) stillhouse::g_only = argv[1];
  return stillhouse::Main();
}
