#include "tests/support/step_backend.h"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/ops/elementwise.h"
#include "kernels/ops/fused.h"
#include "kernels/ops/kernel_table.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/norm.h"

namespace stillhouse::testing {
namespace {

class Recorded final : public RecordedWork {
 public:
  explicit Recorded(std::function<void()> work) : work_(std::move(work)) {}
  void Run() override { work_(); }

 private:
  std::function<void()> work_;
};

const KernelTable& Table();
const FusedKernels& Fused();

class StepBackend final : public Backend {
 public:
  explicit StepBackend(const CpuBackendOptions& options) : inner_(MakeCpuBackend(options)) {}

  Backend& inner() { return *inner_; }
  DeviceType device() const override { return inner_->device(); }
  BufferPool& pool() override { return inner_->pool(); }
  void Upload(const void* host, const Tensor& device) override { inner_->Upload(host, device); }
  void Download(const Tensor& device, void* host) override { inner_->Download(device, host); }
  void Copy(const Tensor& from, const Tensor& to) override { inner_->Copy(from, to); }
  void Zero(const Tensor& tensor) override { inner_->Zero(tensor); }
  void LimitMemory(int64_t bytes) override { inner_->LimitMemory(bytes); }
  const char* name() const override { return "cpu steps"; }
  const KernelTable& kernels() const override { return Table(); }
  ThreadPool& threads() override { return inner_->threads(); }
  const FusedKernels& fused() const override { return Fused(); }
  std::unique_ptr<RecordedWork> Record(const std::function<void()>& work) override {
    work();
    work();
    return std::make_unique<Recorded>(work);
  }

 private:
  std::unique_ptr<Backend> inner_;
};

Backend& Inner(Backend& backend) { return static_cast<StepBackend&>(backend).inner(); }

template <auto kMember, typename Args>
void Forward(Backend& backend, const Args& args) {
  (Inner(backend).kernels().*kMember)(Inner(backend), args);
}

const KernelTable& Table() {
  static const KernelTable table = [] {
    KernelTable t;
#define STILLHOUSE_OP(Name) t.Name = Forward<&KernelTable::Name, Name##Args>;
#define STILLHOUSE_OP_GRAD(Name) \
  STILLHOUSE_OP(Name)            \
  t.Name##Grad = Forward<&KernelTable::Name##Grad, Name##GradArgs>;
#include "kernels/ops/op_list.inc"
#undef STILLHOUSE_OP
#undef STILLHOUSE_OP_GRAD
    return t;
  }();
  return table;
}

void NormLinear(Backend& backend, const NormLinearArgs& args) {
  const Context ctx{&Inner(backend)};
  ctx.kernels().Linear(*ctx.backend, {RmsNorm(ctx, args.x, args.norm, args.eps), args.weight, Tensor(), args.out});
}

void LinearAdd(Backend& backend, const LinearAddArgs& args) {
  const Context ctx{&Inner(backend)};
  ctx.kernels().Add(*ctx.backend, {args.residual, Linear(ctx, args.x, args.weight), args.residual});
}

void NormSwiGlu(Backend& backend, const NormSwiGluArgs& args) {
  *args.out = stillhouse::NormSwiGlu({&Inner(backend)}, args.x, args.norm, args.eps, args.gate_up);
}

void RopeAngles(Backend&, const RopeAnglesArgs& args) {
  const size_t pairs = args.config->inv_freq.size();
  float* out = args.out.f32();
  for (int64_t r = 0; r < args.positions.elements(); ++r) {
    for (size_t j = 0; j < pairs; ++j) {
      const double angle = args.positions.i32()[r] * args.config->inv_freq[j];
      out[j] = args.config->attention_scale * static_cast<float>(std::cos(angle));
      out[pairs + j] = args.config->attention_scale * static_cast<float>(std::sin(angle));
    }
    out += 2 * pairs;
  }
}

void QkvRope(Backend& backend, const QkvRopeArgs& args) {
  const Context ctx{&Inner(backend)};
  const int64_t rows = args.qkv.dim(0), width = args.qkv.dim(2), pairs = args.angles.dim(1) / 2;
  Tensor q = args.qkv.Slice(1, 0, args.heads), k = args.qkv.Slice(1, args.heads, args.heads + args.kv_heads);
  if (args.q_norm) ctx.backend->Copy(RmsNorm(ctx, q, args.q_norm, args.eps), q);
  if (args.k_norm) ctx.backend->Copy(RmsNorm(ctx, k, args.k_norm, args.eps), k);
  for (int64_t r = 0; r < rows; ++r) {
    const float* angles = args.angles.f32() + r * 2 * pairs;
    for (int64_t h = 0; h < args.heads + 2 * args.kv_heads; ++h) {
      float* x = args.qkv.f32() + (r * args.qkv.dim(1) + h) * width;
      for (int64_t j = 0; h < args.heads + args.kv_heads && j < pairs; ++j) {
        float& a = x[args.interleaved ? 2 * j : j];
        float& b = x[args.interleaved ? 2 * j + 1 : j + pairs];
        const float turned = a * angles[j] - b * angles[pairs + j];
        b = b * angles[j] + a * angles[pairs + j];
        a = turned;
      }
      if (h < args.heads || !args.rows || !args.rows->places) continue;
      STILLHOUSE_CHECK(args.rows->dtype == DType::kF32);
      const bool value = h >= args.heads + args.kv_heads;
      const int64_t place = args.rows->places.data<int64_t>()[2 * r + value];
      if (place == 0) continue;
      float* to = reinterpret_cast<float*>(place) + args.layer * args.rows->layer_stride +
                  (h - args.heads - value * args.kv_heads) * args.rows->head_stride;
      std::memcpy(to, x, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

void NormQkvRope(Backend& backend, const NormQkvRopeArgs& args) {
  NormLinear(backend, args.product);
  QkvRope(backend, args.turn);
}

// A segment of all layers, and one use of one by a sequence, as they lie in a step's bytes.
struct Run {
  const float* k;
  const float* v;
  const float* beta;
  int64_t slots, k_head, v_head, beta_head, k_layer, v_layer, beta_layer;
  bool memory;
};
struct Use {
  int32_t sequence, rows, segment;  // segment −1: it has none
};

void PlanAttentionStep(Backend&, const PlanAttentionStepArgs& args) {
  STILLHOUSE_CHECK(!args.bf16);
  std::vector<Run> runs;
  for (const KvLayers& s : *args.segments) {
    STILLHOUSE_CHECK(s.k.stride(1) == s.k.dim(2) && s.v.stride(1) == s.v.dim(2)) << s.k.DebugString();
    runs.push_back({s.k.f32(), s.v.f32(), s.beta ? s.beta.f32() : nullptr, s.k.dim(1), s.k.stride(0), s.v.stride(0),
                    s.beta ? s.beta.stride(0) : 0, s.k_stride, s.v_stride, s.beta_stride, s.memory});
  }
  std::vector<Use> uses;
  int64_t rows = 0;
  for (size_t i = 0; i < args.sequences->size(); ++i) {
    const AttentionSequence& sequence = (*args.sequences)[i];
    rows += sequence.row_count;
    const auto index = static_cast<int32_t>(i), count = static_cast<int32_t>(sequence.row_count);
    if (sequence.segments.empty()) uses.push_back({index, count, -1});
    for (int32_t segment : sequence.segments) uses.push_back({index, count, segment});
  }
  AttentionStep::Sizes& sizes = args.out->sizes;
  sizes = {};
  sizes.rows = rows;
  sizes.layers = args.layers;
  sizes.heads = args.heads;
  sizes.kv_heads = args.kv_heads;
  sizes.width = args.width;
  sizes.runs = static_cast<int64_t>(runs.size());
  sizes.listed_rows = static_cast<int64_t>(uses.size());
  args.out->bytes.resize(runs.size() * sizeof(Run) + uses.size() * sizeof(Use));
  if (!runs.empty()) std::memcpy(args.out->bytes.data(), runs.data(), runs.size() * sizeof(Run));
  std::memcpy(args.out->bytes.data() + runs.size() * sizeof(Run), uses.data(), uses.size() * sizeof(Use));
}

void AttentionStepTables(Backend& backend, const AttentionStepTablesArgs& args) {
  *args.tables = Tensor::Empty(backend.pool(), DType::kU8, {1});
}

// [heads, slots, width] at distances of its own; the layer's.
Tensor View(const float* data, int64_t heads, int64_t slots, int64_t head_stride, int64_t width) {
  STILLHOUSE_CHECK_EQ(head_stride % width, 0);
  return Tensor::Wrap(data, DType::kF32, {heads, head_stride / width, width}).Slice(1, 0, slots);
}

void AttentionOfStep(Backend& backend, const AttentionOfStepArgs& args) {
  const AttentionStep::Sizes& s = args.sizes;
  const Run* runs = args.bytes.data<Run>();
  const Use* uses = reinterpret_cast<const Use*>(runs + s.runs);
  std::vector<KvSegment> segments;
  for (int64_t i = 0; i < s.runs; ++i) {
    const Run& run = runs[i];
    KvSegment segment{View(run.k + args.layer * run.k_layer, s.kv_heads, run.slots, run.k_head, s.width),
                      View(run.v + args.layer * run.v_layer, s.kv_heads, run.slots, run.v_head, s.width), Tensor(),
                      run.memory};
    if (run.beta) {
      segment.beta = View(run.beta + args.layer * run.beta_layer, s.kv_heads, run.slots, run.beta_head, 1).Select(2, 0);
    }
    segments.push_back(std::move(segment));
  }
  std::vector<AttentionSequence> sequences;
  int64_t row = 0;
  for (int64_t i = 0; i < s.listed_rows; ++i) {
    if (i == 0 || uses[i].sequence != uses[i - 1].sequence) {
      sequences.push_back({row, uses[i].rows, {}});
      row += uses[i].rows;
    }
    if (uses[i].segment >= 0) sequences.back().segments.push_back(uses[i].segment);
  }
  AttentionArgs attention{args.q, args.k, args.v, &segments, &sequences, args.scale, args.out};
  attention.stored_mass = args.stored_mass;
  Inner(backend).kernels().Attention(Inner(backend), attention);
}

// The numbers of a row: what is left of a SampleRow without lists.
struct Settings {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed, step;
};
struct Drawn {
  int32_t id;
  int32_t invalid;
};

void PackDraws(const PackDrawsArgs& args) {
  STILLHOUSE_CHECK(CanDrawRows(*args.rows));
  std::vector<Settings> settings;
  for (const SampleRow& row : *args.rows) {
    settings.push_back({row.temperature, row.top_p, row.min_p, row.top_k, row.seed, row.step});
  }
  args.out->resize(settings.size() * sizeof(Settings));
  std::memcpy(args.out->data(), settings.data(), args.out->size());
}

void Draw(Backend& backend, const DrawArgs& args) {
  const Context ctx{&Inner(backend)};
  std::vector<SampleRow> rows(static_cast<size_t>(args.logits.dim(0)));
  for (size_t i = 0; i < rows.size(); ++i) {
    const Settings& s = args.settings.data<Settings>()[i];
    rows[i].temperature = s.temperature;
    rows[i].top_p = s.top_p;
    rows[i].min_p = s.min_p;
    rows[i].top_k = s.top_k;
    rows[i].seed = s.seed;
    rows[i].step = s.step;
  }
  const std::vector<SampledToken> tokens = Sample(ctx, args.logits, args.vocabulary, rows);
  *args.out = ctx.Empty(DType::kU8, {static_cast<int64_t>(tokens.size() * sizeof(Drawn))});
  for (size_t i = 0; i < tokens.size(); ++i) args.out->data<Drawn>()[i] = {tokens[i].id, tokens[i].invalid};
}

void UnpackDraws(const UnpackDrawsArgs& args) {
  for (size_t i = 0; i < args.out->size(); ++i) {
    Drawn drawn;
    std::memcpy(&drawn, args.bytes + i * sizeof(drawn), sizeof(drawn));
    (*args.out)[i].id = drawn.id;
    (*args.out)[i].invalid = drawn.invalid != 0;
  }
}

const FusedKernels& Fused() {
  static const FusedKernels table{.NormLinear = NormLinear,
                                  .LinearAdd = LinearAdd,
                                  .NormSwiGlu = NormSwiGlu,
                                  .RopeAngles = RopeAngles,
                                  .QkvRope = QkvRope,
                                  .NormQkvRope = NormQkvRope,
                                  .PlanAttentionStep = PlanAttentionStep,
                                  .AttentionStepTables = AttentionStepTables,
                                  .AttentionOfStep = AttentionOfStep,
                                  .PackDraws = PackDraws,
                                  .Draw = Draw,
                                  .UnpackDraws = UnpackDraws};
  return table;
}

}  // namespace

std::unique_ptr<Backend> MakeStepBackend(const CpuBackendOptions& options) {
  return std::make_unique<StepBackend>(options);
}

}  // namespace stillhouse::testing
