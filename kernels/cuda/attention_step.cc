// Attention of decode steps: one plan for all layers, whose tables lie where a recorded step reads them.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/attention_state.h"
#include "kernels/cuda/attention_tables.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/fused_launch.h"
#include "kernels/ops/fused.h"

namespace stillhouse::cuda {
namespace {

using Sizes = AttentionStep::Sizes;

// From so many partial rows on, a row is merged by several warps: another kernel.
constexpr int kManyPartials = 8;

// Sizes come in steps of at most a quarter, so that a growing sequence changes them seldom.
int64_t RoundUp(int64_t n) {
  if (n <= 4) return n;
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(n - 1))) / 4;
  return (n + step - 1) / step * step;
}

// Places of the tables in the step's bytes.
struct Layout {
  size_t runs = 0, layers = 0, narrow = 0, wide = 0, tall = 0, rows = 0, merges = 0, partials = 0, end = 0;

  explicit Layout(const Sizes& s) {
    const auto place = [this](size_t bytes) {
      const size_t at = (end + 15) / 16 * 16;
      end = at + bytes;
      return at;
    };
    runs = place(static_cast<size_t>(s.runs) * sizeof(AttentionRun));
    layers = place(static_cast<size_t>(s.runs) * sizeof(AttentionRunLayers));
    narrow = place(static_cast<size_t>(s.narrow) * sizeof(AttentionItem));
    wide = place(static_cast<size_t>(s.wide) * sizeof(AttentionItem));
    tall = place(static_cast<size_t>(s.tall) * sizeof(AttentionItem));
    rows = place(static_cast<size_t>(s.listed_rows) * sizeof(int32_t));
    merges = place(static_cast<size_t>(s.rows) * sizeof(AttentionMerge));
    partials = place(static_cast<size_t>(s.partials) * sizeof(int32_t));
  }
};

template <typename T>
void Put(const std::vector<T>& table, size_t at, std::vector<char>* bytes) {
  if (!table.empty()) std::memcpy(bytes->data() + at, table.data(), table.size() * sizeof(T));
}

template <typename T>
const T* At(const Tensor& bytes, size_t place) {
  return reinterpret_cast<const T*>(bytes.data<char>() + place);
}

}  // namespace

void PlanAttentionStep(Backend& backend, const PlanAttentionStepArgs& args) {
  STILLHOUSE_CHECK(IsAttentionStep(*args.sequences));
  Device& device = DeviceOf(backend);
  device.Use();
  const DType dtype = args.bf16 ? DType::kBF16 : DType::kF32;
  std::vector<AttentionRun> segments;
  segments.reserve(args.segments->size());
  for (const KvLayers& s : *args.segments) {
    STILLHOUSE_CHECK(s.k.dim(1) == 0 || (s.k.dtype() == dtype && s.v.dtype() == dtype)) << s.k.DebugString();
    AttentionRun run = SegmentRun({s.k, s.v, s.beta, s.memory});
    const int64_t vector = 16 / BlockBytes(dtype);
    run.vector = run.vector && s.k_stride % vector == 0 && s.v_stride % vector == 0;
    segments.push_back(run);
  }
  int64_t rows = 0;
  for (const AttentionSequence& s : *args.sequences) rows += s.row_count;
  AttentionPlanOptions options = OptionsFor(device, dtype, static_cast<int>(args.width));
  options.rows = rows;
  options.heads = static_cast<int>(args.heads);
  options.kv_heads = static_cast<int>(args.kv_heads);
  options.own = true;
  for (const AttentionRun& run : segments) {
    if (run.slots > 0 && !run.vector) options.tall_queries = 0;
  }
  AttentionForwardPlan plan = PlanAttention(options, segments, {}, *args.sequences);
  STILLHOUSE_CHECK(static_cast<int64_t>(plan.merges.size()) == rows);

  std::vector<AttentionRunLayers> layers;
  layers.reserve(plan.runs.size());
  for (const int32_t source : plan.run_sources) {
    STILLHOUSE_CHECK(source >= 0) << "a step's own rows are merged";
    const KvLayers& s = (*args.segments)[static_cast<size_t>(source)];
    layers.push_back({s.k_stride, s.v_stride, s.beta_stride});
  }
  Sizes sizes;
  sizes.rows = rows;
  sizes.layers = args.layers;
  sizes.heads = args.heads;
  sizes.kv_heads = args.kv_heads;
  sizes.width = args.width;
  sizes.bf16 = args.bf16;
  sizes.runs = RoundUp(static_cast<int64_t>(plan.runs.size()));
  sizes.narrow = RoundUp(static_cast<int64_t>(plan.narrow.items.size()));
  sizes.wide = RoundUp(static_cast<int64_t>(plan.wide.items.size()));
  sizes.tall = RoundUp(static_cast<int64_t>(plan.tall.items.size()));
  sizes.narrow_cluster = plan.narrow.cluster;
  sizes.wide_cluster = plan.wide.cluster;
  sizes.tall_cluster = plan.tall.cluster;
  sizes.tall_merges = plan.tall.merges;
  sizes.narrow_brief = plan.narrow.brief;
  sizes.listed_rows = RoundUp(static_cast<int64_t>(plan.rows.size()));
  sizes.partials = RoundUp(static_cast<int64_t>(plan.partials.size()));
  sizes.partial_rows = RoundUp(plan.partial_rows);
  sizes.merges_apart = plan.merges_apart;
  sizes.many_partials = plan.most_partials() >= kManyPartials;
  // Items beyond the plan's have no queries and no slots.
  AttentionItem idle;
  idle.head_count = 1;
  plan.narrow.items.resize(static_cast<size_t>(sizes.narrow), idle);
  plan.wide.items.resize(static_cast<size_t>(sizes.wide), idle);
  plan.tall.items.resize(static_cast<size_t>(sizes.tall), idle);

  const Layout layout(sizes);
  args.out->sizes = sizes;
  args.out->bytes.assign(layout.end, 0);
  Put(plan.runs, layout.runs, &args.out->bytes);
  Put(layers, layout.layers, &args.out->bytes);
  Put(plan.narrow.items, layout.narrow, &args.out->bytes);
  Put(plan.wide.items, layout.wide, &args.out->bytes);
  Put(plan.tall.items, layout.tall, &args.out->bytes);
  Put(plan.rows, layout.rows, &args.out->bytes);
  Put(plan.merges, layout.merges, &args.out->bytes);
  Put(plan.partials, layout.partials, &args.out->bytes);
}

void AttentionStepTables(Backend& backend, const AttentionStepTablesArgs& args) {
  const Sizes& s = args.sizes;
  const Layout layout(s);
  STILLHOUSE_CHECK(args.bytes.bytes() >= static_cast<int64_t>(layout.end));
  const int64_t bytes = std::max<int64_t>(1, s.runs * s.layers * static_cast<int64_t>(sizeof(AttentionRun)));
  *args.tables = Tensor::Empty(backend.pool(), DType::kU8, {bytes});
  LaunchLayRuns(At<AttentionRun>(args.bytes, layout.runs), At<AttentionRunLayers>(args.bytes, layout.layers), s.runs,
                s.layers, s.bf16 ? 2 : 4, reinterpret_cast<AttentionRun*>(args.tables->raw()), StreamOf(backend));
}

void AttentionOfStep(Backend& backend, const AttentionOfStepArgs& args) {
  const Sizes& s = args.sizes;
  const Layout layout(s);
  const cudaStream_t stream = StreamOf(backend);
  STILLHOUSE_CHECK(args.q.dim(0) == s.rows && args.q.dim(1) == s.heads && args.q.dim(2) == s.width)
      << args.q.DebugString();
  STILLHOUSE_CHECK(args.k.dim(1) == s.kv_heads && 0 <= args.layer && args.layer < s.layers);
  AttentionTensors t;
  t.heads = static_cast<int32_t>(s.heads);
  t.kv_heads = static_cast<int32_t>(s.kv_heads);
  t.width = static_cast<int32_t>(s.width);
  t.scale = args.scale;
  SetRows(args.q, args.out, &t);
  STILLHOUSE_CHECK(s.tall == 0 || (t.q_vector && t.out_vector && t.scale > 0.0f));
  Tensor mass, partial;
  if (args.stored_mass) {
    mass = Tensor::Empty(backend.pool(), DType::kF32, {s.rows, s.heads});
    t.mass = mass.f32();
  }
  if (s.partial_rows > 0) {
    const int64_t places = s.partial_rows * s.heads;
    partial = Tensor::Empty(backend.pool(), DType::kF32, {places * (s.width + 3)});
    t.partial_o = partial.f32();
    t.partial_state = partial.f32() + places * s.width;
  }
  AttentionItems items;
  items.runs = At<AttentionRun>(args.tables, 0) + args.layer * s.runs;
  items.rows = At<int32_t>(args.bytes, layout.rows);
  items.settled = true;  // by earlier steps: this one's own rows come in the merge
  const auto with = [&](size_t place, int64_t count, int64_t cluster) {
    AttentionItems these = items;
    these.items = At<AttentionItem>(args.bytes, place);
    these.count = static_cast<int32_t>(count);
    these.cluster = static_cast<int32_t>(cluster);
    return these;
  };
  AttentionLaunches launches;
  launches.tall = with(layout.tall, s.tall, s.tall_cluster);
  launches.wide = with(layout.wide, s.wide, s.wide_cluster);
  launches.narrow = with(layout.narrow, s.narrow, s.narrow_cluster);
  launches.narrow.brief = s.narrow_brief;
  launches.tall_merges = s.tall_merges;
  AttentionMerging& merging = launches.merging;
  merging.merges = At<AttentionMerge>(args.bytes, layout.merges);
  merging.partials = At<int32_t>(args.bytes, layout.partials);
  merging.begin = static_cast<int32_t>(s.rows - s.merges_apart);
  merging.count = static_cast<int32_t>(s.merges_apart);
  merging.most_partials = s.many_partials ? kManyPartials : 0;
  SetOwnRows(args.k, args.v, &merging);
  LaunchAttention(DeviceOf(backend), s.bf16, t, launches, stream);
  if (args.stored_mass) LaunchAttentionMass(t.mass, args.stored_mass.f32(), s.rows, t.heads, stream);
}

}  // namespace stillhouse::cuda
