// Times the model on this machine: prefill, decode, many sequences on one memory, prefix training. One JSON object on
// standard output; cpu_peers.py sets it beside its peers.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <random>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "kernels/base/trace.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/sample.h"
#include "nlohmann/json.hpp"
#include "server/load/llama_gguf.h"
#include "server/model/forward.h"

namespace stillhouse {
namespace {

struct Bench {
  Context ctx;
  const Weights* weights = nullptr;
  PagePool* pages = nullptr;
  std::vector<int32_t> ids;

  static double Median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  }

  template <typename Fn>
  static double Seconds(const Fn& fn) {
    const absl::Time begin = absl::Now();
    fn();
    return absl::ToDoubleSeconds(absl::Now() - begin);
  }

  // Tokens per second of one prompt of n tokens, last logits included.
  double PrefillRate(int64_t n, int repeats) const {
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      SequenceState state({}, pages);
      times.push_back(Seconds([&] {
        auto last = Prefill(ctx, *weights, &state, absl::MakeConstSpan(ids).first(static_cast<size_t>(n)), 512);
        STILLHOUSE_CHECK(last.ok());
        Logits(ctx, *weights, *last);
      }));
    }
    return static_cast<double>(n) / Median(times);
  }

  // Tokens per second of `sequences` sequences that decode together after `context` tokens each: private rows, or one
  // shared memory.
  double DecodeRate(int64_t context, int64_t sequences, bool shared, int steps) const {
    std::vector<std::shared_ptr<const Memory>> memories;
    std::vector<std::unique_ptr<SequenceState>> states;
    const auto prompt = absl::MakeConstSpan(ids).first(static_cast<size_t>(context));
    if (shared) {
      SequenceState state({}, pages);
      STILLHOUSE_CHECK(Prefill(ctx, *weights, &state, prompt).ok());
      memories.push_back(state.Freeze(ctx, weights->config));
    }
    for (int64_t s = 0; s < sequences; ++s) {
      states.push_back(std::make_unique<SequenceState>(memories, pages));
      if (!shared) STILLHOUSE_CHECK(Prefill(ctx, *weights, states.back().get(), prompt).ok());
    }
    const std::vector<SampleRow> rows(static_cast<size_t>(sequences));
    std::vector<double> times;
    for (int step = 0; step < steps; ++step) {
      times.push_back(Seconds([&] {
        Batch batch;
        const int32_t token = 400;
        for (auto& state : states) {
          STILLHOUSE_CHECK(state->Reserve(1).ok());
          batch.Add(state.get(), {&token, 1}, Batch::Outputs::kLast);
        }
        const Tensor logits = Logits(ctx, *weights, Forward(ctx, *weights, batch).hidden);
        Sample(ctx, logits, weights->config.vocabulary, rows);
      }));
    }
    return static_cast<double>(sequences) / Median(times);
  }

  // Tokens per second of forward + backward to the keys and values of a prefix of p slots, rows of n tokens,
  // cross-entropy.
  double TrainRate(int64_t p, int64_t n, int repeats) const {
    SequenceState prefix({}, pages);
    STILLHOUSE_CHECK(Prefill(ctx, *weights, &prefix, absl::MakeConstSpan(ids).last(static_cast<size_t>(p))).ok());
    const std::shared_ptr<const Memory> memory = prefix.Freeze(ctx, weights->config);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      times.push_back(Seconds([&] {
        Tape tape(*ctx.backend);
        Context training = ctx;
        training.tape = &tape;
        for (const LayerKv& layer : memory->layers) {
          tape.Watch(layer.k);
          tape.Watch(layer.v);
        }
        SequenceState state({memory});
        Batch batch;
        batch.Add(&state, absl::MakeConstSpan(ids).first(static_cast<size_t>(n)), Batch::Outputs::kNone);
        for (int32_t r = 0; r + 1 < n; ++r) batch.output_rows.push_back(r);
        const Tensor hidden = Forward(training, *weights, batch).hidden;
        const auto targets = absl::MakeConstSpan(ids).subspan(1, static_cast<size_t>(n) - 1);
        tape.Backward(LinearCrossEntropy(training, hidden, weights->output, ctx.Ints(targets, {n - 1})));
      }));
    }
    return static_cast<double>(n) / Median(times);
  }
};

void PrintTrace(const char* what, double seconds) {
  std::cerr << what << ": " << seconds << " tok/s\n";
  for (const SpanTotal& span : TakeTrace()) {
    std::fprintf(stderr, "  %-24s %8lld calls %10.3f ms\n", span.name.c_str(), static_cast<long long>(span.count),
                 static_cast<double>(span.nanoseconds) / 1e6);
  }
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Times the model's forward and backward passes.\n\nExample:\n  model_bench model.gguf --threads 2 --only decode"};
  std::string path, only, isa = "auto";
  int threads = 0, repeats = 3, steps = 16;
  std::vector<int64_t> contexts = {32, 2048};
  bool trace = false;
  app.add_option("model", path, "GGUF file")->required()->check(CLI::ExistingFile);
  app.add_option("--threads", threads, "threads (default: one per core)");
  app.add_option("--repeats", repeats, "runs of each, of which the median counts")->capture_default_str();
  app.add_option("--steps", steps, "decode steps a repeat")->capture_default_str();
  app.add_option("--contexts", contexts, "tokens before the decode steps")->delimiter(',')->capture_default_str();
  app.add_option("--only", only, "prefill, decode, shared or train (default: all)");
  app.add_option("--isa", isa, "auto, v2, avx2 or avx512")->capture_default_str();
  app.add_flag("--trace", trace, "print where the time goes");
  CLI11_PARSE(app, argc, argv);

  CpuBackendOptions options;
  options.threads = threads;
  options.isa = isa == "v2"       ? CpuIsa::kV2
                : isa == "avx2"   ? CpuIsa::kAvx2
                : isa == "avx512" ? CpuIsa::kAvx512
                                  : CpuIsa::kAuto;
  auto backend = MakeCpuBackend(options);
  Bench bench;
  bench.ctx.backend = backend.get();
  auto model = LoadGgufModel(bench.ctx, path);
  if (!model.ok()) {
    std::cerr << model.status() << "\n";
    return 1;
  }
  bench.weights = model->weights.get();
  PagePool pages(bench.ctx, bench.weights->config, int64_t{8} << 30);
  bench.pages = &pages;
  std::mt19937 rng(0);
  std::uniform_int_distribution<int32_t> pick(100, 40000);
  for (int i = 0; i < 4096; ++i)
    bench.ids.push_back(pick(rng) % static_cast<int32_t>(bench.weights->config.vocabulary));

  nlohmann::json out = {{"threads", backend->threads().num_threads()}, {"backend", backend->name()}};
  EnableTrace(trace);
  auto record = [&](const char* group, const std::string& key, double rate) {
    out[group][key] = rate;
    if (trace) PrintTrace((std::string(group) + " " + key).c_str(), rate);
  };
  auto wanted = [&](const char* name) { return only.empty() || only == name; };
  if (wanted("prefill")) {
    // The first run of each size asks the system for its memory.
    for (int64_t n : {64, 512, 2048}) bench.PrefillRate(n, 1);
    TakeTrace();
    for (int64_t n : {64, 512, 2048}) record("prefill_tok_s", std::to_string(n), bench.PrefillRate(n, repeats));
  }
  if (wanted("decode")) {
    for (int64_t n : contexts)
      record("decode_tok_s", std::to_string(n), bench.DecodeRate(n, 1, false, steps * repeats));
  }
  if (wanted("shared")) record("shared_decode_tok_s", "16x256", bench.DecodeRate(256, 16, true, 8 * repeats));
  if (wanted("train")) {
    bench.TrainRate(128, 1024, 1);  // the first step asks the system for its memory
    TakeTrace();
    record("train_tok_s", "1024", bench.TrainRate(128, 1024, repeats));
  }
  std::cout << out.dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) { return stillhouse::Main(argc, argv); }
