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
#include "kernels/cuda/cuda_backend.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/random_fill.h"
#include "kernels/ops/sample.h"
#include "kernels/plan/plans_in_use.h"
#include "nlohmann/json.hpp"
#include "server/load/llama_gguf.h"
#include "server/load/random_weights.h"
#include "server/model/decode_steps.h"
#include "server/model/forward.h"

namespace stillhouse {
namespace {

struct Bench {
  Context ctx;
  const Weights* weights = nullptr;
  std::shared_ptr<const Weights> shared_weights;
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

  // A memory of generated keys and values, as a cartridge of so many slots lies.
  std::shared_ptr<const Memory> GeneratedMemory(int64_t slots, uint64_t seed) const {
    const ModelConfig& c = weights->config;
    const Tensor all = ctx.Empty(pages->dtype(), {c.layers, 2, c.kv_heads, slots, c.head_dim});
    RandomFill(ctx, {all, 1.0f, seed});
    auto memory = std::make_shared<Memory>();
    memory->slots = memory->next_position = slots;
    for (int64_t l = 0; l < c.layers; ++l) {
      memory->layers.push_back({all.Select(0, l).Select(0, 0), all.Select(0, l).Select(0, 1), Tensor()});
    }
    return memory;
  }

  // Milliseconds of a step, from batch to tokens, of `sequences` sequences spread over `memories` memories (0: none).
  nlohmann::json StepTime(int64_t sequences, int64_t memories, int64_t slots, int64_t steps) const {
    std::vector<std::shared_ptr<const Memory>> all;
    for (int64_t m = 0; m < memories; ++m) all.push_back(GeneratedMemory(slots, 1000 + static_cast<uint64_t>(m)));
    std::vector<std::unique_ptr<SequenceState>> states;
    const auto prompt = absl::MakeConstSpan(ids).first(16);
    for (int64_t s = 0; s < sequences; ++s) {
      std::vector<std::shared_ptr<const Memory>> own;
      if (memories > 0) own.push_back(all[static_cast<size_t>(s % memories)]);
      states.push_back(std::make_unique<SequenceState>(own, pages));
      STILLHOUSE_CHECK(Prefill(ctx, *weights, states.back().get(), prompt).ok());
    }
    DecodeSteps decode(ctx, shared_weights, weights->config.vocabulary);
    const std::vector<SampleRow> rows(static_cast<size_t>(sequences));
    std::vector<int32_t> next(static_cast<size_t>(sequences), 400);
    std::vector<double> times;
    bool recorded = true;
    for (int64_t step = 0; step < steps + 3; ++step) {
      const double seconds = Seconds([&] {
        Batch batch;
        for (size_t s = 0; s < states.size(); ++s) {
          STILLHOUSE_CHECK(states[s]->Reserve(1).ok());
          batch.Add(states[s].get(), {&next[s], 1}, Batch::Outputs::kLast);
        }
        DecodeSteps::Result result;
        if (!decode.Run(batch, rows, false, &result)) {
          recorded = false;
          const Tensor logits = Logits(ctx, *weights, Forward(ctx, *weights, batch).hidden);
          result.tokens = Sample(ctx, logits, weights->config.vocabulary, rows);
        }
        for (size_t s = 0; s < states.size(); ++s) {
          STILLHOUSE_CHECK(!result.tokens[s].invalid) << "the model gave no distribution";
          next[s] = result.tokens[s].id;
        }
      });
      if (step >= 3) times.push_back(1e3 * seconds);
      if (step == 2) TakeTrace();
    }
    // What is read once a step at the least: the matrices, and each memory.
    const int64_t floor = weights->bytes() - (weights->config.tied_embeddings ? 0 : weights->embedding.bytes()) +
                          memories * slots * weights->config.kv_bytes_per_slot(BlockBytes(pages->dtype()));
    nlohmann::json out = {{"sequences", sequences}, {"memories", memories},
                          {"slots", slots},         {"ms", Median(times)},
                          {"recorded", recorded},   {"recordings", decode.stats().recordings},
                          {"floor_bytes", floor},   {"fastest_ms", *std::min_element(times.begin(), times.end())}};
    for (const SpanTotal& span : TakeTrace()) {
      out["spans_ms"][span.name] = static_cast<double>(span.nanoseconds) / 1e6 / static_cast<double>(steps);
    }
    return out;
  }

  // Milliseconds from a prompt to its first token: after a memory of `slots` slots, or after nothing.
  double FirstTokenTime(int64_t slots, int64_t prompt, int64_t chunk, int repeats) const {
    std::vector<std::shared_ptr<const Memory>> memories;
    if (slots > 0) memories.push_back(GeneratedMemory(slots, 1000));
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < prompt; ++i) tokens.push_back(ids[static_cast<size_t>(i) % ids.size()]);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      SequenceState state(memories, pages);
      times.push_back(1e3 * Seconds([&] {
                        const auto last = Prefill(ctx, *weights, &state, tokens, chunk);
                        STILLHOUSE_CHECK(last.ok()) << last.status().ToString();
                        Sample(ctx, Logits(ctx, *weights, *last), weights->config.vocabulary, {SampleRow{}});
                      }));
    }
    return Median(times);
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

void PrintTrace(const std::string& what) {
  std::cerr << what << "\n";
  for (const SpanTotal& span : TakeTrace()) {
    std::fprintf(stderr, "  %-24s %8lld calls %10.3f ms\n", span.name.c_str(), static_cast<long long>(span.count),
                 static_cast<double>(span.nanoseconds) / 1e6);
  }
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Times the model's forward and backward passes.\n\nExample:\n  model_bench model.gguf --threads 2 --only decode\n"
      "  model_bench --random-weights llama-3.1-8b --device cuda --kv bf16 --steps-of 1x1,64x1,64x64"};
  std::string path, only, isa = "auto", device = "cpu", storage = "bf16", random_shape, kv_name = "f32", plans;
  int64_t kv_bytes = int64_t{8} << 30, chunk = 512, slots = 2048;
  std::vector<int64_t> first_tokens;
  std::vector<std::string> steps_of;
  int threads = 0, repeats = 3, steps = 16;
  std::vector<int64_t> contexts = {32, 2048};
  bool trace = false;
  app.add_option("model", path, "GGUF file")->check(CLI::ExistingFile);
  app.add_option("--random-weights", random_shape, "instead of a file: a shape with generated parameters");
  app.add_option("--device", device, "cpu or cuda")->capture_default_str()->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--gpu-weights", storage, "f32 or bf16")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", threads, "threads (default: one per core)");
  app.add_option("--repeats", repeats, "runs of each, of which the median counts")->capture_default_str();
  app.add_option("--steps", steps, "decode steps a repeat")->capture_default_str();
  app.add_option("--contexts", contexts, "tokens before the decode steps")->delimiter(',')->capture_default_str();
  app.add_option("--only", only, "prefill, decode, shared or train (default: all)");
  app.add_option("--isa", isa, "auto, v2, avx2 or avx512")->capture_default_str();
  app.add_option("--kv", kv_name, "f32, or bf16 on cuda")->capture_default_str()->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--kv-bytes", kv_bytes, "budget of private keys and values")->capture_default_str();
  app.add_option("--steps-of", steps_of, "SEQUENCESxMEMORIES: times decode steps on generated memories, 64x1,64x64 …")
      ->delimiter(',');
  app.add_option("--slots", slots, "of each of these memories")->capture_default_str();
  app.add_option("--first-token", first_tokens,
                 "times the first token after prompts of so many tokens, and after 32 tokens on one memory")
      ->delimiter(',');
  app.add_option("--chunk", chunk, "prompt tokens of a pass")->capture_default_str();
  app.add_option("--plans", plans, "a file of plans (stillhouse-tune) over those that are shipped")
      ->check(CLI::ExistingFile);
  app.add_flag("--trace", trace, "print where the time goes");
  CLI11_PARSE(app, argc, argv);

  if (!plans.empty()) {
    const auto book = PlanBook::Load(plans);
    if (!book.ok()) {
      std::cerr << book.status() << "\n";
      return 1;
    }
    UsePlans(*book);
  }
  CpuBackendOptions options;
  options.threads = threads;
  options.isa = isa == "v2"       ? CpuIsa::kV2
                : isa == "avx2"   ? CpuIsa::kAvx2
                : isa == "avx512" ? CpuIsa::kAvx512
                                  : CpuIsa::kAuto;
  absl::StatusOr<std::unique_ptr<Backend>> backend_or = nullptr;
  if (device == "cpu") {
    backend_or = MakeCpuBackend(options);
  } else {
    CudaBackendOptions cuda;
    cuda.threads = threads;
    cuda.storage = storage == "bf16" ? CudaStorage::kBf16 : CudaStorage::kF32;
    backend_or = MakeCudaBackend(cuda);
  }
  if (!backend_or.ok()) {
    std::cerr << backend_or.status() << "\n";
    return 1;
  }
  const std::unique_ptr<Backend> backend = *std::move(backend_or);
  Bench bench;
  bench.ctx.backend = backend.get();
  std::shared_ptr<const Weights> weights;
  absl::Status loaded;
  if (random_shape.empty()) {
    auto model = LoadGgufModel(bench.ctx, path);
    loaded = model.status();
    if (model.ok()) weights = model->weights;
  } else {
    auto made = RandomWeights(bench.ctx, random_shape);
    loaded = made.status();
    if (made.ok()) weights = *made;
  }
  if (!loaded.ok()) {
    std::cerr << loaded << "\n";
    return 1;
  }
  bench.weights = weights.get();
  bench.shared_weights = weights;
  const DType kv = kv_name == "bf16" ? DType::kBF16 : DType::kF32;
  PagePool pages(bench.ctx, bench.weights->config, kv_bytes, kv);
  bench.pages = &pages;
  std::mt19937 rng(0);
  std::uniform_int_distribution<int32_t> pick(100, 40000);
  for (int i = 0; i < 4096; ++i)
    bench.ids.push_back(pick(rng) % static_cast<int32_t>(bench.weights->config.vocabulary));

  nlohmann::json out = {{"threads", backend->threads().num_threads()}, {"backend", backend->name()}};
  EnableTrace(trace);
  auto record = [&](const char* group, const std::string& key, double rate) {
    out[group][key] = rate;
    if (trace) PrintTrace(group + (" " + key) + ": " + std::to_string(rate) + " tok/s");
  };
  const bool chosen = !steps_of.empty() || !first_tokens.empty();
  auto wanted = [&](const char* name) { return only == name || (only.empty() && !chosen); };
  for (const std::string& pair : steps_of) {
    int64_t sequences = 0, memories = 0;
    if (std::sscanf(pair.c_str(), "%ldx%ld", &sequences, &memories) != 2 || sequences < 1 || memories < 0) {
      std::cerr << "--steps-of takes SEQUENCESxMEMORIES, not " << pair << "\n";
      return 1;
    }
    EnableTrace(true);
    out["steps"].push_back(bench.StepTime(sequences, memories, slots, steps));
    EnableTrace(trace);
    std::cerr << out["steps"].back().dump() << std::endl;
  }
  if (!first_tokens.empty()) {
    bench.FirstTokenTime(slots, 32, chunk, 2);
    out["first_token_ms"]["32 tokens on a memory"] = bench.FirstTokenTime(slots, 32, chunk, 9);
    for (int64_t prompt : first_tokens) {
      bench.FirstTokenTime(0, std::min<int64_t>(prompt, 2 * chunk), chunk, 1);
      TakeTrace();
      out["first_token_ms"][std::to_string(prompt)] = bench.FirstTokenTime(0, prompt, chunk, prompt > 8192 ? 1 : 5);
      std::cerr << out["first_token_ms"].dump() << std::endl;
      if (trace) PrintTrace("first token after " + std::to_string(prompt) + " tokens, all runs");
    }
    out["kv_bytes_per_slot"] = bench.weights->config.kv_bytes_per_slot(BlockBytes(kv));
  }
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
