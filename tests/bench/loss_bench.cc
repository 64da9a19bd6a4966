// Times the fused losses, softmax and sampling on the shapes of a small model (width 576, vocabulary 49152).
// Best and median of repeated calls, the least processor time of a call over all threads, and the best time a row.
// loss_bench [threads] [seconds per case]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/sample.h"

namespace stillhouse {
namespace {

constexpr int64_t kWidth = 576, kVocabulary = 49152, kCandidates = 21;

double ProcessSeconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void Time(const char* name, double seconds, double per, const char* unit, const std::function<void()>& body) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double cpu = 1e9;
  body();
  const auto start = Clock::now();
  do {
    const auto begin = Clock::now();
    const double cpu_begin = ProcessSeconds();
    body();
    cpu = std::min(cpu, ProcessSeconds() - cpu_begin);
    times.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds || times.size() < 5);
  std::sort(times.begin(), times.end());
  std::printf("%-44s %9.3f ms (median %9.3f, cpu %9.3f)  %9.2f us a %s\n", name, 1e3 * times[0],
              1e3 * times[times.size() / 2], 1e3 * cpu, 1e6 * times[0] / per, unit);
}

Tensor Random(const Context& ctx, Shape shape, float scale) {
  static std::mt19937 rng(1);
  Tensor t = ctx.EmptyF32(std::move(shape));
  std::normal_distribution<float> normal(0.0f, scale);
  for (int64_t i = 0; i < t.elements(); ++i) t.f32()[i] = normal(rng);
  return t;
}

Tensor RandomQ8(const Context& ctx, int64_t rows, int64_t width) {
  static std::mt19937 rng(2);
  Tensor t = ctx.Empty(DType::kQ8_0, {rows, width});
  auto* bytes = t.data<uint8_t>();
  for (int64_t i = 0; i < t.bytes(); ++i) bytes[i] = static_cast<uint8_t>(rng());
  const uint16_t scale = 0x1800;  // 2^-9 in fp16
  for (int64_t i = 0; i < t.bytes(); i += 34) std::memcpy(bytes + i, &scale, 2);
  return PrepareWeight(ctx, t);
}

void Main(int threads, double seconds) {
  auto backend = MakeCpuBackend({.threads = threads});
  const Context ctx{backend.get()};
  std::printf("%s, %d threads\n", backend->name(), backend->threads().num_threads());
  std::mt19937 rng(3);

  const Tensor weight = RandomQ8(ctx, kVocabulary, kWidth);
  const int64_t rows = 256;
  const Tensor x = Random(ctx, {rows, kWidth}, 0.1f);
  std::vector<int32_t> ids, targets;
  for (int64_t i = 0; i < rows * kCandidates; ++i) ids.push_back(static_cast<int32_t>(rng() % kVocabulary));
  for (int64_t i = 0; i < rows; ++i) targets.push_back(static_cast<int32_t>(rng() % kVocabulary));
  const double n = static_cast<double>(rows);
  const Tensor out = ctx.EmptyF32({64, kVocabulary});
  Time("output projection alone, 64 rows", seconds, 64, "row", [&] {
    ctx.kernels().Linear(*backend, {x.Slice(0, 0, 64), weight, Tensor(), out});
  });
  LinearDistillArgs distill{x,
                            weight,
                            ctx.Ints(ids, {rows, kCandidates}),
                            Random(ctx, {rows, kCandidates}, 1.0f),
                            Tensor(),
                            DistillMode::kRenormalised,
                            ctx.EmptyF32({1})};
  Time("LinearDistill, 256 rows, loss", seconds, n, "row", [&] { ctx.kernels().LinearDistill(*backend, distill); });
  distill.dx = ctx.EmptyF32({rows, kWidth});
  Time("LinearDistill, 256 rows, loss and dx", seconds, n, "row",
       [&] { ctx.kernels().LinearDistill(*backend, distill); });
  LinearCrossEntropyArgs entropy{x, weight, ctx.Ints(targets, {rows}), {}, ctx.EmptyF32({1}), distill.dx};
  Time("LinearCrossEntropy, 256 rows, loss and dx", seconds, n, "row",
       [&] { ctx.kernels().LinearCrossEntropy(*backend, entropy); });
  TopLogprobsArgs top{x, weight, ctx.Ints(targets, {rows}), 20};
  top.top_ids = ctx.Empty(DType::kI32, {rows, 20});
  top.top_logprobs = ctx.EmptyF32({rows, 20});
  top.token_logprobs = ctx.EmptyF32({rows});
  Time("TopLogprobs, 256 rows, k = 20", seconds, n, "row", [&] { ctx.kernels().TopLogprobs(*backend, top); });

  for (int64_t width : {2048, 8192}) {
    const Tensor z = Random(ctx, {512, width}, 3.0f), s = ctx.EmptyF32({512, width});
    Time(width == 2048 ? "Softmax, 512 rows of 2048" : "Softmax, 512 rows of 8192", seconds, 512.0, "row", [&] {
      ctx.kernels().Softmax(*backend, {z, s});
    });
  }

  const Tensor logits = Random(ctx, {16, kVocabulary}, 3.0f);
  const auto sample = [&](const char* name, SampleRow row) {
    for (int64_t count : {1, 16}) {
      const Tensor z = logits.Slice(0, 0, count);
      std::vector<SampleRow> settings(static_cast<size_t>(count), row);
      Time(name, seconds, static_cast<double>(count), "row", [&] { Sample(ctx, z, kVocabulary, settings); });
    }
  };
  sample("Sample, greedy", {});
  sample("Sample, greedy with 5 logprobs", {.logprobs = 5});
  sample("Sample, temperature 1", {.temperature = 1.0f});
  sample("Sample, top_k 40", {.temperature = 0.8f, .top_k = 40});
  sample("Sample, top_p 0.95", {.temperature = 0.8f, .top_p = 0.95f});
  sample("Sample, top_k 40, top_p 0.95, penalties",
         {.temperature = 0.8f, .top_p = 0.95f, .top_k = 40, .repetition_penalty = 1.1f, .history = {{5, 1}}});
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) {
  stillhouse::Main(argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atof(argv[2]) : 0.3);
  return 0;
}
