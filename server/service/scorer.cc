#include "server/service/scorer.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/base/strings.h"
#include "kernels/ops/loss.h"
#include "server/model/forward.h"
#include "server/tenancy/reason.h"

namespace stillhouse {
namespace {

constexpr int64_t kChunk = 256;

}  // namespace

int64_t Scorer::ContextBytes(const Context& ctx, const Engine& engine) {
  return PagePool::BytesFor(ctx, engine.weights().config, engine.options().kv_dtype, engine.context_limit());
}

Scorer::Scorer(const Context& ctx, Engine* engine, int64_t page_bytes)
    : engine_(engine),
      pages_(ctx, engine->weights().config, page_bytes > 0 ? page_bytes : ContextBytes(ctx, *engine),
             engine->options().kv_dtype) {}

absl::StatusOr<ScoreResult> Scorer::Score(const ScoreRequest& request) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t continuation = static_cast<int64_t>(request.continuation.size());
  if (prompt == 0) return absl::InvalidArgumentError("the text before the continuation is empty");
  for (const auto* tokens : {&request.prompt, &request.continuation}) {
    STILLHOUSE_RETURN_IF_ERROR(CheckTokens(engine_->weights().config, *tokens));
  }
  int64_t start = 0;
  for (const auto& memory : request.memories) start += memory->next_position;
  // The last token is predicted, never read.
  const int64_t rows = prompt + continuation - 1;
  if (start + rows > engine_->context_limit()) {
    return WithReason(
        absl::OutOfRangeError(StrCat("prompt and continuation have ", prompt + continuation, " tokens after ", start,
                                     " positions of memory; the context has ", engine_->context_limit())),
        "PROMPT_TOO_LONG");
  }
  const absl::Time arrived = absl::Now();
  const auto leave = absl::MakeCleanup([this] { --waiting_; });
  if (++waiting_ > kMaxWaiting) {
    return WithRetryAfter(
        WithReason(absl::UnavailableError("too many texts wait to be scored; try again in a moment"), "QUEUE_FULL"),
        absl::Seconds(1));
  }
  std::lock_guard<std::mutex> lock(one_at_a_time_);

  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), request.continuation.begin(), request.continuation.end() - 1);
  ScoreResult result;
  result.tokens.reserve(static_cast<size_t>(continuation));
  std::unique_ptr<SequenceState> state;
  absl::Time began = arrived;
  for (int64_t begin = 0; begin < rows; begin += kChunk) {
    const int64_t count = std::min(kChunk, rows - begin);
    if (request.cancelled && request.cancelled()) return absl::CancelledError("nobody waits for the score");
    STILLHOUSE_RETURN_IF_ERROR(engine_->Execute(
        Priority::kInteractive,
        [&](const Context& ctx) -> absl::Status {
          if (begin == 0) {
            began = absl::Now();
            state = std::make_unique<SequenceState>(request.memories, &pages_);
          }
          STILLHOUSE_RETURN_IF_ERROR(state->Reserve(count));
          Batch batch;
          batch.Add(state.get(),
                    absl::MakeConstSpan(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
                    Batch::Outputs::kNone);
          // Row r predicts token r + 1, which is wanted from the last prompt row on.
          std::vector<int32_t> targets;
          for (int64_t row = std::max<int64_t>(prompt - 1, begin); row < begin + count; ++row) {
            batch.output_rows.push_back(static_cast<int32_t>(row - begin));
            targets.push_back(request.continuation[static_cast<size_t>(row + 1 - prompt)]);
          }
          const Weights& weights = engine_->weights();
          const ForwardResult forward = Forward(ctx, weights, batch);
          const int64_t n = static_cast<int64_t>(targets.size());
          if (n == 0) return absl::OkStatus();
          TopLogprobsArgs args;
          args.x = forward.hidden;
          args.weight = weights.output;
          args.tokens = ctx.Ints(targets, {n});
          args.token_logprobs = ctx.EmptyF32({n});
          args.k = request.top;
          if (args.k > 0) {
            args.top_ids = ctx.Empty(DType::kI32, {n, args.k});
            args.top_logprobs = ctx.EmptyF32({n, args.k});
          }
          TopLogprobs(ctx, args);
          const std::vector<float> logprobs = ctx.ToFloats(args.token_logprobs);
          const std::vector<int32_t> top_ids = args.k > 0 ? ctx.ToInts(args.top_ids) : std::vector<int32_t>();
          const std::vector<float> top_logprobs = args.k > 0 ? ctx.ToFloats(args.top_logprobs) : std::vector<float>();
          for (int64_t i = 0; i < n; ++i) {
            ScoredToken token{targets[static_cast<size_t>(i)], logprobs[static_cast<size_t>(i)], {}};
            for (int64_t j = i * args.k; j < (i + 1) * args.k; ++j) {
              token.top.emplace_back(top_ids[static_cast<size_t>(j)], top_logprobs[static_cast<size_t>(j)]);
            }
            result.tokens.push_back(std::move(token));
          }
          return absl::OkStatus();
        },
        request.deadline));
    if (request.computed) request.computed(count);
  }
  result.queue_time = began - arrived;
  result.run_time = absl::Now() - began;
  result.kv_bytes = rows * engine_->weights().config.kv_bytes_per_slot();
  for (const auto& memory : request.memories) result.kv_bytes += memory->canonical_bytes();
  return result;
}

}  // namespace stillhouse
