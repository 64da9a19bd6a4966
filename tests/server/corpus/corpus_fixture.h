// A whole server's inside without a server: tiny model, engine, store in a temporary folder, directory.
#ifndef STILLHOUSE_TESTS_SERVER_CORPUS_CORPUS_FIXTURE_H_
#define STILLHOUSE_TESTS_SERVER_CORPUS_CORPUS_FIXTURE_H_

#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "cache_store/store.h"
#include "gtest/gtest.h"
#include "kernels/base/sha256.h"
#include "server/corpus/build_queue.h"
#include "server/corpus/directory.h"
#include "server/load/llama_gguf.h"
#include "tests/support/test_backend.h"
#include "tests/support/tiny_model.h"

namespace stillhouse {

// Owns everything that a build works with. Opening a second one on the same folder is a restarted server.
class Rig {
 public:
  Rig(const std::string& model_path, const std::string& folder, int64_t budget_bytes = int64_t{1} << 30) {
    CpuBackendOptions cpu;
    cpu.threads = 2;
    backend = testing::MakeTestBackend(cpu);
    ctx.backend = backend.get();
    absl::StatusOr<GgufModel> loaded = LoadGgufModel(ctx, model_path);
    STILLHOUSE_CHECK(loaded.ok()) << loaded.status().ToString();
    model = *std::move(loaded);
    StoreOptions options;
    options.directory = folder;
    absl::StatusOr<std::unique_ptr<Store>> opened = OpenEmbeddedStore(options);
    STILLHOUSE_CHECK(opened.ok()) << opened.status().ToString();
    store = *std::move(opened);
    STILLHOUSE_CHECK(store->EnsureTenant("acme").ok());
    EngineOptions engine_options;
    engine_options.vocabulary = model.tokenizer->vocab_size();
    engine_options.page_budget_bytes = int64_t{1} << 26;
    engine = std::make_unique<Engine>(ctx, model.weights, engine_options);
    prints.model = model.weights->fingerprint;
    prints.tokenizer = model.tokenizer->Fingerprint();
    prints.chat_template = model.chat->Fingerprint();
    prints.rope_layout = model.weights->config.RopeLayoutName();
    prints.rope_scaling = model.weights->config.rope.Fingerprint();
    prints.dtype = "F32";
    DirectoryOptions directory_options;
    directory_options.budget_bytes = budget_bytes;
    directory = std::make_unique<Directory>(ctx, model.weights, prints, store.get(), directory_options);
  }

  BuildServices services() {
    return {engine.get(), store.get(), directory.get(), model.tokenizer.get(), model.chat.get()};
  }

  void Upload(const std::string& corpus_id, const std::string& text, const std::string& tenant = "acme") {
    if (store->GetCorpus(tenant, corpus_id).ok()) return;
    STILLHOUSE_CHECK(store->EnsureTenant(tenant).ok());
    UploadSpec spec;
    spec.tenant = tenant;
    spec.corpus_id = corpus_id;
    spec.size = text.size();
    spec.sha256 = Sha256Hex(text);
    absl::StatusOr<UploadState> state = store->BeginUpload(spec);
    STILLHOUSE_CHECK(state.ok()) << state.status().ToString();
    if (!text.empty()) STILLHOUSE_CHECK(store->WriteChunk(tenant, state->upload_id, 0, text).ok());
    const absl::Status sealed = store->Seal(tenant, state->upload_id).status();
    STILLHOUSE_CHECK(sealed.ok()) << sealed.ToString();
  }

  std::unique_ptr<Backend> backend;
  Context ctx;
  GgufModel model;
  std::unique_ptr<Store> store;
  ArtifactFingerprints prints;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Directory> directory;
};

// A text of about `words` words in paragraphs.
inline std::string StoryOf(int words) {
  static const char* kWords[] = {"the",   "mill",    "of",   "river",  "stone", "and",    "grain",
                                 "went",  "to",      "old",  "house",  "in",    "winter", "with",
                                 "seven", "barrels", "that", "rested", "for",   "years"};
  std::string text;
  for (int i = 0; i < words; ++i) {
    text += kWords[(i * 7 + i / 5) % 20];
    text += i % 40 == 39 ? ".\n\n" : i % 9 == 8 ? ". " : " ";
  }
  return text;
}

// A build of seconds on the tiny model.
inline BuildSpec SmallSpec(BuildMethod method, const std::string& corpus_id, const std::string& cache_id) {
  BuildSpec spec = DefaultBuildSpec(method, BuildProfile::kQuick);
  spec.tenant = "acme";
  spec.corpus_id = corpus_id;
  spec.cache_id = cache_id;
  spec.self_study.conversations = 10;
  spec.self_study.max_question_tokens = 8;
  spec.self_study.max_answer_tokens = 6;
  spec.self_study.min_chunk_tokens = 20;
  spec.self_study.max_chunk_tokens = 60;
  spec.training.steps = 6;
  spec.training.evaluate_every = 2;
  spec.training.max_training_tokens = 100000;
  spec.training.validation_fraction = 0.2;
  spec.matching.queries = 64;
  return spec;
}

class CorpusTest : public ::testing::Test {
 protected:
  CorpusTest() {
    std::string pattern = ::testing::TempDir() + "corpusXXXXXX";
    STILLHOUSE_CHECK(mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
    model_path_ = stillhouse::testing::WriteTinyModel();
    Open();
  }
  ~CorpusTest() override {
    rig_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Open(int64_t budget_bytes = int64_t{1} << 30) {
    rig_.reset();
    rig_ = std::make_unique<Rig>(model_path_, folder_ + "/store", budget_bytes);
  }

  std::string folder_, model_path_;
  std::unique_ptr<Rig> rig_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_TESTS_SERVER_CORPUS_CORPUS_FIXTURE_H_
