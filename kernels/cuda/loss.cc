#include "kernels/ops/loss.h"

#include <algorithm>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/loss_launch.h"
#include "kernels/cuda/select_room.h"

namespace stillhouse::cuda {
namespace {

// Logits of a fused loss are made for as many rows at a time as fit into this: 640 rows of a vocabulary of 49152.
constexpr int64_t kChunkBytes = int64_t{128} << 20;

Rows RowsOf(const Tensor& t) {
  STILLHOUSE_CHECK(t.rank() == 2 && (t.dim(1) <= 1 || t.stride(1) == 1)) << t.DebugString();
  return {t.f32(), t.stride(0)};
}

Tensor Scratch(Backend& backend, int64_t floats) { return Tensor::Empty(backend.pool(), DType::kF32, {floats}); }

// The weights of the rows of a loss and the factor of its reduction, on the device.
struct RowWeights {
  RowWeights(Backend& backend, int64_t rows) : weights(Scratch(backend, rows)), scale(Scratch(backend, 1)) {}
  Tensor weights, scale;
};

CrossEntropyRows RowsOf(const Tensor& z, const Tensor& targets, const Tensor& soft_targets,
                        const CrossEntropyOptions& options, const RowWeights& weights) {
  CrossEntropyRows rows;
  rows.z = RowsOf(z);
  if (targets) rows.targets = targets.i32();
  if (soft_targets) {
    rows.soft = soft_targets.f32();
    rows.soft_stride = soft_targets.stride(0);
  }
  rows.rows = z.dim(0);
  rows.n = z.dim(1);
  rows.label_smoothing = options.label_smoothing;
  rows.z_loss = options.z_loss;
  rows.weights = weights.weights.f32();
  rows.scale = weights.scale.f32();
  return rows;
}

RowWeights WeighTargets(Backend& backend, const Tensor& targets, const Tensor& class_weights, int64_t rows, int64_t n,
                        const CrossEntropyOptions& options) {
  RowWeights weights(backend, rows);
  LaunchWeighTargets(targets ? targets.i32() : nullptr, class_weights ? class_weights.f32() : nullptr, rows, n,
                     options.ignore_index, options.reduction == Reduction::kMean, weights.weights.f32(),
                     weights.scale.f32(), StreamOf(backend));
  return weights;
}

// Calls body(first row, logits [rows, V]) for chunks of x · weightᵀ; with dx, what it leaves in the logits is their
// gradient, which is folded into dx.
template <typename Body>
void ForEachChunk(Backend& backend, const Tensor& x, const Tensor& weight, const Tensor& dx, const Body& body) {
  const int64_t rows = x.dim(0), vocabulary = weight.dim(0);
  if (rows == 0) return;
  int64_t chunk = std::max<int64_t>(kChunkBytes / (vocabulary * 4), 1);
  if (chunk > 32) chunk = chunk / 32 * 32;
  chunk = std::min(chunk, rows);
  const Tensor scratch = Tensor::Empty(backend.pool(), DType::kF32, {chunk, vocabulary});
  if (dx) {
    const Rows to = RowsOf(dx);
    STILLHOUSE_CUDA_CHECK(cudaMemset2DAsync(to.data, static_cast<size_t>(std::max(to.stride, dx.dim(1))) * 4, 0,
                                            static_cast<size_t>(dx.dim(1)) * 4, static_cast<size_t>(rows),
                                            StreamOf(backend)));
  }
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t end = std::min(rows, begin + chunk);
    const Tensor logits = scratch.Slice(0, 0, end - begin);
    LinearInto(backend, x.Slice(0, begin, end), weight, Tensor(), logits);
    body(begin, logits);
    if (dx) LinearGradInto(backend, logits, weight, dx.Slice(0, begin, end));
  }
}

}  // namespace

void Softmax(Backend& backend, const SoftmaxArgs& args) {
  LaunchSoftmax(RowsOf(args.z), RowsOf(args.out), args.z.dim(0), args.z.dim(1), false, StreamOf(backend));
}

void SoftmaxGrad(Backend& backend, const SoftmaxGradArgs& args) {
  LaunchSoftmaxGrad(RowsOf(args.out), RowsOf(args.dout), RowsOf(args.dz), args.out.dim(0), args.out.dim(1), false,
                    StreamOf(backend));
}

void LogSoftmax(Backend& backend, const LogSoftmaxArgs& args) {
  LaunchSoftmax(RowsOf(args.z), RowsOf(args.out), args.z.dim(0), args.z.dim(1), true, StreamOf(backend));
}

void LogSoftmaxGrad(Backend& backend, const LogSoftmaxGradArgs& args) {
  LaunchSoftmaxGrad(RowsOf(args.out), RowsOf(args.dout), RowsOf(args.dz), args.out.dim(0), args.out.dim(1), true,
                    StreamOf(backend));
}

void CrossEntropy(Backend& backend, const CrossEntropyArgs& args) {
  const int64_t rows = args.z.dim(0);
  const RowWeights weights = WeighTargets(backend, args.targets, args.class_weights, rows, args.z.dim(1), args.options);
  const Tensor losses = Scratch(backend, rows);
  LaunchCrossEntropy(RowsOf(args.z, args.targets, args.soft_targets, args.options, weights), false, losses.f32(),
                     StreamOf(backend));
  LaunchReduceLosses(losses.f32(), weights.scale.f32(), rows, args.options.reduction == Reduction::kNone,
                     args.loss.f32(), args.loss.stride(0), StreamOf(backend));
}

void CrossEntropyGrad(Backend& backend, const CrossEntropyGradArgs& args) {
  const RowWeights weights =
      WeighTargets(backend, args.targets, args.class_weights, args.z.dim(0), args.z.dim(1), args.options);
  const bool per_row = args.options.reduction == Reduction::kNone;
  LaunchCrossEntropyGrad(RowsOf(args.z, args.targets, args.soft_targets, args.options, weights), args.dloss.f32(),
                         per_row ? args.dloss.stride(0) : 0, RowsOf(args.dz), StreamOf(backend));
}

void LinearCrossEntropy(Backend& backend, const LinearCrossEntropyArgs& args) {
  const int64_t rows = args.x.dim(0);
  const RowWeights weights = WeighTargets(backend, args.targets, Tensor(), rows, args.weight.dim(0), args.options);
  const Tensor losses = Scratch(backend, rows);
  ForEachChunk(backend, args.x, args.weight, args.dx, [&](int64_t begin, const Tensor& logits) {
    CrossEntropyRows chunk = RowsOf(logits, args.targets, Tensor(), args.options, weights);
    chunk.targets += begin;
    chunk.weights += begin;
    LaunchCrossEntropy(chunk, args.dx.defined(), losses.f32() + begin, StreamOf(backend));
  });
  LaunchReduceLosses(losses.f32(), weights.scale.f32(), rows, false, args.loss.f32(), 1, StreamOf(backend));
}

void LinearDistill(Backend& backend, const LinearDistillArgs& args) {
  const int64_t rows = args.x.dim(0), vocabulary = args.weight.dim(0), columns = args.ids.dim(1);
  RowWeights weights(backend, rows);
  LaunchWeighCandidates(args.ids.i32(), columns, args.row_weights ? args.row_weights.f32() : nullptr, rows, vocabulary,
                        weights.weights.f32(), weights.scale.f32(), StreamOf(backend));
  const Tensor losses = Scratch(backend, rows), scratch = Scratch(backend, 2 * rows * columns);
  DistillRows chunk;
  chunk.n = vocabulary;
  chunk.columns = columns;
  chunk.kind = args.mode == DistillMode::kRenormalised ? DistillKind::kRenormalised
               : args.mode == DistillMode::kRaw        ? DistillKind::kRaw
                                                       : DistillKind::kTail;
  chunk.scale = weights.scale.f32();
  ForEachChunk(backend, args.x, args.weight, args.dx, [&](int64_t begin, const Tensor& logits) {
    chunk.z = logits.f32();
    chunk.rows = logits.dim(0);
    chunk.ids = args.ids.i32() + begin * columns;
    chunk.logprobs = args.logprobs.f32() + begin * columns;
    chunk.weights = weights.weights.f32() + begin;
    chunk.q = scratch.f32() + begin * columns;
    chunk.logits = scratch.f32() + (rows + begin) * columns;
    chunk.losses = losses.f32() + begin;
    LaunchDistill(chunk, args.dx.defined(), StreamOf(backend));
  });
  LaunchReduceLosses(losses.f32(), weights.scale.f32(), rows, false, args.loss.f32(), 1, StreamOf(backend));
}

void TopLogprobs(Backend& backend, const TopLogprobsArgs& args) {
  TopLogprobsRows chunk;
  chunk.n = args.weight.dim(0);
  chunk.k = args.k;
  // An id and a key are halves of one 64-bit word.
  STILLHOUSE_CHECK(chunk.n < int64_t{1} << 31) << chunk.n;
  Tensor list;
  ForEachChunk(backend, args.x, args.weight, Tensor(), [&](int64_t begin, const Tensor& logits) {
    chunk.z = logits.f32();
    chunk.rows = logits.dim(0);
    const int64_t room = chunk.rows * SelectListRoom(chunk.k);
    if (room > 0 && !list) list = Scratch(backend, 2 * room);
    chunk.list = list ? list.data<uint64_t>() : nullptr;
    if (args.k > 0) {
      chunk.top_ids = args.top_ids.i32() + begin * args.k;
      chunk.top_logprobs = args.top_logprobs.f32() + begin * args.k;
    }
    if (args.tokens) {
      chunk.tokens = args.tokens.i32() + begin;
      chunk.token_logprobs = args.token_logprobs.f32() + begin;
    }
    LaunchTopLogprobs(chunk, StreamOf(backend));
  });
}

}  // namespace stillhouse::cuda
