#include "server/train/scorer.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops/loss.h"

namespace stillhouse {
namespace {

// −Σ q ln q of one row's candidates, the rest of the mass as one bucket.
double TailEntropy(const int32_t* ids, const float* logprobs, int32_t width) {
  double entropy = 0.0, mass = 0.0;
  for (int32_t i = 0; i < width; ++i) {
    if (ids[i] < 0) continue;
    const double q = std::exp(static_cast<double>(logprobs[i]));
    entropy -= q * logprobs[i];
    mass += q;
  }
  const double rest = 1.0 - mass;
  if (rest > 0.0) entropy -= rest * std::log(rest);
  return entropy;
}

void Teach(const Context& ctx, const Weights& weights, const std::vector<Conversation*>& conversations,
           const std::shared_ptr<const Memory>& memory, int64_t k, bool question) {
  std::vector<const Conversation*> view(conversations.begin(), conversations.end());
  DistillBatch batch = MakeDistillBatch(view, memory, question ? Supervise::kAnswerAndQuestion : Supervise::kAnswer);
  const ForwardResult result = Forward(ctx, weights, batch.batch);
  TopLogprobsArgs args;
  args.x = result.hidden;
  args.weight = weights.output;
  args.k = k;
  const int64_t rows = batch.outputs();
  args.top_ids = ctx.Empty(DType::kI32, {rows, k});
  args.top_logprobs = ctx.EmptyF32({rows, k});
  TopLogprobs(ctx, args);
  const std::vector<int32_t> ids = ctx.ToInts(args.top_ids);
  const std::vector<float> logprobs = ctx.ToFloats(args.top_logprobs);
  size_t row = 0;
  for (Conversation* c : conversations) {
    const size_t questions = question ? c->prompt.size() - 1 : 0;
    auto take = [&](size_t count, Candidates* out) {
      out->width = static_cast<int32_t>(k);
      const size_t begin = row * static_cast<size_t>(k), end = (row + count) * static_cast<size_t>(k);
      out->ids.assign(ids.begin() + static_cast<int64_t>(begin), ids.begin() + static_cast<int64_t>(end));
      out->logprobs.assign(logprobs.begin() + static_cast<int64_t>(begin),
                           logprobs.begin() + static_cast<int64_t>(end));
      row += count;
    };
    if (question) {
      take(questions, &c->prompt_teacher);
      row += c->answer.size();
    } else {
      take(c->answer.size(), &c->answer_teacher);
    }
  }
}

}  // namespace

void AnswerScore::Add(const AnswerScore& other) {
  tokens += other.tokens;
  nll += other.nll;
  kl_tokens += other.kl_tokens;
  kl += other.kl;
}

AnswerScore ScoreAnswers(const Context& ctx, const Weights& weights,
                         const std::vector<const Conversation*>& conversations,
                         const std::shared_ptr<const Memory>& memory, bool with_kl) {
  AnswerScore score;
  if (conversations.empty()) return score;
  DistillBatch batch = MakeDistillBatch(conversations, memory);
  const ForwardResult result = Forward(ctx, weights, batch.batch);
  const int64_t rows = batch.outputs();
  TopLogprobsArgs args;
  args.x = result.hidden;
  args.weight = weights.output;
  args.tokens = ctx.Ints(batch.targets, {rows});
  args.token_logprobs = ctx.EmptyF32({rows});
  TopLogprobs(ctx, args);
  for (float logprob : ctx.ToFloats(args.token_logprobs)) score.nll -= logprob;
  score.tokens = rows;
  if (with_kl && batch.width > 0) {
    const Tensor loss = LinearDistill(ctx, result.hidden, weights.output, ctx.Ints(batch.ids, {rows, batch.width}),
                                      ctx.Floats(batch.logprobs, {rows, batch.width}), DistillMode::kTail);
    double entropy = 0.0;
    for (int64_t r = 0; r < rows; ++r) {
      entropy += TailEntropy(batch.ids.data() + r * batch.width, batch.logprobs.data() + r * batch.width, batch.width);
    }
    score.kl_tokens = rows;
    score.kl = std::max(0.0, static_cast<double>(ctx.ToFloats(loss)[0]) * static_cast<double>(rows) - entropy);
  }
  return score;
}

std::vector<double> ScoreQuestions(const Context& ctx, const Weights& weights,
                                   const std::vector<const Conversation*>& conversations,
                                   const std::shared_ptr<const Memory>& memory) {
  std::vector<double> means(conversations.size(), 0.0);
  Batch batch;
  std::vector<std::unique_ptr<SequenceState>> states;
  std::vector<std::shared_ptr<const Memory>> memories;
  if (memory) memories.push_back(memory);
  std::vector<int32_t> targets;
  for (const Conversation* c : conversations) {
    states.push_back(std::make_unique<SequenceState>(memories));
    batch.Add(states.back().get(), c->prompt, Batch::Outputs::kAll);
    batch.output_rows.pop_back();  // the last row predicts the answer
    targets.insert(targets.end(), c->prompt.begin() + 1, c->prompt.end());
  }
  if (targets.empty()) return means;
  const int64_t rows = static_cast<int64_t>(targets.size());
  TopLogprobsArgs args;
  args.x = Forward(ctx, weights, batch).hidden;
  args.weight = weights.output;
  args.tokens = ctx.Ints(targets, {rows});
  args.token_logprobs = ctx.EmptyF32({rows});
  TopLogprobs(ctx, args);
  const std::vector<float> logprobs = ctx.ToFloats(args.token_logprobs);
  size_t row = 0;
  for (size_t i = 0; i < conversations.size(); ++i) {
    const size_t count = conversations[i]->prompt.size() - 1;
    double sum = 0.0;
    for (size_t t = 0; t < count; ++t) sum += logprobs[row++];
    means[i] = count > 0 ? sum / static_cast<double>(count) : 0.0;
  }
  return means;
}

void TeachQuestions(const Context& ctx, const Weights& weights, const std::vector<Conversation*>& conversations,
                    const std::shared_ptr<const Memory>& memory, int64_t k) {
  Teach(ctx, weights, conversations, memory, k, /*question=*/true);
}

void TeachAnswers(const Context& ctx, const Weights& weights, const std::vector<Conversation*>& conversations,
                  const std::shared_ptr<const Memory>& memory, int64_t k) {
  Teach(ctx, weights, conversations, memory, k, /*question=*/false);
}

}  // namespace stillhouse
