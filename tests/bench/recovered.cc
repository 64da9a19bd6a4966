// Builds memories of documents with questions and prints how much of the full context's knowledge each recovers.
//
//   stillhouse-recovered --model M.gguf --squad articles.json --articles 0,9,20-23 --profiles quick --ratios 10,40
//   stillhouse-recovered --model M.gguf --document LICENSE --questions questions.txt --methods
//   CARTRIDGE,ATTENTION_MATCHING
//
// Everything goes through the store, the build queue and the engine as in the server. Output is one JSON object with a
// row per build; progress goes to standard error.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/base/sha256.h"
#include "kernels/base/trace.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "nlohmann/json.hpp"
#include "server/corpus/build_queue.h"
#include "server/corpus/evaluator.h"
#include "server/load/llama_gguf.h"

namespace stillhouse {
namespace {

using nlohmann::json;

[[noreturn]] void Die(const std::string& why) {
  std::cerr << "stillhouse-recovered: " << why << "\n";
  std::exit(1);
}

template <typename T>
T Must(absl::StatusOr<T> value, const std::string& what) {
  if (!value.ok()) Die(absl::StrCat(what, ": ", value.status().ToString()));
  return *std::move(value);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Die("cannot read " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Subject {
  std::string name, text;
  std::vector<std::string> questions;
};

// Articles of a SQuAD-format file: "3", or "20-23" for several joined to one document.
Subject FromSquad(const json& articles, const std::string& which) {
  const size_t dash = which.find('-');
  const int first = std::atoi(which.c_str());
  const int last = dash == std::string::npos ? first : std::atoi(which.c_str() + dash + 1);
  Subject subject;
  for (int i = first; i <= last; ++i) {
    if (i < 0 || i >= static_cast<int>(articles.size())) Die("there is no article " + which);
    const json& article = articles[static_cast<size_t>(i)];
    absl::StrAppend(&subject.name, subject.name.empty() ? "" : "+", article.value("title", "?"));
    for (const json& paragraph : article["paragraphs"]) {
      absl::StrAppend(&subject.text, subject.text.empty() ? "" : "\n\n", paragraph["context"].get<std::string>());
      for (const json& qa : paragraph["qas"]) subject.questions.push_back(qa["question"].get<std::string>());
    }
  }
  return subject;
}

std::vector<std::string> ReadQuestions(const std::string& path) {
  std::vector<std::string> questions;
  for (const auto line : absl::StrSplit(ReadFile(path), '\n')) {
    if (!line.empty() && line[0] != '#') questions.emplace_back(line);
  }
  return questions;
}

class StageTimes : public BuildObserver {
 public:
  void OnStage(BuildMethod, BuildStage stage, absl::Duration duration) override {
    std::lock_guard<std::mutex> lock(mutex_);
    seconds_[stage] += absl::ToDoubleSeconds(duration);
  }
  json Take() {
    static const std::map<BuildStage, const char*> kNames = {
        {BuildStage::kTokenising, "tokenise"}, {BuildStage::kSelfStudy, "self_study"},
        {BuildStage::kCompacting, "compact"},  {BuildStage::kTraining, "train"},
        {BuildStage::kEvaluating, "evaluate"}, {BuildStage::kStoring, "store"}};
    std::lock_guard<std::mutex> lock(mutex_);
    json out = json::object();
    for (const auto& [stage, name] : kNames) {
      if (seconds_.contains(stage)) out[name] = seconds_[stage];
    }
    seconds_.clear();
    return out;
  }

 private:
  std::mutex mutex_;
  std::map<BuildStage, double> seconds_;
};

struct Overrides {
  int64_t conversations = 0, steps = 0, rows = 0, queries = 0, min_chunk = 0, max_chunk = 0, max_tokens = 0;
  int64_t evaluate_every = 0;
  double learning_rate = 0.0, temperature = -1.0, validation = 0.0;
  int train_beta = -1, relative = -1;
  std::string start, loss, seeds;
  bool held_out = false;

  void Apply(BuildSpec* spec) const {
    if (conversations > 0) spec->self_study.conversations = conversations;
    if (min_chunk > 0) spec->self_study.min_chunk_tokens = min_chunk;
    if (max_chunk > 0) spec->self_study.max_chunk_tokens = max_chunk;
    if (temperature >= 0.0) spec->self_study.temperature = temperature;
    if (queries > 0) spec->matching.queries = queries;
    if (steps > 0) spec->training.steps = steps;
    if (rows > 0) spec->training.rows_per_step = rows;
    if (max_tokens > 0) spec->training.max_training_tokens = max_tokens;
    if (evaluate_every > 0) spec->training.evaluate_every = evaluate_every;
    if (learning_rate > 0.0) spec->training.learning_rate = learning_rate;
    if (validation > 0.0) spec->training.validation_fraction = validation;
    if (train_beta >= 0) spec->training.train_beta = train_beta != 0;
    if (relative >= 0) spec->training.relative_learning_rate = relative != 0;
    if (start == "prefix") spec->training.start = StartMethod::kPrefix;
    if (loss == "raw") spec->training.loss = LossKind::kRaw;
    if (loss == "tail") spec->training.loss = LossKind::kTail;
    if (loss == "ce") spec->training.loss = LossKind::kCrossEntropy;
    if (seeds == "question") spec->self_study.seed_kinds = {SeedKind::kQuestion};
    if (seeds == "uniform") {
      spec->self_study.seed_kinds = {SeedKind::kStructuring, SeedKind::kSummarisation, SeedKind::kQuestion,
                                     SeedKind::kUseCase, SeedKind::kCreative};
    }
  }
};

BuildMethod ParseMethod(const std::string& name) {
  for (BuildMethod m : {BuildMethod::kCartridge, BuildMethod::kAttentionMatching, BuildMethod::kFull}) {
    if (name == BuildMethodName(m)) return m;
  }
  Die("unknown method " + name);
}

BuildProfile ParseProfile(const std::string& name) {
  if (name == "quick") return BuildProfile::kQuick;
  if (name == "standard") return BuildProfile::kStandard;
  if (name == "thorough") return BuildProfile::kThorough;
  Die("unknown profile " + name);
}

int Main(int argc, char** argv) {
  std::string model_path, squad, output, store_directory;
  std::vector<std::string> articles, documents, question_files, methods = {"CARTRIDGE"}, profiles = {"quick"};
  std::vector<double> ratios = {10.0};
  int threads = 0;
  std::string device = "cpu", weights = "f32";
  size_t max_questions = 0;
  uint64_t seed = 0;
  int64_t batch = 0;
  bool trace = false;
  Overrides overrides;
  CLI::App app("How much of a document's knowledge a memory of it recovers");
  app.add_option("--model", model_path, "GGUF file")->required();
  app.add_option("--squad", squad, "file of articles with questions, in SQuAD format");
  app.add_option("--articles", articles, "numbers of articles, or groups to join such as 20-23")->delimiter(',');
  app.add_option("--document", documents, "text files");
  app.add_option("--questions", question_files, "one file per document: a question a line, # begins a comment");
  app.add_option("--methods", methods, "CARTRIDGE, ATTENTION_MATCHING, FULL")->delimiter(',');
  app.add_option("--profiles", profiles, "quick, standard, thorough")->delimiter(',');
  app.add_option("--ratios", ratios, "document tokens per slot")->delimiter(',');
  app.add_option("--device", device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
  app.add_option("--gpu-weights", weights, "on a GPU: f32 or bf16")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "0: one per core");
  app.add_option("--max-questions", max_questions, "of each document; 0: all");
  app.add_option("--seed", seed);
  app.add_flag("--trace", trace, "host seconds per named span, in each row");
  app.add_option("--batch", batch, "sequences that generate at once; 0: as the device likes it");
  app.add_option("--output", output, "JSON file; default: standard output");
  app.add_option("--store", store_directory, "folder of the store; default: a temporary one, removed at the end");
  app.add_option("--conversations", overrides.conversations);
  app.add_option("--steps", overrides.steps);
  app.add_option("--rows", overrides.rows);
  app.add_option("--queries", overrides.queries);
  app.add_option("--min-chunk", overrides.min_chunk);
  app.add_option("--max-chunk", overrides.max_chunk);
  app.add_option("--max-training-tokens", overrides.max_tokens);
  app.add_option("--evaluate-every", overrides.evaluate_every);
  app.add_option("--learning-rate", overrides.learning_rate);
  app.add_option("--temperature", overrides.temperature);
  app.add_option("--validation", overrides.validation, "share of the conversations held out");
  app.add_option("--train-beta", overrides.train_beta);
  app.add_option("--relative-rates", overrides.relative);
  app.add_option("--start", overrides.start, "prefix, or attention matching");
  app.add_option("--loss", overrides.loss, "raw, tail, ce; default: renormalised");
  app.add_option("--seeds", overrides.seeds, "question, uniform; default: the profile's");
  app.add_flag("--held-out", overrides.held_out, "judge on held-out conversations, not on the given questions");
  CLI11_PARSE(app, argc, argv);
  EnableTrace(trace);

  std::vector<Subject> subjects;
  if (!squad.empty()) {
    const json file = json::parse(ReadFile(squad), nullptr, false);
    if (!file.is_object() || !file.contains("data")) Die(squad + " is not in SQuAD format");
    for (const std::string& which : articles) subjects.push_back(FromSquad(file["data"], which));
  }
  if (documents.size() != question_files.size()) Die("give one --questions file per --document");
  for (size_t i = 0; i < documents.size(); ++i) {
    subjects.push_back(
        {std::filesystem::path(documents[i]).filename(), ReadFile(documents[i]), ReadQuestions(question_files[i])});
  }
  if (subjects.empty()) Die("give --squad with --articles, or --document with --questions");

  CpuBackendOptions cpu;
  cpu.threads = threads;
  CudaBackendOptions cuda;
  cuda.threads = threads;
  cuda.storage = weights == "bf16" ? CudaStorage::kBf16 : CudaStorage::kF32;
  const std::unique_ptr<Backend> backend = device == "cuda" ? Must(MakeCudaBackend(cuda), "cuda") : MakeCpuBackend(cpu);
  const Context ctx{backend.get()};
  const GgufModel model = Must(LoadGgufModel(ctx, model_path), model_path);
  if (!model.chat) Die(model.chat_status.ToString());

  const bool temporary = store_directory.empty();
  if (temporary) {
    std::string pattern = (std::filesystem::temp_directory_path() / "stillhouse-recovered-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) Die("cannot make a temporary folder");
    store_directory = pattern;
  }
  json rows = json::array();
  {
    StoreOptions store_options;
    store_options.directory = store_directory + "/store";
    const std::unique_ptr<Store> store = Must(OpenEmbeddedStore(store_options), store_options.directory);
    Must(store->EnsureTenant("default"), "tenant");
    EngineOptions engine_options;
    engine_options.vocabulary = model.tokenizer->vocab_size();
    engine_options.max_background_sequences = batch;
    if (ctx.backend->device() == DeviceType::kCuda) {  // as the server would
      engine_options.page_budget_bytes = int64_t{8} << 30;
      if (weights == "bf16") engine_options.kv_dtype = DType::kBF16;
    }
    DirectoryOptions directory_options;
    directory_options.dtype = engine_options.kv_dtype;
    Engine engine(ctx, model.weights, engine_options);
    ArtifactFingerprints prints;
    prints.model = model.weights->fingerprint;
    prints.tokenizer = model.tokenizer->Fingerprint();
    prints.chat_template = model.chat->Fingerprint();
    prints.rope_layout = model.weights->config.RopeLayoutName();
    prints.rope_scaling = model.weights->config.rope.Fingerprint();
    prints.dtype = "F32";
    Directory directory(ctx, model.weights, prints, store.get(), directory_options);
    StageTimes times;
    BuildQueueOptions queue_options;
    queue_options.observer = &times;
    BuildQueue queue({&engine, store.get(), &directory, model.tokenizer.get(), model.chat.get()}, queue_options);

    for (size_t d = 0; d < subjects.size(); ++d) {
      Subject& subject = subjects[d];
      if (max_questions > 0 && subject.questions.size() > max_questions) subject.questions.resize(max_questions);
      UploadSpec upload;
      upload.tenant = "default";
      upload.corpus_id = absl::StrCat("d", d);
      upload.size = subject.text.size();
      upload.sha256 = Sha256Hex(subject.text);
      const UploadState state = Must(store->BeginUpload(upload), "upload");
      if (!state.corpus) {
        Must(store->WriteChunk("default", state.upload_id, 0, subject.text), "upload");
        Must(store->Seal("default", state.upload_id), "upload");
      }
      int builds = 0;
      for (const std::string& method : methods) {
        for (const std::string& profile : profiles) {
          for (double ratio : ratios) {
            BuildSpec spec = DefaultBuildSpec(ParseMethod(method), ParseProfile(profile));
            spec.tenant = "default";
            spec.corpus_id = upload.corpus_id;
            spec.cache_id = absl::StrCat("c", builds++);
            spec.replace = true;
            spec.seed = seed;
            if (spec.method != BuildMethod::kFull) spec.compression_ratio = ratio;
            overrides.Apply(&spec);
            if (!overrides.held_out) spec.evaluation.questions = subject.questions;
            const absl::Time begin = absl::Now();
            const BuildInfo queued = Must(queue.Enqueue(spec, ""), "enqueue");
            BuildInfo info;
            std::string last;
            do {
              info = Must(queue.Wait("default", queued.row.operation_id, absl::Now() + absl::Seconds(2)), "wait");
              const std::string line =
                  absl::StrCat(subject.name, " ", method, " ", profile, " ", ratio,
                               "x: ", static_cast<int>(info.progress.fraction * 100), " % ", info.progress.detail);
              if (line != last) std::cerr << line << "\n";
              last = line;
            } while (!IsDone(info.row.state));
            if (info.row.state != OperationState::kSucceeded) Die(subject.name + ": " + info.row.error_message);
            const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
            const PinnedMemory pinned = Must(directory.Pin("default", spec.corpus_id, spec.cache_id), "pin");
            const QualityReport report = Must(QualityReportFromJson(pinned.header.quality_json), "report");
            json row = {{"document", subject.name},
                        {"method", method},
                        {"profile", profile},
                        {"ratio", ratio},
                        {"T", pinned.header.corpus_tokens},
                        {"p", pinned.header.slots},
                        {"conversations", spec.self_study.conversations},
                        {"generated_tokens", report.generated_tokens},
                        {"training_tokens", report.training_tokens},
                        {"best_step", report.best_step},
                        {"last_step", report.last_step},
                        {"questions", report.questions},
                        {"answer_tokens", report.answer_tokens},
                        {"seconds", seconds},
                        {"stage_seconds", times.Take()}};
            if (trace) {
              for (const SpanTotal& span : TakeTrace()) {
                row["spans"][span.name] = {{"count", span.count},
                                           {"seconds", 1e-9 * static_cast<double>(span.nanoseconds)}};
              }
            }
            if (report.off_context_damage) row["off_context_damage"] = *report.off_context_damage;
            for (const QualityReport::Row& r : report.rows) {
              json memory = {{"nll", r.mean_nll}, {"kv_bytes", r.kv_bytes}};
              if (r.mean_kl) memory["kl"] = *r.mean_kl;
              if (r.recovered) memory["recovered"] = *r.recovered;
              row[r.memory] = std::move(memory);
            }
            std::cerr << row.dump() << "\n";
            rows.push_back(std::move(row));
          }
        }
      }
    }
  }
  if (temporary) std::filesystem::remove_all(store_directory);
  std::string command;
  for (int i = 1; i < argc; ++i) absl::StrAppend(&command, i > 1 ? " " : "", argv[i]);
  const std::string text = json{{"backend", backend->name()}, {"arguments", command}, {"rows", rows}}.dump(1);
  if (output.empty()) {
    std::cout << text << "\n";
  } else {
    std::ofstream file(output);
    file << text << "\n";
    if (!file) Die("cannot write " + output);
  }
  return 0;
}

}  // namespace
}  // namespace stillhouse

int main(int argc, char** argv) { return stillhouse::Main(argc, argv); }
