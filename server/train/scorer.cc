#include "server/train/scorer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/gather.h"
#include "kernels/ops/loss.h"

namespace stillhouse {
namespace {

// Of whole rows of log-probabilities at a time.
constexpr int64_t kLogitBytes = int64_t{12} << 20, kDeviceLogitBytes = int64_t{256} << 20;

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
  // Log-probabilities of whole rows, a few at a time: the vocabulary is large. What is read of them is gathered where
  // they are.
  const int64_t vocabulary = weights.output.dim(0);
  const int64_t bytes = ctx.backend->device() == DeviceType::kCpu ? kLogitBytes : kDeviceLogitBytes;
  const int64_t chunk =
      std::clamp<int64_t>(bytes / (vocabulary * 4), 1, std::numeric_limits<int32_t>::max() / vocabulary);
  std::vector<int32_t> wanted;
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t end = std::min(rows, begin + chunk), count = end - begin;
    const Tensor logprobs = LogSoftmax(ctx, Logits(ctx, weights, result.hidden.Slice(0, begin, end)));
    wanted.clear();
    for (int64_t r = begin; r < end; ++r) {
      const int32_t row = static_cast<int32_t>((r - begin) * vocabulary);
      wanted.push_back(row + batch.targets[static_cast<size_t>(r)]);
      for (int64_t i = r * width; with_kl && i < (r + 1) * width; ++i) {
        wanted.push_back(row + std::max(batch.ids[static_cast<size_t>(i)], 0));
      }
    }
    const int64_t read = static_cast<int64_t>(wanted.size()), each = read / count;
    const std::vector<float> values =
        ctx.ToFloats(GatherRows(ctx, logprobs.Reshape({count * vocabulary, 1}), ctx.Ints(wanted, {read})));
    for (int64_t r = begin; r < end; ++r) {
      const float* p = values.data() + (r - begin) * each;
      score.nll -= p[0];
      if (!with_kl || width == 0) continue;
      double rest_q = 1.0, rest_p = 1.0, kl = 0.0;
      for (int64_t i = 0; i < width; ++i) {
        if (batch.ids[static_cast<size_t>(r * width + i)] < 0) continue;
        const double log_q = batch.logprobs[static_cast<size_t>(r * width + i)], log_p = p[1 + i];
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
