#include "server/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/base/trace.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/loss.h"
#include "kernels/ops/optimizer.h"

namespace stillhouse {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A small counter-based generator: the same numbers on every platform.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

DistillMode ModeOf(TrainingLoss loss) {
  switch (loss) {
    case TrainingLoss::kRaw:
      return DistillMode::kRaw;
    case TrainingLoss::kTail:
      return DistillMode::kTail;
    default:
      return DistillMode::kRenormalised;
  }
}

void Append(const Context& ctx, const Tensor& t, ByteWriter* out) {
  out->Array(t.defined() ? ctx.ToFloats(t) : std::vector<float>());
}

absl::Status Read(const Context& ctx, const Tensor& t, ByteReader* in) {
  std::vector<float> values;
  STILLHOUSE_RETURN_IF_ERROR(in->Array(&values));
  const int64_t expected = t.defined() ? t.elements() : 0;
  if (static_cast<int64_t>(values.size()) != expected) {
    return absl::DataLossError("a training checkpoint of another memory");
  }
  if (expected > 0) ctx.backend->Upload(values.data(), t);
  return absl::OkStatus();
}

void CopyInto(const Context& ctx, const Tensor& from, const Tensor& to) {
  if (from.defined()) ctx.backend->Copy(from, to);
}

// Per layer: the root mean square over the mean of all layers'.
std::vector<float> LayerScales(const Context& ctx, const Tensor& values, bool relative) {
  const int64_t layers = values.dim(0);
  std::vector<float> scales(static_cast<size_t>(layers), 1.0f);
  if (!relative) return scales;
  double mean = 0.0;
  for (int64_t l = 0; l < layers; ++l) {
    double sum = 0.0;
    for (float x : ctx.ToFloats(values.Select(0, l))) sum += static_cast<double>(x) * x;
    const double rms = std::sqrt(sum * static_cast<double>(layers) / static_cast<double>(values.elements()));
    scales[static_cast<size_t>(l)] = static_cast<float>(rms);
    mean += rms / static_cast<double>(layers);
  }
  for (float& scale : scales) scale = mean > 0.0 ? static_cast<float>(scale / mean) : 1.0f;
  return scales;
}

// acc += x.
void Accumulate(const Context& ctx, const Tensor& acc, const Tensor& x) {
  if (!acc.defined()) return;
  ctx.kernels().Add(*ctx.backend, AddArgs{acc, x, acc});
}

}  // namespace

CartridgeTrainer::~CartridgeTrainer() = default;

CartridgeTrainer::Values CartridgeTrainer::MakeValues(const Context& ctx) const {
  const ModelConfig& c = weights_->config;
  Values out;
  out.k = ctx.EmptyF32({c.layers, c.kv_heads, slots_, c.head_dim});
  out.v = ctx.EmptyF32({c.layers, c.kv_heads, slots_, c.head_dim});
  return out;
}

Tensor CartridgeTrainer::Trained(const Tensor& t) const { return t.Slice(2, frozen_, slots_); }

absl::StatusOr<std::unique_ptr<CartridgeTrainer>> CartridgeTrainer::Create(
    const Context& ctx, std::shared_ptr<const Weights> weights, const Memory& start, const TrainerOptions& options,
    std::vector<Conversation> training, std::vector<Conversation> held_out) {
  if (start.slots <= options.frozen_slots) {
    return absl::InvalidArgumentError(absl::StrCat("a memory of ", start.slots, " slots of which ",
                                                   options.frozen_slots, " are frozen leaves nothing to train"));
  }
  if (training.empty()) return absl::InvalidArgumentError("there are no conversations to train on");
  std::unique_ptr<CartridgeTrainer> t(new CartridgeTrainer());
  t->weights_ = std::move(weights);
  t->options_ = options;
  t->training_ = std::move(training);
  t->held_out_ = std::move(held_out);
  t->slots_ = start.slots;
  t->next_position_ = start.next_position;
  t->frozen_ = options.frozen_slots;
  t->label_ = start.label;
  t->last_loss_ = t->start_loss_ = t->best_loss_ = kNaN;

  for (std::vector<Conversation>* set : {&t->training_, &t->held_out_}) {
    for (Conversation& c : *set) {
      if (c.prompt.empty() || c.answer.empty()) {
        return absl::InvalidArgumentError("a conversation without a question or an answer");
      }
      // At least one answer token stays, however long the question.
      const int64_t room = std::max<int64_t>(1, options.row_tokens - static_cast<int64_t>(c.prompt.size()));
      if (static_cast<int64_t>(c.answer.size()) > room) {
        c.answer.resize(static_cast<size_t>(room));
        const size_t kept = static_cast<size_t>(room) * static_cast<size_t>(c.answer_teacher.width);
        c.answer_teacher.ids.resize(kept);
        c.answer_teacher.logprobs.resize(kept);
      }
      if (options.loss != TrainingLoss::kCrossEntropy &&
          (c.answer_teacher.width == 0 || (options.train_on_question && c.prompt_teacher.width == 0))) {
        return absl::InvalidArgumentError("distillation needs the teacher's candidates of every supervised token");
      }
    }
  }

  const ModelConfig& config = t->weights_->config;
  STILLHOUSE_CHECK_EQ(static_cast<int64_t>(start.layers.size()), config.layers);
  const bool has_beta = start.layers[0].beta.defined();
  t->current_ = t->MakeValues(ctx);
  t->best_ = t->MakeValues(ctx);
  if (has_beta || options.train_beta) {
    t->current_.beta = ctx.EmptyF32({config.layers, config.kv_heads, t->slots_});
    t->best_.beta = ctx.EmptyF32({config.layers, config.kv_heads, t->slots_});
    ctx.backend->Zero(t->current_.beta);
  }
  for (int64_t l = 0; l < config.layers; ++l) {
    const LayerKv& kv = start.layers[static_cast<size_t>(l)];
    CopyInto(ctx, kv.k, t->current_.k.Select(0, l));
    CopyInto(ctx, kv.v, t->current_.v.Select(0, l));
    if (kv.beta) CopyInto(ctx, kv.beta, t->current_.beta.Select(0, l));
  }
  t->k_scale_ = LayerScales(ctx, t->current_.k, options.relative_learning_rate);
  t->v_scale_ = LayerScales(ctx, t->current_.v, options.relative_learning_rate);
  CopyInto(ctx, t->current_.k, t->best_.k);
  CopyInto(ctx, t->current_.v, t->best_.v);
  CopyInto(ctx, t->current_.beta, t->best_.beta);

  const int64_t trained = t->slots_ - t->frozen_;
  for (Values* moments : {&t->m_, &t->v_, &t->gradient_}) {
    moments->k = ctx.EmptyF32({config.layers, config.kv_heads, trained, config.head_dim});
    moments->v = ctx.EmptyF32({config.layers, config.kv_heads, trained, config.head_dim});
    if (options.train_beta) moments->beta = ctx.EmptyF32({config.layers, config.kv_heads, trained});
    for (const Tensor* x : {&moments->k, &moments->v, &moments->beta}) {
      if (x->defined()) ctx.backend->Zero(*x);
    }
  }

  auto memory = std::make_shared<Memory>();
  memory->slots = t->slots_;
  memory->next_position = t->next_position_;
  memory->label = t->label_;
  for (int64_t l = 0; l < config.layers; ++l) {
    LayerKv kv{t->current_.k.Select(0, l), t->current_.v.Select(0, l), Tensor()};
    if (t->current_.beta) kv.beta = t->current_.beta.Select(0, l);
    memory->layers.push_back(std::move(kv));
  }
  t->memory_ = std::move(memory);

  // The budget decides the number of steps before the first one, so that the cosine always reaches zero.
  t->planned_steps_ = 0;
  while (t->planned_steps_ < options.steps) {
    int64_t tokens = 0;
    for (const Conversation* c : t->StepConversations(t->planned_steps_)) tokens += c->rows();
    if (options.max_training_tokens > 0 && t->planned_tokens_ + tokens > options.max_training_tokens) break;
    t->planned_tokens_ += tokens;
    ++t->planned_steps_;
  }
  if (t->planned_steps_ == 0) {
    return absl::InvalidArgumentError(absl::StrCat("max_training_tokens ", options.max_training_tokens,
                                                   " is less than one step of ", options.rows_per_step,
                                                   " conversations needs"));
  }
  int64_t held_out_rows = 0;
  for (const Conversation& c : t->held_out_) held_out_rows += c.rows();
  const int64_t evaluations =
      t->held_out_.empty()
          ? 0
          : 1 + (options.evaluate_every > 0 ? (t->planned_steps_ + options.evaluate_every - 1) / options.evaluate_every
                                            : 1);
  // A row costs about two and a half times as much when it is differentiated.
  t->rows_planned_ = 2.5 * static_cast<double>(t->planned_tokens_) + static_cast<double>(evaluations * held_out_rows);
  if (t->held_out_.empty()) t->phase_ = Phase::kStep;
  t->Prepare();
  return t;
}

double CartridgeTrainer::rows_done_fraction() const {
  if (done()) return 1.0;
  return rows_planned_ > 0.0 ? std::min(1.0, rows_done_ / rows_planned_) : 0.0;
}

// Every epoch is a permutation of its own; a step takes the next rows_per_step of them, across the epochs' border.
std::vector<const Conversation*> CartridgeTrainer::StepConversations(int64_t step) {
  const int64_t n = static_cast<int64_t>(training_.size());
  const int64_t rows = std::min(options_.rows_per_step, n);
  std::vector<const Conversation*> out;
  for (int64_t i = step * rows; i < (step + 1) * rows; ++i) {
    if (i / n != epoch_) {
      epoch_ = i / n;
      order_.resize(static_cast<size_t>(n));
      std::iota(order_.begin(), order_.end(), 0);
      for (int64_t j = n - 1; j > 0; --j) {
        const uint64_t draw = Mix(Mix(options_.seed ^ 0x7261696eull) + static_cast<uint64_t>(epoch_ * n + j));
        std::swap(order_[static_cast<size_t>(j)], order_[draw % static_cast<uint64_t>(j + 1)]);
      }
    }
    out.push_back(&training_[static_cast<size_t>(order_[static_cast<size_t>(i % n)])]);
  }
  return out;
}

double CartridgeTrainer::LearningRate(int64_t step) const {
  const double warmup = std::max(1.0, options_.warmup_fraction * static_cast<double>(planned_steps_));
  const double s = static_cast<double>(step) + 1.0;
  const double rise = std::min(1.0, s / warmup);
  return options_.learning_rate * rise * 0.5 *
         (1.0 + std::cos(std::numbers::pi * s / static_cast<double>(planned_steps_ + 1)));
}

int64_t CartridgeTrainer::SupervisedRows(const Conversation& c) const {
  return static_cast<int64_t>(c.answer.size() + (options_.train_on_question ? c.prompt.size() - 1 : 0));
}

// Sets up the step or evaluation that comes next.
void CartridgeTrainer::Prepare() {
  group_ = 0;
  group_rows_total_ = 0;
  loss_sum_ = 0.0;
  losses_.clear();
  groups_.clear();
  if (phase_ == Phase::kDone) return;
  std::vector<const Conversation*> all;
  if (phase_ == Phase::kEvaluate) {
    for (const Conversation& c : held_out_) all.push_back(&c);
  } else {
    all = StepConversations(step_);
  }
  for (const Conversation* c : all) group_rows_total_ += SupervisedRows(*c);
  groups_ = GroupByRows(all, options_.task_rows * (phase_ == Phase::kEvaluate ? 2 : 1));
}

absl::Status CartridgeTrainer::Advance(const Context& ctx) {
  switch (phase_) {
    case Phase::kDone:
      return absl::OkStatus();
    case Phase::kEvaluate:
      return RunEvaluationPiece(ctx);
    case Phase::kStep:
      return RunStepPiece(ctx);
  }
  return absl::OkStatus();
}

Tensor CartridgeTrainer::Loss(const Context& ctx, const DistillBatch& batch, const Tensor& hidden) const {
  const int64_t rows = batch.outputs();
  if (options_.loss == TrainingLoss::kCrossEntropy) {
    return LinearCrossEntropy(ctx, hidden, weights_->output, ctx.Ints(batch.targets, {rows}));
  }
  return LinearDistill(ctx, hidden, weights_->output, ctx.Ints(batch.ids, {rows, batch.width}),
                       ctx.Floats(batch.logprobs, {rows, batch.width}), ModeOf(options_.loss));
}

absl::Status CartridgeTrainer::RunStepPiece(const Context& ctx) {
  Span span("train step");
  const std::vector<const Conversation*>& group = groups_[group_];
  DistillBatch batch = MakeDistillBatch(group, memory_, supervise());
  Tape tape(*ctx.backend);
  Context recording = ctx;
  recording.tape = &tape;
  tape.Watch(current_.k);
  tape.Watch(current_.v);
  if (options_.train_beta) tape.Watch(current_.beta);
  ForwardOptions forward;
  forward.checkpoint_layers = batch.batch.rows() > options_.checkpoint_rows;
  const ForwardResult result = Forward(recording, *weights_, batch.batch, forward);
  const Tensor loss = Loss(recording, batch, result.hidden);
  const double share = static_cast<double>(batch.outputs()) / static_cast<double>(group_rows_total_);
  // Read when the step ends: the backward pass need not wait for it.
  losses_.emplace_back(loss, share);
  {
    Span backward("backward");
    tape.Backward(loss, static_cast<float>(share));
  }
  const Tensor dk = Trained(tape.Grad(current_.k)), dv = Trained(tape.Grad(current_.v));
  const Tensor dbeta = options_.train_beta ? Trained(tape.Grad(current_.beta)) : Tensor();
  if (group_ == 0) {
    CopyInto(ctx, dk, gradient_.k);
    CopyInto(ctx, dv, gradient_.v);
    CopyInto(ctx, dbeta, gradient_.beta);
  } else {
    // Add wants contiguous operands.
    auto add = [&](const Tensor& acc, const Tensor& strided) {
      if (!acc.defined()) return;
      Tensor copy = ctx.EmptyF32(acc.shape());
      CopyInto(ctx, strided, copy);
      Accumulate(ctx, acc, copy);
    };
    add(gradient_.k, dk);
    add(gradient_.v, dv);
    add(gradient_.beta, dbeta);
  }
  for (const Conversation* c : group) rows_done_ += 2.5 * static_cast<double>(c->rows());
  if (++group_ < groups_.size()) return absl::OkStatus();
  return FinishStep(ctx);
}

absl::Status CartridgeTrainer::FinishStep(const Context& ctx) {
  Span span("train step end");
  const Tensor sum = ctx.Floats({0.0f}, {1});
  for (const Tensor* g : {&gradient_.k, &gradient_.v, &gradient_.beta}) {
    if (g->defined()) SumSquares(ctx, SumSquaresArgs{*g, sum});
  }
  const double norm = std::sqrt(static_cast<double>(ctx.ToFloats(sum)[0]));
  for (const auto& [loss, share] : losses_) loss_sum_ += static_cast<double>(ctx.ToFloats(loss)[0]) * share;
  losses_.clear();
  if (!std::isfinite(norm) || !std::isfinite(loss_sum_)) {
    if (best_step_ == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "training diverged at step ", step_ + 1, ": lower training.learning_rate, now ", options_.learning_rate));
    }
    phase_ = Phase::kDone;
    Prepare();
    return absl::OkStatus();
  }
  AdamWArgs args;
  args.options.beta1 = static_cast<float>(options_.beta1);
  args.options.beta2 = static_cast<float>(options_.beta2);
  args.options.weight_decay = static_cast<float>(options_.weight_decay);
  args.options.lr = static_cast<float>(LearningRate(step_));
  args.step = step_ + 1;
  args.grad_scale =
      options_.clip_norm > 0.0 && norm > options_.clip_norm ? static_cast<float>(options_.clip_norm / norm) : 1.0f;
  const float rate = args.options.lr;
  auto update = [&](int64_t layer, float scale, const Tensor& value, const Tensor& grad, const Tensor& m,
                    const Tensor& v) {
    args.options.lr = rate * scale;
    args.param = Trained(value).Select(0, layer);
    args.grad = grad.Select(0, layer);
    args.m = m.Select(0, layer);
    args.v = v.Select(0, layer);
    AdamW(ctx, args);
  };
  const float beta_scale = options_.beta_learning_rate > 0.0
                               ? static_cast<float>(options_.beta_learning_rate / options_.learning_rate)
                               : 1.0f;
  for (int64_t layer = 0; layer < weights_->config.layers; ++layer) {
    update(layer, k_scale_[static_cast<size_t>(layer)], current_.k, gradient_.k, m_.k, v_.k);
    update(layer, v_scale_[static_cast<size_t>(layer)], current_.v, gradient_.v, m_.v, v_.v);
    if (options_.train_beta) update(layer, beta_scale, current_.beta, gradient_.beta, m_.beta, v_.beta);
  }
  for (const auto& group : groups_) {
    for (const Conversation* c : group) trained_tokens_ += c->rows();
  }
  last_loss_ = loss_sum_;
  ++step_;
  const bool last = step_ == planned_steps_;
  const bool evaluate =
      !held_out_.empty() && (last || (options_.evaluate_every > 0 && step_ % options_.evaluate_every == 0));
  phase_ = evaluate ? Phase::kEvaluate : (last ? Phase::kDone : Phase::kStep);
  if (held_out_.empty()) {
    // Nothing to choose by: the newest is kept.
    CopyInto(ctx, current_.k, best_.k);
    CopyInto(ctx, current_.v, best_.v);
    CopyInto(ctx, current_.beta, best_.beta);
    best_step_ = step_;
  }
  Prepare();
  return absl::OkStatus();
}

absl::Status CartridgeTrainer::RunEvaluationPiece(const Context& ctx) {
  Span span("validation");
  const std::vector<const Conversation*>& group = groups_[group_];
  DistillBatch batch = MakeDistillBatch(group, memory_, supervise());
  const ForwardResult result = Forward(ctx, *weights_, batch.batch);
  const Tensor loss = Loss(ctx, batch, result.hidden);
  loss_sum_ += static_cast<double>(ctx.ToFloats(loss)[0]) * static_cast<double>(batch.outputs()) /
               static_cast<double>(group_rows_total_);
  for (const Conversation* c : group) rows_done_ += static_cast<double>(c->rows());
  if (++group_ < groups_.size()) return absl::OkStatus();
  return FinishEvaluation(ctx);
}

absl::Status CartridgeTrainer::FinishEvaluation(const Context& ctx) {
  const double loss = loss_sum_;
  bool diverged = false;
  if (step_ == 0) {
    if (!std::isfinite(loss)) {
      return absl::FailedPreconditionError("the loss of the memory that training starts from is not finite");
    }
    start_loss_ = best_loss_ = loss;
  } else if (loss < best_loss_) {
    best_loss_ = loss;
    best_step_ = step_;
    evaluations_without_gain_ = 0;
    CopyInto(ctx, current_.k, best_.k);
    CopyInto(ctx, current_.v, best_.v);
    CopyInto(ctx, current_.beta, best_.beta);
  } else {
    ++evaluations_without_gain_;
    diverged = !std::isfinite(loss);
  }
  const bool stop = options_.early_stop_patience > 0 && evaluations_without_gain_ >= options_.early_stop_patience;
  phase_ = diverged || stop || step_ == planned_steps_ ? Phase::kDone : Phase::kStep;
  Prepare();
  return absl::OkStatus();
}

std::shared_ptr<Memory> CartridgeTrainer::Best(const Context& ctx) const {
  const ModelConfig& c = weights_->config;
  auto memory = std::make_shared<Memory>();
  memory->slots = slots_;
  memory->next_position = next_position_;
  memory->label = label_;
  for (int64_t l = 0; l < c.layers; ++l) {
    LayerKv kv{ctx.EmptyF32({c.kv_heads, slots_, c.head_dim}), ctx.EmptyF32({c.kv_heads, slots_, c.head_dim}),
               Tensor()};
    CopyInto(ctx, best_.k.Select(0, l), kv.k);
    CopyInto(ctx, best_.v.Select(0, l), kv.v);
    if (best_.beta) {
      kv.beta = ctx.EmptyF32({c.kv_heads, slots_});
      CopyInto(ctx, best_.beta.Select(0, l), kv.beta);
    }
    memory->layers.push_back(std::move(kv));
  }
  return memory;
}

std::string CartridgeTrainer::Save(const Context& ctx) const {
  ByteWriter out;
  out.Int(static_cast<int64_t>(phase_));
  out.Int(slots_);
  out.Int(planned_steps_);
  out.Int(step_);
  out.Int(best_step_);
  out.Int(evaluations_without_gain_);
  out.Int(trained_tokens_);
  out.Double(last_loss_);
  out.Double(start_loss_);
  out.Double(best_loss_);
  out.Double(rows_done_);
  for (const Values* values : {&current_, &m_, &v_}) {
    Append(ctx, values->k, &out);
    Append(ctx, values->v, &out);
    Append(ctx, values->beta, &out);
  }
  // Where the best is the newest there is no need to say it twice.
  const bool best_is_current = best_step_ == step_;
  out.Int(best_is_current ? 1 : 0);
  if (!best_is_current) {
    Append(ctx, best_.k, &out);
    Append(ctx, best_.v, &out);
    Append(ctx, best_.beta, &out);
  }
  return out.Take();
}

absl::Status CartridgeTrainer::Restore(const Context& ctx, std::string_view bytes) {
  ByteReader in(bytes);
  int64_t phase = 0, slots = 0, planned = 0, best_is_current = 0;
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&phase));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&slots));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&planned));
  if (phase < 0 || phase > static_cast<int64_t>(Phase::kDone) || slots != slots_ || planned != planned_steps_) {
    return absl::DataLossError("a training checkpoint of another recipe");
  }
  phase_ = static_cast<Phase>(phase);
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&step_));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&best_step_));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&evaluations_without_gain_));
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&trained_tokens_));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&last_loss_));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&start_loss_));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&best_loss_));
  STILLHOUSE_RETURN_IF_ERROR(in.Double(&rows_done_));
  if (step_ < 0 || step_ > planned_steps_ || best_step_ < 0 || best_step_ > step_) {
    return absl::DataLossError("a training checkpoint with impossible steps");
  }
  for (Values* values : {&current_, &m_, &v_}) {
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, values->k, &in));
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, values->v, &in));
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, values->beta, &in));
  }
  STILLHOUSE_RETURN_IF_ERROR(in.Int(&best_is_current));
  if (best_is_current != 0) {
    CopyInto(ctx, current_.k, best_.k);
    CopyInto(ctx, current_.v, best_.v);
    CopyInto(ctx, current_.beta, best_.beta);
  } else {
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, best_.k, &in));
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, best_.v, &in));
    STILLHOUSE_RETURN_IF_ERROR(Read(ctx, best_.beta, &in));
  }
  Prepare();
  return absl::OkStatus();
}

}  // namespace stillhouse
