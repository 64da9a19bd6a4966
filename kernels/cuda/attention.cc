// Attention on the GPU: checks, the plan, the launches.
#include "kernels/ops/attention.h"

#include <algorithm>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_plan.h"
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
        bf16_(StorageOf(args) == DType::kBF16) {
    const int64_t rows = args.q.dim(0);
    tensors_.heads = static_cast<int32_t>(args.q.dim(1));
    tensors_.width = static_cast<int32_t>(args.q.dim(2));
    tensors_.kv_heads = static_cast<int32_t>(args.k ? args.k.dim(1) : args.segments->at(0).k.dim(0));
    tensors_.scale = args.scale;
    STILLHOUSE_CHECK(tensors_.width <= kAttentionMaxWidth) << "heads wider than 256: " << tensors_.width;
    STILLHOUSE_CHECK_LT(rows, int64_t{1} << 31);
    STILLHOUSE_CHECK(bf16_ || StorageOf(args) == DType::kF32) << DTypeName(StorageOf(args));
    tensors_.q = args.q.raw();
    tensors_.q_bf16 = args.q.dtype() == DType::kBF16;
    tensors_.q_vector = IsVector(args.q, {0, 1});
    tensors_.q_row = args.q.stride(0);
    tensors_.q_head = args.q.stride(1);
    tensors_.out = args.out.raw();
    tensors_.out_bf16 = args.out.dtype() == DType::kBF16;
    tensors_.out_row = args.out.stride(0);
    tensors_.out_head = args.out.stride(1);
    tensors_.out_vector = !tensors_.out_bf16 && IsVector(args.out, {0, 1});
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
      STILLHOUSE_CHECK(segment.k.dim(1) == 0 ||
                       (segment.k.dtype() == StorageOf(args_) && segment.v.dtype() == StorageOf(args_)))
          << "keys and values of one call are of one type";
      segments.push_back(SegmentRun(segment));
    }
    AttentionRun own;
    if (args_.k) own = OwnRun(args_.k, args_.v);
    const bool long_sequences = std::any_of(args_.sequences->begin(), args_.sequences->end(),
                                            [](const AttentionSequence& s) { return !IsFewRows(s.row_count); });
    if (args_.k && bf16_ && args_.k.dtype() == DType::kF32 && long_sequences) own = OwnToBf16();

    AttentionPlanOptions options;
    options.rows = args_.q.dim(0);
    options.heads = tensors_.heads;
    options.kv_heads = tensors_.kv_heads;
    options.width = tensors_.width;
    options.own = args_.k.defined();
    options.own_bytes = own_k_ || (args_.k && args_.k.dtype() == DType::kBF16) ? 2 : 4;
    options.narrow_queries = bf16_ ? kAttentionNarrowBf16 : kAttentionNarrowF32;
    options.wide_queries = kAttentionWide;
    const bool vector = std::all_of(segments.begin(), segments.end(),
                                    [](const AttentionRun& run) { return run.slots == 0 || run.vector; });
    if (bf16_ && tensors_.width == kAttentionTallWidth && tensors_.scale > 0.0f && tensors_.q_vector && vector &&
        (own.slots == 0 || own.vector)) {
      options.tall_queries = kAttentionTall;
      options.tall_blocks = device_.multiprocessors();
    }
    const auto blocks = bf16_ ? AttentionBlocksBf16 : AttentionBlocksF32;
    options.narrow_blocks = device_.multiprocessors() * blocks(tensors_.width, false);
    options.wide_blocks = device_.multiprocessors() * blocks(tensors_.width, true);
    const AttentionForwardPlan plan = PlanAttention(options, segments, own, *args_.sequences);

    TableUpload tables;
    const size_t runs = tables.Add(plan.runs), narrow = tables.Add(plan.narrow), wide = tables.Add(plan.wide),
                 tall = tables.Add(plan.tall), rows = tables.Add(plan.rows), merges = tables.Add(plan.merges),
                 partials = tables.Add(plan.partials);
    tables.Upload(backend_, tensors_.width <= kAttentionInlineWidth && plan.tall.empty());
    Tensor partial;
    if (plan.partial_rows > 0) {
      const int64_t places = plan.partial_rows * tensors_.heads;
      partial = Tensor::Empty(backend_.pool(), DType::kF32, {places * (tensors_.width + 3)});
      tensors_.partial_o = partial.f32();
      tensors_.partial_state = partial.f32() + places * tensors_.width;
    }
    const auto launch = bf16_ ? LaunchAttentionBf16 : LaunchAttentionF32;
    AttentionItems items;
    items.inline_tables = tables.inline_tables();
    items.runs = tables.At<AttentionRun>(runs);
    items.rows = tables.At<int32_t>(rows);
    items.items = tables.At<AttentionItem>(tall);
    items.count = static_cast<int32_t>(plan.tall.size());
    LaunchAttentionTall(tensors_, items, stream_);
    items.items = tables.At<AttentionItem>(wide);
    items.count = static_cast<int32_t>(plan.wide.size());
    launch(tensors_, items, true, stream_);
    items.items = tables.At<AttentionItem>(narrow);
    items.count = static_cast<int32_t>(plan.narrow.size());
    launch(tensors_, items, false, stream_);

    AttentionMerging merging;
    merging.merges = tables.At<AttentionMerge>(merges);
    merging.partials = tables.At<int32_t>(partials);
    merging.count = static_cast<int32_t>(plan.merges.size());
    merging.inline_tables = tables.inline_tables();
    for (const AttentionMerge& m : plan.merges) {
      merging.most_partials = std::max(merging.most_partials, m.partial_end - m.partial_begin);
    }
    if (args_.k) {
      merging.k = args_.k.raw();
      merging.v = args_.v.raw();
      merging.own_bf16 = args_.k.dtype() == DType::kBF16;
      merging.k_row = args_.k.stride(0);
      merging.k_head = args_.k.stride(1);
      merging.v_row = args_.v.stride(0);
      merging.v_head = args_.v.stride(1);
    }
    LaunchAttentionMerge(tensors_, merging, stream_);
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
  const bool bf16_;
  AttentionTensors tensors_;
  Tensor mass_, own_k_, own_v_;
};

}  // namespace

void Attention(Backend& backend, const AttentionArgs& args) { Forward(backend, args).Run(); }

}  // namespace stillhouse::cuda
