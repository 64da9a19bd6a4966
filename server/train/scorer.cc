#include "server/train/scorer.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops/loss.h"

namespace stillhouse {
namespace {

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
  const int64_t rows = batch.outputs(), width = batch.width;
  // Log-probabilities of whole rows, a few at a time: the vocabulary is large.
  constexpr int64_t kRows = 64;
  for (int64_t begin = 0; begin < rows; begin += kRows) {
    const int64_t end = std::min(rows, begin + kRows);
    const Tensor logprobs = LogSoftmax(ctx, Logits(ctx, weights, result.hidden.Slice(0, begin, end)));
    const int64_t vocabulary = logprobs.dim(1);
    const bool host = logprobs.device() == DeviceType::kCpu && logprobs.contiguous();
    const std::vector<float> copy = host ? std::vector<float>() : ctx.ToFloats(logprobs);
    const float* values = host ? logprobs.f32() : copy.data();
    for (int64_t r = begin; r < end; ++r) {
      const float* p = values + (r - begin) * vocabulary;
      score.nll -= p[batch.targets[static_cast<size_t>(r)]];
      if (!with_kl || width == 0) continue;
      double rest_q = 1.0, rest_p = 1.0, kl = 0.0;
      for (int64_t i = r * width; i < (r + 1) * width; ++i) {
        const int32_t id = batch.ids[static_cast<size_t>(i)];
        if (id < 0) continue;
        const double log_q = batch.logprobs[static_cast<size_t>(i)], log_p = p[id];
        const double q = std::exp(log_q);
        kl += q * (log_q - log_p);
        rest_q -= q;
        rest_p -= std::exp(log_p);
      }
      // Nearly nothing is left outside the candidates: rounding, not a difference.
      constexpr double kLeastRest = 1e-6;
      if (rest_q > kLeastRest) kl += rest_q * std::log(rest_q / std::max(rest_p, kLeastRest));
      score.kl += std::max(kl, 0.0);
      ++score.kl_tokens;
    }
  }
  score.tokens = rows;
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
