// Attention on the GPU: checks, the plan, the launches.
#include "kernels/ops/attention.h"

#include <algorithm>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_maps.h"
#include "kernels/cuda/attention_plan.h"
#include "kernels/cuda/attention_state.h"
#include "kernels/cuda/attention_tables.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"

namespace stillhouse::cuda {
namespace {

// Keys and values of the call are all of one type: what the segments hold; without segments, what the own rows are.
DType StorageOf(const AttentionArgs& args) {
  for (const KvSegment& segment : *args.segments) {
    if (segment.k.dim(1) > 0) return segment.k.dtype();
  }
  return args.k ? args.k.dtype() : DType::kF32;
}

class Forward {
 public:
  Forward(Backend& backend, const AttentionArgs& args)
      : backend_(backend),
        device_(DeviceOf(backend)),
        stream_(device_.Use()),
        args_(args),
        storage_(StorageOf(args)),
        bf16_(storage_ == DType::kBF16) {
    const int64_t rows = args.q.dim(0);
    tensors_.heads = static_cast<int32_t>(args.q.dim(1));
    tensors_.width = static_cast<int32_t>(args.q.dim(2));
    tensors_.kv_heads = static_cast<int32_t>(args.k ? args.k.dim(1) : args.segments->at(0).k.dim(0));
    tensors_.scale = args.scale;
    STILLHOUSE_CHECK(tensors_.width <= kAttentionMaxWidth) << "heads wider than 256: " << tensors_.width;
    STILLHOUSE_CHECK_LT(rows, int64_t{1} << 31);
    STILLHOUSE_CHECK(bf16_ || storage_ == DType::kF32) << DTypeName(storage_);
    SetRows(args.q, args.out, &tensors_);
    STILLHOUSE_CHECK(bf16_ || (!tensors_.q_bf16 && !tensors_.out_bf16)) << "bf16 queries on f32 keys";
    if (args.lse) {
      tensors_.lse = args.lse.f32();
      tensors_.lse_row = args.lse.stride(0);
      tensors_.lse_head = args.lse.stride(1);
    }
    if (args.stored_mass) {
      mass_ = Tensor::Empty(backend.pool(), DType::kF32, {rows, tensors_.heads});
      tensors_.mass = mass_.f32();
    }
  }

  void Run() {
    if (args_.q.dim(0) == 0) return;
    std::vector<AttentionRun> segments;
    segments.reserve(args_.segments->size());
    for (const KvSegment& segment : *args_.segments) {
      STILLHOUSE_CHECK(segment.k.dim(1) == 0 || (segment.k.dtype() == storage_ && segment.v.dtype() == storage_))
          << "keys and values of one call are of one type";
      segments.push_back(SegmentRun(segment));
    }
    AttentionRun own;
    if (args_.k) own = OwnRun(args_.k, args_.v);
    // Few rows are merged as they are; of more, tiles of the segments' type are made.
    const bool long_sequences = std::any_of(args_.sequences->begin(), args_.sequences->end(),
                                            [](const AttentionSequence& s) { return !IsFewRows(s.row_count); });
    if (args_.k && bf16_ && args_.k.dtype() == DType::kF32 && long_sequences) own = OwnToBf16();

    AttentionPlanOptions options = OptionsFor(device_, storage_, tensors_.width);
    options.rows = args_.q.dim(0);
    options.heads = tensors_.heads;
    options.kv_heads = tensors_.kv_heads;
    options.own = args_.k.defined();
    options.own_bytes = own_k_ || (args_.k && args_.k.dtype() == DType::kBF16) ? 2 : 4;
    const bool vector = std::all_of(segments.begin(), segments.end(),
                                    [](const AttentionRun& run) { return run.slots == 0 || run.vector; });
    if (tensors_.scale <= 0.0f || !tensors_.q_vector || !tensors_.out_vector || !vector ||
        (own.slots > 0 && !own.vector)) {
      options.tall_queries = 0;
    }
    const auto plan = device_.attention().Plan(options, segments, own, *args_.sequences);

    TableUpload tables;
    const size_t runs = tables.Add(plan->runs), narrow = tables.Add(plan->narrow.items),
                 wide = tables.Add(plan->wide.items), tall = tables.Add(plan->tall.items),
                 rows = tables.Add(plan->rows), merges = tables.Add(plan->merges),
                 partials = tables.Add(plan->partials);
    AttentionMaps maps = {};
    std::vector<AttentionPlaces> run_places;
    if (!plan->tall.items.empty()) run_places = PlacesOf(plan->runs, options.kv_heads, &maps);
    const size_t places = tables.Add(run_places);
    tables.Upload(backend_, tensors_.width <= kAttentionInlineWidth);
    Tensor partial;
    if (plan->partial_rows > 0) {
      const int64_t places = plan->partial_rows * tensors_.heads;
      partial = Tensor::Empty(backend_.pool(), DType::kF32, {places * (tensors_.width + 3)});
      tensors_.partial_o = partial.f32();
      tensors_.partial_state = partial.f32() + places * tensors_.width;
    }

    AttentionLaunches launches;
    AttentionMerging& merging = launches.merging;
    merging.merges = tables.At<AttentionMerge>(merges);
    merging.partials = tables.At<int32_t>(partials);
    merging.begin = plan->merges_begin();
    merging.count = plan->merges_apart;
    merging.most_partials = plan->most_partials();
    merging.inline_tables = tables.inline_tables();
    if (args_.k) SetOwnRows(args_.k, args_.v, &merging);
    AttentionItems items;
    items.inline_tables = tables.inline_tables();
    items.runs = tables.At<AttentionRun>(runs);
    items.rows = tables.At<int32_t>(rows);
    const auto with = [&](size_t place, const AttentionForwardPlan::Items& planned) {
      AttentionItems these = items;
      these.items = tables.At<AttentionItem>(place);
      these.count = static_cast<int32_t>(planned.items.size());
      these.cluster = planned.cluster;
      return these;
    };
    launches.tall = with(tall, plan->tall);
    launches.tall.places = tables.At<AttentionPlaces>(places);
    launches.tall.maps = &maps;
    launches.wide = with(wide, plan->wide);
    launches.narrow = with(narrow, plan->narrow);
    launches.narrow.brief = plan->narrow.brief;
    launches.tall_merges = plan->tall.merges;
    LaunchAttention(device_, bf16_, tensors_, launches, stream_);
    if (args_.stored_mass) {
      LaunchAttentionMass(tensors_.mass, args_.stored_mass.f32(), args_.q.dim(0), tensors_.heads, stream_);
    }
  }

 private:
  // The step's own keys and values as the segments hold theirs.
  AttentionRun OwnToBf16() {
    own_k_ = ToBf16(args_.k);
    own_v_ = ToBf16(args_.v);
    return OwnRun(own_k_, own_v_);
  }

  Tensor ToBf16(const Tensor& t) {
    Tensor to = Tensor::Empty(backend_.pool(), DType::kBF16, t.shape());
    LaunchAttentionToBf16(t.f32(), t.stride(0), t.stride(1), t.dim(0), static_cast<int>(t.dim(1)),
                          static_cast<int>(t.dim(2)), to.raw(), stream_);
    return to;
  }

  Backend& backend_;
  Device& device_;
  cudaStream_t stream_;
  const AttentionArgs& args_;
  const DType storage_;
  const bool bf16_;
  AttentionTensors tensors_;
  Tensor mass_, own_k_, own_v_;
};

}  // namespace

void Attention(Backend& backend, const AttentionArgs& args) { Forward(backend, args).Run(); }

}  // namespace stillhouse::cuda
