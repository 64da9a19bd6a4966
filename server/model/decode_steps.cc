#include "server/model/decode_steps.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/trace.h"
#include "kernels/ops/fused.h"

namespace stillhouse {
namespace {

// Arrays of a step, one after the other in its block.
class Block {
 public:
  int64_t Add(const void* data, size_t bytes) {
    const size_t at = (bytes_.size() + 255) / 256 * 256;
    bytes_.resize(at + bytes);
    if (bytes > 0) std::memcpy(bytes_.data() + at, data, bytes);
    return static_cast<int64_t>(at);
  }
  template <typename T>
  int64_t Add(const std::vector<T>& values) {
    return Add(values.data(), values.size() * sizeof(T));
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

std::vector<std::pair<uint64_t, int64_t>> KeyOf(const Batch& batch) {
  std::vector<std::pair<uint64_t, int64_t>> key;
  key.reserve(batch.sequences.size());
  for (const BatchSequence& sequence : batch.sequences) key.emplace_back(sequence.state->id(), sequence.state->rows());
  return key;
}

// Rows of the step that runs `rows`: so that sequences may come and go without another recording, as few more as cost
// little.
int64_t PaddedRows(int64_t rows) {
  const int64_t multiple = rows <= 8 ? 1 : rows <= 64 ? 8 : 32;
  return (rows + multiple - 1) / multiple * multiple;
}

// The batch with its last sequence's row repeated. The copies keep nothing, and nobody looks at what comes of them.
Batch Padded(const Batch& batch) {
  Batch padded = batch;
  const int64_t rows = PaddedRows(batch.rows());
  while (padded.rows() < rows) {
    const int64_t row = padded.rows();
    padded.sequences.push_back({batch.sequences.back().state, row, 1});
    padded.tokens.push_back(batch.tokens.back());
    padded.positions.push_back(batch.positions.back());
    padded.output_rows.push_back(static_cast<int32_t>(row));
  }
  return padded;
}

}  // namespace

struct DecodeSteps::Step {
  Key key;
  uint64_t used = 0;
  Tensor block;
  Tensor logits, drawn, stored_mass;  // left by a run
  std::unique_ptr<RecordedWork> work;
};

DecodeSteps::DecodeSteps(const Context& ctx, std::shared_ptr<const Weights> weights, int64_t vocabulary, size_t limit)
    : ctx_(ctx), weights_(std::move(weights)), vocabulary_(vocabulary), limit_(std::max<size_t>(1, limit)) {
  ctx_.tape = nullptr;
}

DecodeSteps::~DecodeSteps() = default;

DecodeSteps::Step* DecodeSteps::Find(const Key& key) {
  for (const auto& step : steps_) {
    if (step->key == key) return step.get();
  }
  if (steps_.size() >= limit_) {
    const auto oldest =
        std::min_element(steps_.begin(), steps_.end(), [](const auto& a, const auto& b) { return a->used < b->used; });
    steps_.erase(oldest);
    ++stats_.evictions;
  }
  steps_.push_back(std::make_unique<Step>());
  steps_.back()->key = key;
  return steps_.back().get();
}

bool DecodeSteps::Run(const Batch& wanted, const std::vector<SampleRow>& wanted_rows, bool measure_stored_mass,
                      Result* result) {
  const int64_t wanted_count = wanted.rows();
  AttentionStep attention;
  if (static_cast<int64_t>(wanted.sequences.size()) != wanted_count ||
      static_cast<int64_t>(wanted.output_rows.size()) != wanted_count || wanted_count == 0) {
    return false;
  }
  const Batch batch = Padded(wanted);
  const int64_t count = batch.rows();
  const Span span("decode step");
  {
    const Span plan("plan");
    if (PlanKey key = KeyOf(batch); !ahead_key_.empty() && key == ahead_key_) {
      attention = std::move(ahead_);
      ++stats_.planned_ahead;
    } else if (!PlanDecodeStep(ctx_, *weights_, batch, &attention)) {
      return false;
    }
    ahead_key_.clear();
  }
  const absl::Status known = CheckTokens(weights_->config, batch.tokens);
  STILLHOUSE_CHECK(known.ok()) << known.message();
  const FusedKernels& fused = ctx_.backend->fused();
  const Key key{attention.sizes, CanDrawRows(wanted_rows), measure_stored_mass};
  Block block;
  std::vector<char> settings;
  if (key.draws) {
    std::vector<SampleRow> rows = wanted_rows;
    rows.resize(static_cast<size_t>(count));
    fused.PackDraws({&rows, &settings});
  }
  std::vector<int64_t> kept = KvPlaces(wanted);
  kept.resize(static_cast<size_t>(2 * count), 0);
  const int64_t tokens = block.Add(batch.tokens), positions = block.Add(batch.positions), places = block.Add(kept),
                plan = block.Add(attention.bytes), draws = block.Add(settings);

  Step* const step = Find(key);
  step->used = ++clock_;
  if (!step->block) step->block = ctx_.Empty(DType::kU8, {static_cast<int64_t>(block.bytes().size())});
  STILLHOUSE_CHECK_EQ(step->block.bytes(), static_cast<int64_t>(block.bytes().size()));
  ctx_.backend->Upload(block.bytes().data(), step->block);
  if (!step->work) {
    const Tensor& all = step->block;
    PassInputs inputs;
    inputs.rows = count;
    inputs.tokens = all.View(tokens, DType::kI32, {count});
    inputs.positions = all.View(positions, DType::kI32, {count});
    inputs.kv = KvRowsOf(weights_->config, batch.sequences[0].state->dtype());
    inputs.kv.places = all.View(places, DType::kI64, {count, 2});
    inputs.attention = attention.sizes;
    inputs.attention_bytes = all.View(plan, DType::kU8, {static_cast<int64_t>(attention.bytes.size())});
    const Tensor settings_on_device = all.View(draws, DType::kU8, {static_cast<int64_t>(settings.size())});
    // By value: a backend may call it again at each run.
    step->work = ctx_.backend->Record([this, step, inputs, key, settings_on_device, &fused] {
      step->logits = step->drawn = step->stored_mass = Tensor();  // the second time: the same blocks as the first
      step->logits = StepLogits(ctx_, *weights_, inputs, key.mass ? &step->stored_mass : nullptr);
      if (key.draws) fused.Draw(*ctx_.backend, {step->logits, settings_on_device, vocabulary_, &step->drawn});
    });
    ++stats_.recordings;
    if (!step->work) {
      steps_.pop_back();
      return false;
    }
  }
  {
    const Span launch("launch");
    step->work->Run();
  }
  for (const BatchSequence& sequence : wanted.sequences) sequence.state->Advance(1);
  {
    const Span ahead("plan ahead");
    if (PlanDecodeStep(ctx_, *weights_, batch, &ahead_)) ahead_key_ = KeyOf(batch);
  }
  const Span finish("finish");
  if (key.draws) {
    std::vector<char> bytes(static_cast<size_t>(step->drawn.bytes()));
    ctx_.backend->Download(step->drawn, bytes.data());
    result->tokens.assign(static_cast<size_t>(count), {});
    fused.UnpackDraws({bytes.data(), &result->tokens});
    result->tokens.resize(wanted_rows.size());
  } else {
    result->tokens = Sample(ctx_, step->logits.Slice(0, 0, wanted_count), vocabulary_, wanted_rows);
  }
  result->stored_mass.clear();
  if (key.mass) {
    result->stored_mass = MeanOverLayers(ctx_.ToFloats(step->stored_mass), weights_->config.layers);
    result->stored_mass.resize(wanted_rows.size());
  }
  ++stats_.steps;
  return true;
}

}  // namespace stillhouse
