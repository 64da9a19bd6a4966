// Times products at a model's shapes: decode (one row), small batches, prefill, and the gradient of the input; against
// the floors of memory and arithmetic that it measures first. Results are checked against fp64 before they are timed.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/gemm.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/quant.h"

namespace stillhouse {
namespace {

bool use_cpu_time = false;

double Now() {
  timespec t;
  clock_gettime(use_cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Timing {
  double median = 0.0, best = 0.0;
};

// Repeats until `budget` seconds are spent, at least five times.
template <typename Body>
Timing Time(double budget, const Body& body) {
  body();
  std::vector<double> times;
  const double start = Now();
  while (times.size() < 5 || Now() - start < budget) {
    const double begin = Now();
    body();
    times.push_back(Now() - begin);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[0]};
}

// Random blocks with scales of ordinary size.
std::vector<uint8_t> RandomWeight(std::mt19937& rng, DType dtype, int64_t elements) {
  std::vector<uint8_t> bytes(static_cast<size_t>(RowBytes(dtype, elements)));
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng());
  if (dtype == DType::kF32) {
    auto* f = reinterpret_cast<float*>(bytes.data());
    for (int64_t i = 0; i < elements; ++i) f[i] = static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-36f;
    return bytes;
  }
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(BlockBytes(dtype))) {
    bytes[at + 1] = 0x24;
    if (dtype == DType::kQ4_1) bytes[at + 3] = 0xac;
  }
  return bytes;
}

struct Shape2 {
  const char* name;
  DType dtype;
  int64_t n, k;
  int64_t count;  // of this product in one pass over the model
};

int Run(int argc, char** argv) {
  int threads = 0;
  std::string isa = "auto", json_path, only;
  double budget = 0.3;
  std::vector<int64_t> rows = {1, 4, 16, 64, 512};
  CLI::App app{"Times products at the shapes of SmolLM2-135M (Q4_1, output projection Q8_0)"};
  app.add_option("--threads", threads, "threads (0: one per core)");
  app.add_option("--isa", isa, "auto, v2, avx2 or avx512");
  app.add_option("--rows", rows, "rows of activations");
  app.add_option("--seconds", budget, "time for each measurement");
  app.add_option("--json", json_path, "write the results to this file");
  app.add_option("--only", only, "only products whose name contains this");
  app.add_flag("--cpu-time", use_cpu_time, "the calling thread's processor time, for one thread on a shared machine");
  CLI11_PARSE(app, argc, argv);
  if (use_cpu_time) threads = 1;
  const CpuIsa set = isa == "v2"       ? CpuIsa::kV2
                     : isa == "avx2"   ? CpuIsa::kAvx2
                     : isa == "avx512" ? CpuIsa::kAvx512
                                       : CpuIsa::kAuto;
  auto backend = MakeCpuBackend({.threads = threads, .isa = set});
  const Context ctx{backend.get(), nullptr};
  std::mt19937 rng(1);
  nlohmann::json results;
  results["backend"] = backend->name();
  results["threads"] = backend->threads().num_threads();

  // Floors: bytes per second of reading 128 MiB, and multiply-adds from registers and L1.
  const int pool = backend->threads().num_threads();
  const cpu::SimdTable& simd = cpu::SimdOf(*backend);
  const int64_t big = int64_t{32} << 20;
  const Tensor source = Tensor::Zeros(backend->pool(), DType::kF32, {big});
  const Timing read = Time(budget, [&] {
    backend->threads().ParallelFor(pool * 8, [&](int64_t task, int) {
      const int64_t part = big / (pool * 8);
      volatile float sink = simd.dot(source.f32() + task * part, source.f32() + task * part, part);
      (void)sink;
    });
  });
  const double bandwidth = static_cast<double>(big) * 4 / read.best;
  const int64_t depth = 256, repeats = 2000;
  std::vector<float> a(static_cast<size_t>(simd.tile_rows * depth), 1.0f),
      b(static_cast<size_t>(simd.tile_cols * depth));
  const Timing arithmetic = Time(budget, [&] {
    backend->threads().ParallelFor(pool, [&](int64_t, int) {
      std::vector<float> c(static_cast<size_t>(simd.tile_rows * simd.tile_cols));
      cpu::GemmTile tile{simd.tile_rows, simd.tile_cols, depth,    a.data(),      depth, 1,
                         b.data(),       simd.tile_cols, c.data(), simd.tile_cols};
      for (int64_t i = 0; i < repeats; ++i) simd.gemm_sweep(tile);
    });
  });
  const double flops =
      2.0 * static_cast<double>(pool * repeats * depth * simd.tile_rows * simd.tile_cols) / arithmetic.best;
  std::printf("%s, %d threads: reads %.1f GB/s, multiply-adds %.0f GFLOP/s\n", backend->name(), pool, bandwidth * 1e-9,
              flops * 1e-9);
  results["read_bytes_per_second"] = bandwidth;
  results["flops"] = flops;

  const Shape2 shapes[] = {{"qkv", DType::kQ4_1, 960, 576, 30},      {"o", DType::kQ4_1, 576, 576, 30},
                           {"gate_up", DType::kQ4_1, 3072, 576, 30}, {"down", DType::kQ4_1, 576, 1536, 30},
                           {"output", DType::kQ8_0, 49152, 576, 1},  {"dense", DType::kF32, 1536, 576, 0}};
  std::printf("%-8s %-6s %5s %11s %11s %9s %9s %9s\n", "product", "kind", "rows", "median", "best", "GB/s", "GFLOP/s",
              "of floor");
  for (int64_t m : rows) {
    double pass = 0.0, pass_gradient = 0.0, best_pass = 0.0, best_gradient = 0.0;
    for (const Shape2& s : shapes) {
      if (m > 64 && s.n > 16384) continue;  // a prefill projects its last row only
      if (!only.empty() && std::string(s.name).find(only) == std::string::npos) continue;
      // As many copies as the model has, so that weights come from where they come from in a decode step.
      std::vector<Tensor> weights;
      const std::vector<uint8_t> bytes = RandomWeight(rng, s.dtype, s.n * s.k);
      for (int64_t i = 0; i < std::max<int64_t>(s.count, 1); ++i) {
        weights.push_back(PrepareWeight(ctx, Tensor::Wrap(bytes.data(), s.dtype, {s.n, s.k})));
      }
      std::vector<float> values(static_cast<size_t>(m * std::max(s.k, s.n)));
      for (float& v : values) v = static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-31f;
      const Tensor x = ctx.Floats(absl::MakeSpan(values).subspan(0, static_cast<size_t>(m * s.k)), {m, s.k});
      const Tensor g = ctx.Floats(absl::MakeSpan(values).subspan(0, static_cast<size_t>(m * s.n)), {m, s.n});
      const Tensor out = ctx.EmptyF32({m, s.n}), dx = Tensor::Zeros(backend->pool(), DType::kF32, {m, s.k});
      ctx.kernels().Linear(*backend, {x, weights[0], Tensor(), out});
      std::vector<float> row(static_cast<size_t>(s.k));
      double error = 0.0, size = 0.0;
      for (int64_t j = 0; j < s.n; j += std::max<int64_t>(1, s.n / 64)) {
        DequantizeRow(s.dtype, bytes.data() + RowBytes(s.dtype, j * s.k), s.k, row.data());
        for (int64_t i = 0; i < m; i += std::max<int64_t>(1, m / 4)) {
          double want = 0.0;
          for (int64_t l = 0; l < s.k; ++l) want += static_cast<double>(row[l]) * x.f32()[i * s.k + l];
          error += std::pow(out.f32()[i * s.n + j] - want, 2);
          size += want * want;
        }
      }
      if (!(std::sqrt(error / size) < 1e-5)) {
        std::fprintf(stderr, "%s is wrong: relative error %g\n", s.name, std::sqrt(error / size));
        return 1;
      }
      for (const char* kind : {"linear", "grad"}) {
        const bool gradient = kind[0] == 'g';
        if (gradient && m < 16) continue;
        const double copies = static_cast<double>(weights.size());
        const Timing t = Time(budget, [&] {
          for (const Tensor& w : weights) {
            if (gradient) {
              LinearGradArgs args;
              args.weight = w;
              args.dout = g;
              args.dx = dx;
              ctx.kernels().LinearGrad(*backend, args);
            } else {
              ctx.kernels().Linear(*backend, {x, w, Tensor(), out});
            }
          }
        });
        const double each = t.median / copies, best = t.best / copies;
        const double moved = static_cast<double>(weights[0].bytes()), work = 2.0 * static_cast<double>(m * s.n * s.k);
        const double floor = std::max(moved / bandwidth, work / flops);
        std::printf("%-8s %-6s %5lld %8.1f us %8.1f us %9.1f %9.1f %8.0f%%\n", s.name, kind, static_cast<long long>(m),
                    each * 1e6, best * 1e6, moved / best * 1e-9, work / best * 1e-9, 100.0 * floor / best);
        std::fflush(stdout);
        results["products"].push_back({{"name", s.name},
                                       {"kind", kind},
                                       {"rows", m},
                                       {"seconds", each},
                                       {"best_seconds", t.best / copies},
                                       {"floor_seconds", floor}});
        if (s.count > 0) (gradient ? pass_gradient : pass) += t.median;
        if (s.count > 0) (gradient ? best_gradient : best_pass) += t.best;
      }
    }
    std::printf("all products of a pass, %lld rows: median %.3f ms, best %.3f ms (%.0f rows/s)",
                static_cast<long long>(m), pass * 1e3, best_pass * 1e3, static_cast<double>(m) / best_pass);
    if (pass_gradient > 0) std::printf("; gradients %.3f ms, best %.3f ms", pass_gradient * 1e3, best_gradient * 1e3);
    std::printf("\n");
    results["passes"].push_back({{"rows", m},
                                 {"seconds", pass},
                                 {"best_seconds", best_pass},
                                 {"gradient_seconds", pass_gradient},
                                 {"best_gradient_seconds", best_gradient}});
  }
  if (!json_path.empty()) {
    std::FILE* file = std::fopen(json_path.c_str(), "w");
    if (!file) {
      std::fprintf(stderr, "cannot write %s\n", json_path.c_str());
      return 1;
    }
    const std::string text = results.dump(2) + "\n";
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
  }
  return 0;
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) { return stillhouse::Run(argc, argv); }
