// Times the attention kernels on the shapes of a small model (9 heads on 3 KV heads of width 64): decode on a long
// memory, prefill, a batch on one shared memory, training rows on a trainable memory. One line per case: best and
// median of repeated calls, and the rate. attention_bench [threads] [seconds per case]
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
#include "kernels/ops/attention.h"
#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

constexpr int64_t kHeads = 9, kKvHeads = 3, kWidth = 64;

struct Timing {
  double best = 0.0, median = 0.0, cpu = 0.0;  // seconds
};

double ProcessSeconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Timing Time(double seconds, const std::function<void()>& body) {
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
  return {times[0], times[times.size() / 2], cpu};
}

Tensor Random(Backend& backend, Shape shape) {
  static std::mt19937 rng(1);
  Tensor t = Tensor::Empty(backend.pool(), DType::kF32, std::move(shape));
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (int64_t i = 0; i < t.elements(); ++i) t.f32()[i] = uniform(rng);
  return t;
}

struct Case {
  const char* name;
  std::vector<int64_t> memories;                                    // slots of each segment
  std::vector<std::pair<int64_t, std::vector<int32_t>>> sequences;  // rows, segments
};

// Multiply-adds of the forward pass: scores and weighted values.
double Products(const Case& c) {
  double pairs = 0.0;
  for (const auto& [rows, list] : c.sequences) {
    double slots = 0.0;
    for (int32_t s : list) slots += static_cast<double>(c.memories[s]);
    pairs += static_cast<double>(rows) * (slots + (static_cast<double>(rows) + 1) / 2);
  }
  return 2 * pairs * kHeads * kWidth;
}

const char* g_only = "";

void Run(Backend& backend, const Case& c, double seconds, bool backward) {
  if (!std::strstr(c.name, g_only)) return;
  std::vector<KvSegment> segments;
  double bytes = 0.0;
  for (int64_t slots : c.memories) {
    KvSegment s{Random(backend, {kKvHeads, slots, kWidth}), Random(backend, {kKvHeads, slots, kWidth}),
                Random(backend, {kKvHeads, slots}), true};
    bytes += static_cast<double>(s.k.bytes() + s.v.bytes());
    segments.push_back(s);
  }
  std::vector<AttentionSequence> sequences;
  int64_t rows = 0;
  for (const auto& [count, list] : c.sequences) {
    sequences.push_back({rows, count, list});
    rows += count;
  }
  AttentionArgs args{Random(backend, {rows, kHeads, kWidth}),
                     Random(backend, {rows, kKvHeads, kWidth}),
                     Random(backend, {rows, kKvHeads, kWidth}),
                     &segments,
                     &sequences,
                     0.125f};
  args.out = Random(backend, {rows, kHeads, kWidth});
  args.lse = Random(backend, {rows, kHeads});
  const double flops = 2 * Products(c);
  const Timing forward = Time(seconds, [&] { backend.kernels().Attention(backend, args); });
  std::printf("%-34s forward  %9.3f ms (median %9.3f, cpu %9.3f)  %6.1f GFLOP/s  %5.1f GB/s of memory\n", c.name,
              1e3 * forward.best, 1e3 * forward.median, 1e3 * forward.cpu, flops / forward.best * 1e-9,
              bytes / forward.best * 1e-9);
  if (!backward) return;
  AttentionGradArgs grad{args.q, args.k, args.v, &segments, &sequences, args.scale, args.out, args.lse};
  grad.dout = Random(backend, args.out.shape());
  grad.dq = Random(backend, args.q.shape());
  grad.dk = Random(backend, args.k.shape());
  grad.dv = Random(backend, args.v.shape());
  for (const KvSegment& s : segments) {
    grad.dsegment_k.push_back(Random(backend, s.k.shape()));
    grad.dsegment_v.push_back(Random(backend, s.v.shape()));
    grad.dsegment_beta.push_back(Random(backend, s.beta.shape()));
  }
  const Timing back = Time(seconds, [&] { backend.kernels().AttentionGrad(backend, grad); });
  std::printf("%-34s backward %9.3f ms (median %9.3f, cpu %9.3f)  %6.1f GFLOP/s\n", c.name, 1e3 * back.best,
              1e3 * back.median, 1e3 * back.cpu, 2.5 * flops / back.best * 1e-9);
}

std::vector<std::pair<int64_t, std::vector<int32_t>>> Repeat(int64_t count, int64_t rows) {
  return std::vector<std::pair<int64_t, std::vector<int32_t>>>(static_cast<size_t>(count), {rows, {0}});
}

// A context in pages of 64 slots.
Case Paged(const char* name, int64_t slots) {
  Case c{name, std::vector<int64_t>(static_cast<size_t>(slots / 64), 64), {{1, {}}}};
  for (size_t i = 0; i < c.memories.size(); ++i) c.sequences[0].second.push_back(static_cast<int32_t>(i));
  return c;
}

void Main(int threads, double seconds) {
  auto backend = MakeCpuBackend({.threads = threads});
  std::printf("%s, %d threads\n", backend->name(), backend->threads().num_threads());
  Run(*backend, {"decode, 32 slots", {32}, {{1, {0}}}}, seconds, false);
  Run(*backend, {"decode, 2048 slots", {2048}, {{1, {0}}}}, seconds, false);
  Run(*backend, Paged("decode, 2048 slots in pages", 2048), seconds, false);
  Run(*backend, {"decode, 16384 slots", {16384}, {{1, {0}}}}, seconds, false);
  Run(*backend, {"16 sequences, 400 shared slots", {400}, Repeat(16, 1)}, seconds, false);
  Run(*backend, {"16 sequences, 800 shared slots", {800}, Repeat(16, 1)}, seconds, false);
  Run(*backend, {"prefill 64", {}, {{64, {}}}}, seconds, false);
  Run(*backend, {"prefill 512", {}, {{512, {}}}}, seconds, false);
  Run(*backend, {"prefill 2048", {}, {{2048, {}}}}, seconds, false);
  Run(*backend, {"training 4 x 256, 100 slots", {100}, Repeat(4, 256)}, seconds, true);
  Run(*backend, {"training 4 x 256, 400 slots", {400}, Repeat(4, 256)}, seconds, true);
  Run(*backend, {"training 2 x 512, 400 slots", {400}, Repeat(2, 512)}, seconds, true);
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) {
  if (argc > 3) stillhouse::g_only = argv[3];
  stillhouse::Main(argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atof(argv[2]) : 0.3);
  return 0;
}
