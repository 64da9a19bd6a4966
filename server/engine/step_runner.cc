#include "server/engine/step_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/logging.h"
#include "kernels/base/trace.h"
#include "server/engine/memory_plan.h"

namespace stillhouse {
namespace {

constexpr absl::Duration kWarnEvery = absl::Minutes(1);

std::vector<SampleRow> SampleRows(const std::vector<Sequence*>& drawing) {
  std::vector<SampleRow> rows;
  for (Sequence* s : drawing) {
    SampleRow row = s->request.sampling;
    row.step = static_cast<uint64_t>(s->usage.completion_tokens);
    row.history.assign(s->counts.begin(), s->counts.end());
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

absl::Status DeviceMemoryWatch::status() const {
  if (missing() == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the device lacks ", BytesForPeople(missing()),
      " of memory for this beside the caches and queries that hold the rest: try again when fewer are in use, or give "
      "the server more (--device-memory), or caches less of it (--resident-memory)"));
}

StepRunner::StepRunner(const Context& ctx, std::shared_ptr<const Weights> weights, const EngineOptions& options,
                       PagePool* pages)
    : ctx_(ctx), weights_(std::move(weights)), options_(options), pages_(pages) {
  if (options_.record_steps) decode_steps_ = std::make_unique<DecodeSteps>(ctx_, weights_, options_.vocabulary);
}

StepRunner::Result StepRunner::Run(const std::vector<Sequence*>& running, Priority priority, bool measure) {
  const Span span("engine step");
  const DeviceMemoryWatch memory(ctx_.pool());
  Result result;
  std::vector<RunningView> views;
  for (const Sequence* s : running) {
    views.push_back({static_cast<int64_t>(s->request.prompt.size() - s->prompt_done)});
  }
  result.plan = PlanStep(views, options_.prefill_chunk);

  Batch batch;
  std::vector<Sequence*> batched;
  std::vector<Sequence*> drawing;  // sequences that get a token, in the order of their output rows
  std::vector<int64_t> drawing_rows;
  bool memories = false;
  for (const PlannedRows& planned : result.plan) {
    Sequence* s = running[static_cast<size_t>(planned.sequence)];
    if (!s->state) s->state = std::make_unique<SequenceState>(std::move(s->request.memories), pages_);
    absl::Status reserved = s->state->Reserve(planned.rows);
    if (!reserved.ok()) {
      // Pages were committed at admission, so this is memory that others hold beyond the engine's books.
      result.ended.push_back({s, FinishReason::kError, std::move(reserved)});
      continue;
    }
    batched.push_back(s);
    memories = memories || !s->state->memories().empty();
    if (s->decoding()) {
      batch.Add(s->state.get(), {&s->last_token, 1}, Batch::Outputs::kLast);
      drawing.push_back(s);
      drawing_rows.push_back(batch.rows() - 1);
      ++result.decode_tokens;
    } else {
      const auto rows =
          absl::MakeConstSpan(s->request.prompt).subspan(s->prompt_done, static_cast<size_t>(planned.rows));
      s->prompt_done += rows.size();
      batch.Add(s->state.get(), rows, s->decoding() ? Batch::Outputs::kLast : Batch::Outputs::kNone);
      if (s->decoding()) {
        drawing.push_back(s);
        drawing_rows.push_back(batch.rows() - 1);
      }
      result.prefill_tokens += planned.rows;
    }
  }
  if (batch.rows() == 0) return result;

  const bool mass = measure && memories && result.decode_tokens > 0;
  DecodeSteps::Result step;
  Compute(batch, drawing, mass, result.prefill_tokens, &step);
  if (const absl::Status enough = memory.status(); !enough.ok()) {
    if (priority == Priority::kBackground) {
      for (Sequence* s : batched) result.ended.push_back({s, FinishReason::kError, enough});
      return result;
    }
    WarnOfMemory(memory.missing());
  }
  for (size_t i = 0; mass && i < drawing.size(); ++i) {
    if (drawing[i]->state->memories().empty()) continue;
    drawing[i]->mass_sum += step.stored_mass[static_cast<size_t>(drawing_rows[i])];
    ++drawing[i]->mass_count;
  }
  result.drawn = static_cast<int64_t>(drawing.size());
  Commit(step.tokens, drawing, priority, &result);
  return result;
}

void StepRunner::Compute(const Batch& batch, const std::vector<Sequence*>& drawing, bool mass, int64_t prefill_tokens,
                         DecodeSteps::Result* step) {
  const std::vector<SampleRow> rows = SampleRows(drawing);
  // Steps of decoding sequences alone are run as recorded, where that is possible.
  if (decode_steps_ && prefill_tokens == 0 && decode_steps_->Run(batch, rows, mass, step)) return;
  ForwardOptions forward;
  forward.measure_stored_mass = mass;
  ForwardResult result = Forward(ctx_, *weights_, batch, forward);
  step->stored_mass = std::move(result.stored_mass);
  if (drawing.empty()) return;
  const Span sample("sample");
  step->tokens = Sample(ctx_, Logits(ctx_, *weights_, result.hidden), options_.vocabulary, rows);
}

void StepRunner::Commit(const std::vector<SampledToken>& drawn, const std::vector<Sequence*>& drawing,
                        Priority priority, Result* result) {
  const Span span("commit");
  const absl::Time now = absl::Now();
  const auto end = [&](Sequence* s, FinishReason reason, absl::Status status = absl::OkStatus()) {
    result->ended.push_back({s, reason, std::move(status)});
  };
  for (size_t i = 0; i < drawing.size(); ++i) {
    Sequence* s = drawing[i];
    const SampledToken& token = drawn[i];
    if (token.invalid) {
      ++result->invalid_logits;
      end(s, FinishReason::kError, absl::InternalError("the model gave no valid distribution for the next token"));
      continue;
    }
    if (s->usage.completion_tokens == 0) {
      s->first_token = now;
      s->usage.prefill_time = now - s->started;
    } else if (options_.observer && priority == Priority::kInteractive) {
      options_.observer->OnTokenGap(now - s->previous_token);
    }
    s->previous_token = now;
    s->last_token = token.id;
    ++s->usage.completion_tokens;
    if (s->penalised()) ++s->counts[token.id];
    const bool go_on = s->sink->OnToken(token);
    const auto& stops = s->request.stop_ids;
    if (!s->request.ignore_stop_ids && std::find(stops.begin(), stops.end(), token.id) != stops.end()) {
      end(s, FinishReason::kStopId);
    } else if (!go_on) {
      end(s, FinishReason::kSink);
    } else if (s->usage.completion_tokens >= s->token_limit) {
      end(s, s->limited_by_context ? FinishReason::kContextFull : FinishReason::kMaxTokens);
    }
  }
}

void StepRunner::WarnOfMemory(int64_t missing) {
  const absl::Time now = absl::Now();
  if (now < next_warning_) return;
  next_warning_ = now + kWarnEvery;
  STILLHOUSE_LOG(WARNING) << "queries are computed in host memory, slowly: the device lacks " << BytesForPeople(missing)
                          << "; lower --resident-memory, --kv-memory or --prefill-chunk";
}

}  // namespace stillhouse
