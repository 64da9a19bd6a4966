#include "server/corpus/builder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "kernels/ops/quant.h"
#include "server/corpus/build_record.h"
#include "server/corpus/seeds.h"
#include "server/train/trainer.h"

namespace stillhouse {
namespace {

constexpr int64_t kLeastSlots = 4;  // of a compression ratio
constexpr int kStages = 8;

// Rows of one task: under about a second of a small machine's processor, or enough work for an accelerator.
constexpr int64_t kCpuTaskRows = 320;
constexpr int64_t kDeviceTaskRows = 16384;

TrainingLoss LossOf(LossKind kind) {
  switch (kind) {
    case LossKind::kRaw:
      return TrainingLoss::kRaw;
    case LossKind::kTail:
      return TrainingLoss::kTail;
    case LossKind::kCrossEntropy:
      return TrainingLoss::kCrossEntropy;
    case LossKind::kRenormalised:
      break;
  }
  return TrainingLoss::kRenormalised;
}

// Rounds keys and values to the element type that the file will have, so that what is judged is what is served.
void RoundMemory(const Context& ctx, const std::string& dtype, Memory* memory) {
  if (dtype == "F32") return;
  for (LayerKv& kv : memory->layers) {
    for (Tensor* t : {&kv.k, &kv.v}) {
      std::vector<float> values = ctx.ToFloats(*t);
      for (float& x : values) x = dtype == "F16" ? HalfToFloat(FloatToHalf(x)) : Bf16ToFloat(FloatToBf16(x));
      ctx.backend->Upload(values.data(), *t);
    }
  }
}

}  // namespace

class CacheBuilder::Impl {
 public:
  Impl(const BuildServices& services, const BuildSpec& spec, std::string operation_id, BuilderHooks hooks)
      : services_(services), spec_(spec), operation_id_(std::move(operation_id)), hooks_(std::move(hooks)) {
    runtime_.engine = services.engine;
    runtime_.tokenizer = services.tokenizer;
    runtime_.chat = services.chat;
    runtime_.tenant = spec.tenant;
    runtime_.operation_id = operation_id_;
    runtime_.check = hooks_.check;
    runtime_.teacher_bytes = Limits(0).teacher_bytes;
  }

  void Resume(std::string_view bytes, const BuildProgress& progress) {
    progress_ = progress;
    if (bytes.empty()) return;
    absl::StatusOr<BuildCheckpoint> checkpoint = BuildCheckpoint::FromBytes(bytes);
    if (!checkpoint.ok()) {
      STILLHOUSE_LOG(WARNING) << "build " << operation_id_ << " begins again: " << checkpoint.status().message();
      return;
    }
    state_ = *std::move(checkpoint);
  }

  absl::StatusOr<ArtifactRow> Run() {
    begin_ = last_save_ = stage_begin_ = absl::Now();
    if (progress_.start_time == absl::InfinitePast()) progress_.start_time = begin_;
    begin_fraction_ = progress_.fraction;
    absl::StatusOr<ArtifactRow> row = RunStages();
    EndStage();
    if (absl::IsUnavailable(row.status())) {
      // The server stops: what was done since the last checkpoint is worth keeping.
      const absl::Status saved = Save();
      if (!saved.ok()) STILLHOUSE_LOG(WARNING) << "build " << operation_id_ << ": " << saved.message();
    }
    return row;
  }

  // What training needed at one time is kept by the pool for the next step; after the last one it goes back, as does
  // the room for the file, which the store counts or never gets.
  void Release() {
    room_.clear();
    trainer_.reset();
    result_ = StartMemory();
    runtime_
        .Run([](const Context& ctx) {
          ctx.pool().Trim();
          return absl::OkStatus();
        })
        .IgnoreError();
  }

 private:
  // ---- Progress.

  double Elapsed() const { return state_.elapsed_seconds + absl::ToDoubleSeconds(absl::Now() - begin_); }

  void EndStage() {
    const absl::Time now = absl::Now();
    if (hooks_.observer != nullptr && progress_.stage != BuildStage::kQueued) {
      hooks_.observer->OnStage(spec_.method, progress_.stage, now - stage_begin_);
    }
    stage_begin_ = now;
  }

  void Enter(BuildStage stage, std::string detail) {
    EndStage();
    progress_.stage = stage;
    Report(0.0, std::move(detail));
  }

  void Report(double stage_fraction, std::string detail) {
    double done = 0.0, total = 0.0;
    for (int s = 0; s < kStages; ++s) {
      total += cost_[static_cast<size_t>(s)];
      if (s < static_cast<int>(progress_.stage)) done += cost_[static_cast<size_t>(s)];
    }
    done += cost_[static_cast<size_t>(progress_.stage)] * std::clamp(stage_fraction, 0.0, 1.0);
    const double fraction = total > 0.0 ? std::min(done / total, 0.999) : 0.0;
    progress_.fraction = std::max(progress_.fraction, fraction);
    // From this run's own speed.
    const double gained = progress_.fraction - begin_fraction_;
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin_);
    progress_.eta_seconds = gained > 0.01 ? seconds * (1.0 - progress_.fraction) / gained : -1.0;
    progress_.detail = std::move(detail);
    if (!document_.valid_utf8)
      progress_.detail += " (the document is not valid UTF-8: its bytes were kept as they are)";
    hooks_.report(progress_);
  }

  // Costs in rows of a forward pass.
  void PlanCosts() {
    const double tokens = static_cast<double>(document_.framed_tokens());
    const double conversations =
        static_cast<double>(spec_.self_study.conversations + static_cast<int64_t>(spec_.self_study.questions.size()));
    const double answer = 0.7 * static_cast<double>(spec_.self_study.max_answer_tokens);
    auto cost = [&](BuildStage stage) -> double& { return cost_[static_cast<size_t>(stage)]; };
    cost(BuildStage::kTokenising) = 1.0 + tokens / 1000.0;
    cost(BuildStage::kStoring) = 10.0 + 0.05 * static_cast<double>(slots_);
    if (!whole_) {
      cost(BuildStage::kSelfStudy) = 2.0 * tokens + conversations * (70.0 + 1.2 * answer);
      cost(BuildStage::kCompacting) = 0.6 * tokens + 2.5 * static_cast<double>(spec_.matching.queries);
      if (spec_.method == BuildMethod::kCartridge) {
        const double planned =
            std::min(static_cast<double>(spec_.training.max_training_tokens),
                     static_cast<double>(spec_.training.steps * spec_.training.rows_per_step) * (25.0 + answer));
        cost(BuildStage::kTraining) = 2.8 * planned;
      }
    } else {
      cost(BuildStage::kCompacting) = tokens;
    }
    if (!spec_.evaluation.skip) {
      const double questions = spec_.evaluation.questions.empty()
                                   ? conversations * spec_.training.validation_fraction
                                   : static_cast<double>(spec_.evaluation.questions.size());
      cost(BuildStage::kEvaluating) = 20.0 + questions * 330.0;
    }
  }

  // ---- Checkpoints.

  absl::Status Save() {
    if (trainer_ && !trainer_->done()) {
      STILLHOUSE_RETURN_IF_ERROR(services_.engine->Execute(Priority::kBackground, [&](const Context& ctx) {
        state_.trainer = trainer_->Save(ctx);
        return absl::OkStatus();
      }));
    }
    BuildCheckpoint& state = state_;
    const double before = state.elapsed_seconds;
    state.elapsed_seconds = Elapsed();
    if (teacher_) state.prefill_seconds = std::max(state.prefill_seconds, teacher_->prefill_seconds());
    const std::string bytes = state.ToBytes();
    state.elapsed_seconds = before;
    last_save_ = absl::Now();
    return hooks_.save(bytes);
  }

  // Between two pieces of work: saves when it is time, and notices when the corpus went away.
  absl::Status SaveWhenDue() {
    if (absl::Now() - last_save_ < hooks_.save_every) return absl::OkStatus();
    STILLHOUSE_RETURN_IF_ERROR(CorpusStillThere());
    return Save();
  }

  // Of the file: its keys and values.
  uint64_t LeastBytes() const {
    const int64_t element = services_.directory->fingerprints().dtype == "F32" ? 4 : 2;
    return static_cast<uint64_t>(slots_ * runtime_.config().kv_bytes_per_slot(element));
  }

  // Room for a file of `bytes` in all.
  absl::Status AdmitBytes(uint64_t bytes) {
    if (bytes <= admitted_bytes_ || !hooks_.admit_bytes) return absl::OkStatus();
    STILLHOUSE_ASSIGN_OR_RETURN(std::shared_ptr<void> room, hooks_.admit_bytes(bytes - admitted_bytes_));
    room_.push_back(std::move(room));
    admitted_bytes_ = bytes;
    return absl::OkStatus();
  }

  absl::Status CorpusStillThere() {
    const absl::StatusOr<CorpusRow> row = services_.store->GetCorpus(spec_.tenant, spec_.corpus_id);
    if (absl::IsNotFound(row.status())) return absl::NotFoundError("the corpus was deleted while its cache was built");
    return row.status();
  }

  // ---- Stages.

  absl::StatusOr<ArtifactRow> RunStages() {
    Enter(BuildStage::kTokenising, "reading the document");
    STILLHOUSE_RETURN_IF_ERROR(runtime_.check());
    STILLHOUSE_RETURN_IF_ERROR(ReadDocument());
    STILLHOUSE_RETURN_IF_ERROR(PlanMemory());
    // Before anything is computed.
    STILLHOUSE_RETURN_IF_ERROR(AdmitBytes(LeastBytes()));
    PlanCosts();
    if (!state_.finished.present) {
      STILLHOUSE_RETURN_IF_ERROR(MakeMemory());
    } else {
      STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) -> absl::Status {
        STILLHOUSE_ASSIGN_OR_RETURN(result_, state_.finished.ToMemory(ctx, runtime_.config()));
        return absl::OkStatus();
      }));
    }
    if (!state_.judged) STILLHOUSE_RETURN_IF_ERROR(Evaluate());
    return Store();
  }

  absl::Status ReadDocument() {
    absl::StatusOr<CorpusRow> corpus = services_.store->GetCorpus(spec_.tenant, spec_.corpus_id);
    STILLHOUSE_RETURN_IF_ERROR(corpus.status());
    STILLHOUSE_ASSIGN_OR_RETURN(const std::string text, services_.store->ReadCorpus(spec_.tenant, spec_.corpus_id));
    if (state_.corpus_sha256 != corpus->sha256) {
      state_ = BuildCheckpoint();
      state_.corpus_sha256 = corpus->sha256;
    }
    document_ = TokeniseDocument(*services_.tokenizer, *services_.chat, text);
    if (document_.tokens.empty()) {
      return absl::FailedPreconditionError("the document is empty, or holds nothing that the model's tokenizer knows");
    }
    return services_.engine->Execute(Priority::kBackground, [&](const Context& ctx) {
      const int64_t suits = ctx.backend->device() == DeviceType::kCpu ? kCpuTaskRows : kDeviceTaskRows;
      const int64_t most = Limits(0).task_rows;
      runtime_.task_rows = most > 0 ? std::min(suits, most) : suits;
      return absl::OkStatus();
    });
  }

  // Slots, and the windows of the document.
  absl::Status PlanMemory() {
    const int64_t tokens = document_.framed_tokens(), context = services_.engine->context_limit();
    if (spec_.method == BuildMethod::kFull) {
      slots_ = tokens;
    } else if (spec_.slots > 0) {
      slots_ = std::min(spec_.slots, tokens);
    } else {
      slots_ = std::min(
          tokens, std::max(kLeastSlots, static_cast<int64_t>(static_cast<double>(tokens) / spec_.compression_ratio)));
    }
    // Room behind the document for every question and answer of the build, and for ordinary ones later.
    int64_t reserve = spec_.self_study.max_question_tokens + spec_.self_study.max_answer_tokens + 48;
    for (const auto& [questions, answer] : {std::pair<const std::vector<std::string>*, int64_t>{
                                                &spec_.self_study.questions, spec_.self_study.max_answer_tokens},
                                            {&spec_.evaluation.questions, spec_.evaluation.max_answer_tokens}}) {
      for (const std::string& question : *questions) {
        STILLHOUSE_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, QuestionPrompt(*services_.chat, question));
        reserve = std::max(reserve, static_cast<int64_t>(prompt.size()) + answer);
      }
    }
    if (spec_.method == BuildMethod::kFull) {
      reserve = std::min<int64_t>(reserve, context / 8);
      if (tokens + reserve > context) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the document has ", tokens, " tokens and the model's context ", context, " positions, of which ", reserve,
            " are kept for questions: a FULL cache cannot hold it; build a CARTRIDGE or ATTENTION_MATCHING cache"));
      }
    } else {
      reserve = std::max(reserve, std::min<int64_t>(1024, context / 8));
    }
    STILLHOUSE_ASSIGN_OR_RETURN(teacher_, Teacher::Create(&runtime_, &document_, reserve));
    whole_ = teacher_->window_count() == 1 && slots_ >= tokens;
    return spec_.method == BuildMethod::kCartridge && !whole_ ? PlanTraining() : absl::OkStatus();
  }

  // The larger the memory that is trained, the fewer rows at once.
  absl::Status PlanTraining() {
    const int64_t trained = CartridgeTrainer::kMemories * slots_ * runtime_.config().kv_bytes_per_slot();
    const BuildLimits limits = Limits(trained);
    if (trained > limits.trained_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "a memory of ", slots_, " slots takes ", BytesForPeople(trained),
          " of the device while it is trained, and at most ", BytesForPeople(limits.trained_bytes),
          " are allowed: ask for fewer slots, split the document into several corpora, or give the server more "
          "(--device-memory)"));
    }
    if (limits.task_rows > 0) runtime_.task_rows = std::min(runtime_.task_rows, limits.task_rows);
    checkpoint_rows_ = limits.checkpoint_rows;
    return absl::OkStatus();
  }

  BuildLimits Limits(int64_t trained) const {
    const ModelConfig& config = services_.engine->weights().config;
    return services_.device_bytes ? LimitsOfBuilds(config, *services_.device_bytes, trained) : BuildLimits();
  }

  absl::Status MakeMemory() {
    if (whole_) {
      Enter(BuildStage::kCompacting, absl::StrCat("the memory holds all ", slots_, " tokens"));
      STILLHOUSE_ASSIGN_OR_RETURN(const std::shared_ptr<const Memory> window, teacher_->Window(0));
      STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) {
        result_.memory = SliceMemory(ctx, *window, 0, window->slots);
        return absl::OkStatus();
      }));
    } else {
      STILLHOUSE_RETURN_IF_ERROR(SelfStudy());
      STILLHOUSE_RETURN_IF_ERROR(Compact());
      slots_ = result_.memory->slots;
      if (spec_.method == BuildMethod::kCartridge) STILLHOUSE_RETURN_IF_ERROR(Train());
    }
    result_.memory->label = BuildMethodName(spec_.method);
    STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) {
      RoundMemory(ctx, services_.directory->fingerprints().dtype, result_.memory.get());
      state_.finished = MemoryBytes::From(ctx, result_);
      return absl::OkStatus();
    }));
    state_.start = MemoryBytes();
    state_.trainer.clear();
    trainer_.reset();
    return Save();
  }

  absl::Status SelfStudy() {
    Enter(BuildStage::kSelfStudy, "writing questions");
    const int64_t wanted = spec_.self_study.conversations + static_cast<int64_t>(spec_.self_study.questions.size());
    auto tick = [&](double fraction) -> absl::Status {
      Report(fraction,
             state_.study.questions_done
                 ? absl::StrCat("answering ", state_.study.generated.size() + state_.study.given.size(), " questions")
                 : absl::StrCat("writing ", wanted, " questions"));
      return SaveWhenDue();
    };
    const bool teach_questions = spec_.method == BuildMethod::kCartridge && spec_.training.train_on_question &&
                                 spec_.training.loss != LossKind::kCrossEntropy;
    STILLHOUSE_RETURN_IF_ERROR(
        RunSelfStudy(runtime_, spec_.self_study, teach_questions, spec_.seed, teacher_.get(), tick, &state_.study));
    SplitConversations();
    return absl::OkStatus();
  }

  // Held out: a draw of the generated conversations. The caller's own questions are always trained on.
  void SplitConversations() {
    training_.clear();
    held_out_.clear();
    const std::vector<Conversation>& all = state_.study.generated;
    int64_t hold =
        static_cast<int64_t>(std::llround(spec_.training.validation_fraction * static_cast<double>(all.size())));
    const bool needed =
        spec_.method == BuildMethod::kCartridge || (!spec_.evaluation.skip && spec_.evaluation.questions.empty());
    hold = needed && all.size() >= 2 ? std::clamp<int64_t>(hold, 1, static_cast<int64_t>(all.size()) - 1) : 0;
    std::vector<std::pair<uint64_t, size_t>> draws;
    for (size_t i = 0; i < all.size(); ++i) draws.emplace_back(MixDraw(spec_.seed ^ 0x686f6c64u, i), i);
    std::sort(draws.begin(), draws.end());
    std::vector<bool> held(all.size(), false);
    for (int64_t i = 0; i < hold; ++i) held[draws[static_cast<size_t>(i)].second] = true;
    for (size_t i = 0; i < all.size(); ++i) (held[i] ? held_out_ : training_).push_back(&all[i]);
    for (const Conversation& c : state_.study.given) training_.push_back(&c);
  }

  absl::Status Compact() {
    if (state_.start.present) {
      return runtime_.Run([&](const Context& ctx) -> absl::Status {
        STILLHOUSE_ASSIGN_OR_RETURN(result_, state_.start.ToMemory(ctx, runtime_.config()));
        return absl::OkStatus();
      });
    }
    Enter(BuildStage::kCompacting, absl::StrCat("choosing ", slots_, " slots"));
    const bool prefix = spec_.method == BuildMethod::kCartridge && spec_.training.start == StartMethod::kPrefix;
    if (prefix) {
      STILLHOUSE_ASSIGN_OR_RETURN(result_, TakePrefix(runtime_, slots_, teacher_.get()));
    } else {
      STILLHOUSE_ASSIGN_OR_RETURN(
          result_,
          MatchAttention(runtime_, spec_.matching, slots_, spec_.seed, training_, teacher_.get(), [&](double fraction) {
            Report(fraction, absl::StrCat("fitting ", slots_, " slots"));
            return SaveWhenDue();
          }));
    }
    if (spec_.method != BuildMethod::kCartridge) return absl::OkStatus();
    STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) {
      state_.start = MemoryBytes::From(ctx, result_);
      return absl::OkStatus();
    }));
    return Save();
  }

  absl::Status Train() {
    Enter(BuildStage::kTraining, "preparing");
    if (training_.empty()) {
      return absl::FailedPreconditionError(
          "the model wrote no usable conversations about the document: give self_study.questions, or build an "
          "ATTENTION_MATCHING or FULL cache");
    }
    if (slots_ < 2) {
      STILLHOUSE_LOG(INFO) << "build " << operation_id_ << ": one slot leaves nothing to train";
      return absl::OkStatus();
    }
    const TrainingSpec& t = spec_.training;
    TrainerOptions options;
    options.learning_rate = t.learning_rate;
    options.relative_learning_rate = t.relative_learning_rate;
    options.warmup_fraction = t.warmup_fraction;
    options.rows_per_step = t.rows_per_step;
    options.row_tokens = std::min(t.row_tokens, services_.engine->context_limit() - result_.memory->next_position);
    options.steps = t.steps;
    options.max_training_tokens = t.max_training_tokens;
    options.frozen_slots = std::min(t.frozen_slots, slots_ - 1);
    options.train_beta = t.train_beta;
    options.loss = LossOf(t.loss);
    options.train_on_question = t.train_on_question;
    options.clip_norm = t.clip_norm;
    options.early_stop_patience = t.early_stop_patience;
    options.evaluate_every = t.evaluate_every;
    options.weight_decay = t.weight_decay;
    options.beta1 = t.beta1;
    options.beta2 = t.beta2;
    options.seed = spec_.seed;
    options.task_rows = runtime_.task_rows;
    options.checkpoint_rows = checkpoint_rows_;
    std::vector<Conversation> training, held_out;
    for (const Conversation* c : training_) training.push_back(*c);
    for (const Conversation* c : held_out_) held_out.push_back(*c);
    STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) -> absl::Status {
      // Weights are the engine's, which outlives every build.
      std::shared_ptr<const Weights> weights(std::shared_ptr<const Weights>(), &services_.engine->weights());
      STILLHOUSE_ASSIGN_OR_RETURN(trainer_, CartridgeTrainer::Create(ctx, std::move(weights), *result_.memory, options,
                                                                     std::move(training), std::move(held_out)));
      if (state_.trainer.empty()) return absl::OkStatus();
      return trainer_->Restore(ctx, state_.trainer);
    }));
    while (!trainer_->done()) {
      STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) { return trainer_->Advance(ctx); }));
      Report(trainer_->rows_done_fraction(),
             trainer_->step() == 0
                 ? absl::StrFormat("step 0 of %d", trainer_->planned_steps())
                 : absl::StrFormat("step %d of %d, loss %.3f, held-out %.3f", trainer_->step(),
                                   trainer_->planned_steps(), trainer_->last_loss(), trainer_->best_loss()));
      STILLHOUSE_RETURN_IF_ERROR(SaveWhenDue());
    }
    state_.report.training_tokens = trainer_->trained_tokens();
    state_.report.best_step = trainer_->best_step();
    state_.report.last_step = trainer_->step();
    return runtime_.Run([&](const Context& ctx) {
      result_.memory = trainer_->Best(ctx);
      return absl::OkStatus();
    });
  }

  absl::Status Evaluate() {
    Enter(BuildStage::kEvaluating, "asking the questions");
    QualityReport& report = state_.report;
    if (!spec_.evaluation.skip) {
      Evaluator evaluator(&runtime_);
      std::vector<Conversation> held_out;
      const bool uploaded = !spec_.evaluation.questions.empty();
      if (uploaded) {
        if (!state_.uploaded_ready) {
          STILLHOUSE_ASSIGN_OR_RETURN(
              state_.uploaded,
              evaluator.PrepareUploaded(spec_.evaluation.questions, spec_.evaluation.answers,
                                        spec_.evaluation.max_answer_tokens, teacher_.get(), &state_.generated_tokens));
          state_.uploaded_ready = true;
        }
      } else if (!whole_) {
        SplitConversations();
        for (const Conversation* c : held_out_) held_out.push_back(*c);
      }
      const std::vector<Conversation>& conversations = uploaded ? state_.uploaded : held_out;
      if (!conversations.empty()) {
        report.question_source = uploaded ? "uploaded" : "held-out";
        report.answer_tokens = 0;
        const bool greedy = spec_.evaluation.answers.empty();
        STILLHOUSE_RETURN_IF_ERROR(evaluator.Judge(
            conversations, greedy, result_.memory, teacher_.get(),
            [&](double fraction) {
              Report(0.3 + 0.7 * fraction, absl::StrCat("judging on ", conversations.size(), " questions"));
              return SaveWhenDue();
            },
            &report));
      }
    }
    report.generated_tokens = state_.study.generated_tokens + state_.generated_tokens;
    report.build_seconds = Elapsed();
    const double prefill = std::max(state_.prefill_seconds, teacher_->prefill_seconds());
    if (prefill > 0.0) report.break_even_queries = std::ceil(report.build_seconds / prefill);
    state_.judged = true;
    state_.create_unix_micros = absl::ToUnixMicros(absl::Now());
    // What was made on the way is not needed any more.
    state_.study = SelfStudyState();
    state_.uploaded.clear();
    return Save();
  }

  absl::StatusOr<ArtifactRow> Store() {
    Enter(BuildStage::kStoring, "writing the cache");
    STILLHOUSE_RETURN_IF_ERROR(runtime_.check());
    STILLHOUSE_RETURN_IF_ERROR(CorpusStillThere());
    ArtifactHeader header;
    header.fingerprints = services_.directory->fingerprints();
    header.method = BuildMethodName(spec_.method);
    header.position_rule = PositionRule::kKeep;
    // Whatever the template begins with, every head uses the first column as one uses a BOS.
    header.has_bos = !document_.header.empty();
    header.frozen_slots = spec_.method == BuildMethod::kCartridge && !whole_
                              ? static_cast<uint32_t>(std::min(spec_.training.frozen_slots, result_.memory->slots))
                              : 0;
    header.corpus_sha256 = state_.corpus_sha256;
    header.corpus_tokens = static_cast<uint64_t>(document_.framed_tokens());
    header.hyperparameters_json = ProvenanceJson(spec_);
    header.versions_json = "{\"builder\":1}";
    header.quality_json = QualityReportToJson(state_.report);
    header.create_unix_micros = state_.create_unix_micros;
    header = DescribeMemory(runtime_.config(), *result_.memory, std::move(header), !result_.positions.empty());

    STILLHOUSE_ASSIGN_OR_RETURN(const std::unique_ptr<BlobWriter> blob, services_.store->NewBlob());
    STILLHOUSE_RETURN_IF_ERROR(runtime_.Run([&](const Context& ctx) {
      return StoreMemory(ctx, runtime_.config(), *result_.memory, header, blob.get(), result_.positions);
    }));
    STILLHOUSE_RETURN_IF_ERROR(AdmitBytes(blob->size()));
    ArtifactSpec artifact;
    artifact.tenant = spec_.tenant;
    artifact.corpus_id = spec_.corpus_id;
    artifact.cache_id = spec_.cache_id;
    artifact.method = header.method;
    artifact.summary_json = SummaryJson(header, spec_.display_name);
    // A server that stops between this commit and the operation's end writes the same bytes again, and gets the same
    // row.
    artifact.request_id = operation_id_;
    artifact.replace = spec_.replace;
    artifact.expected_etag = spec_.expected_etag;
    STILLHOUSE_ASSIGN_OR_RETURN(const ArtifactRow row, services_.store->PutArtifact(artifact, blob.get()));
    services_.directory->Publish(spec_.tenant, spec_.corpus_id, spec_.cache_id, row, header, result_.memory);
    return row;
  }

  const BuildServices services_;
  const BuildSpec spec_;
  const std::string operation_id_;
  const BuilderHooks hooks_;
  BuildRuntime runtime_;

  BuildCheckpoint state_;
  Document document_;
  std::unique_ptr<Teacher> teacher_;
  int64_t slots_ = 0;
  bool whole_ = false;  // the memory is the document's own keys and values
  int64_t checkpoint_rows_ = 0;
  std::vector<const Conversation*> training_, held_out_;
  std::unique_ptr<CartridgeTrainer> trainer_;
  StartMemory result_;

  BuildProgress progress_;
  std::array<double, kStages> cost_ = {};
  absl::Time begin_, stage_begin_, last_save_;
  double begin_fraction_ = 0.0;

  std::vector<std::shared_ptr<void>> room_;  // for the file, until the store counts it
  uint64_t admitted_bytes_ = 0;
};

CacheBuilder::CacheBuilder(const BuildServices& services, const BuildSpec& spec, std::string operation_id,
                           BuilderHooks hooks)
    : impl_(std::make_unique<Impl>(services, spec, std::move(operation_id), std::move(hooks))) {}
CacheBuilder::~CacheBuilder() = default;
void CacheBuilder::Resume(std::string_view checkpoint, const BuildProgress& progress) {
  impl_->Resume(checkpoint, progress);
}
absl::StatusOr<ArtifactRow> CacheBuilder::Run() {
  absl::StatusOr<ArtifactRow> row = impl_->Run();
  impl_->Release();
  return row;
}

}  // namespace stillhouse
