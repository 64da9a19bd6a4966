// The fused ops between attention and attention: products of normalised rows, gates, rotations with their appends.
#include "kernels/ops/fused.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decompose_k_host.h"
#include "kernels/cuda/fused_launch.h"
#include "kernels/cuda/glu_product_launch.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/skinny.h"
#include "kernels/cuda/wide_product_launch.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/norm.h"

namespace stillhouse::cuda {
namespace {

// From so many rows on, gates are made by one launch (glu_product.cu): its tiles of 256 rows fill the GPU.
constexpr int64_t kGluRows = 512;

bool CanNormToBf16(const Tensor& x, const Tensor& norm) {
  return x.dim(1) % 4 == 0 && x.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(x.f32()) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(norm.f32()) % 16 == 0;
}

// Rows of bf16, normalised; slices of a product are added to x first.
Tensor NormToBf16(Backend& backend, const Tensor& x, const Tensor& norm, float eps, const Tensor& slices = {}) {
  const int64_t rows = x.dim(0), width = x.dim(1);
  const Tensor out = Tensor::Empty(backend.pool(), DType::kBF16, x.shape());
  NormToBf16Params p{x.f32(), x.stride(0), VectorOf(norm, width), eps, rows, width, out.raw()};
  p.multiprocessors = DeviceOf(backend).multiprocessors();
  if (slices) {
    p.slices = slices.f32();
    p.splits = static_cast<int>(slices.dim(0));
  }
  LaunchNormToBf16(p, StreamOf(backend));
  return out;
}

// The rows as the product takes them: f32, or bf16 at once.
Tensor NormRows(Backend& backend, const Tensor& x, const Tensor& norm, float eps, bool bf16) {
  if (bf16 && CanNormToBf16(x, norm)) return NormToBf16(backend, x, norm, eps);
  return RmsNorm({&backend}, x, norm, eps);
}

// The slices of a product, for what follows to add up; none: the product goes another way.
Tensor SlicesOf(Backend& backend, const Tensor& x, const Tensor& weight, PlanEpilogue ending) {
  if (x.dim(0) == 0 || x.dtype() != DType::kBF16 || !IsBf16Product(backend, weight)) return Tensor();
  CheckMatrix(x, x.dim(0), weight.dim(1));
  const DecomposeKShape shape = LinearShape(x, weight);
  const DecomposeKPlan way = WayOfLinear(backend, shape, ending);
  return LeavesSlices(way) ? RunSlices(backend, shape, way) : Tensor();
}

QkvRopeParams TurnOf(const QkvRopeArgs& args) {
  STILLHOUSE_CHECK(args.qkv.rank() == 3 && args.qkv.contiguous() && args.qkv.dim(1) == args.heads + 2 * args.kv_heads)
      << args.qkv.DebugString();
  QkvRopeParams p;
  const bool bf16 = args.qkv.dtype() == DType::kBF16;
  if (bf16) {
    STILLHOUSE_CHECK(CanTurnBf16(args.qkv.dim(2), args.angles.dim(1) / 2)) << args.qkv.DebugString();
    p.qkv_bf16 = args.qkv.raw();
  } else {
    p.qkv = args.qkv.f32();
  }
  p.rows = args.qkv.dim(0);
  p.heads = static_cast<int>(args.heads);
  p.kv_heads = static_cast<int>(args.kv_heads);
  p.width = static_cast<int>(args.qkv.dim(2));
  p.q_norm = VectorOf(args.q_norm, p.width);
  p.k_norm = VectorOf(args.k_norm, p.width);
  p.eps = args.eps;
  p.pairs = static_cast<int>(args.angles.dim(1) / 2);
  STILLHOUSE_CHECK(args.angles.contiguous() && args.angles.dim(0) == p.rows && 2 * p.pairs <= p.width)
      << args.angles.DebugString();
  p.angles = args.angles.f32();
  p.interleaved = args.interleaved;
  if (args.rows && args.rows->places) {
    STILLHOUSE_CHECK(args.rows->places.dtype() == DType::kI64 && args.rows->places.elements() == 2 * p.rows);
    p.places = args.rows->places.data<int64_t>();
    p.layer_offset = args.layer * args.rows->layer_stride;
    p.head_stride = args.rows->head_stride;
    p.kv_bf16 = args.rows->dtype == DType::kBF16;
    STILLHOUSE_CHECK(p.kv_bf16 || !bf16) << "bf16 rows to f32 pages";
  }
  return p;
}

// Whether the kernel of few rows, which ends so in the same launch, is the way of this product.
bool EndsInOneLaunch(Backend& backend, const Tensor& x, const Tensor& weight, PlanEpilogue ending) {
  return x.dtype() == DType::kBF16 && IsBf16Product(backend, weight) && x.dim(0) > 0 &&
         WayOfLinear(backend, LinearShape(x, weight), ending).way == DecomposeKWay::kSkinny;
}

// The rows as the product takes them, of what a sum left where that is all.
Tensor NormedRows(Backend& backend, const Tensor& x, const Tensor& norm, float eps, const ScaledRows& scaled,
                  const Tensor& weight) {
  const bool bf16 = IsBf16Product(backend, weight);
  return bf16 && scaled.values && !scaled.squares ? scaled.values : NormRows(backend, x, norm, eps, bf16);
}

// Rows, normalised, times a weight, to what `end` says of the product: where the kernel of few rows is the way, which
// leaves nothing to do. Else the rows as the product takes them.
template <typename End>
Tensor RunNormed(Backend& backend, const Tensor& x, const Tensor& norm, float eps, const ScaledRows& scaled,
                 const Tensor& weight, PlanEpilogue ending, const End& end) {
  const auto run = [&](SkinnyParams p) {
    end(p);
    return RunSkinny(backend, p);
  };
  if (scaled.squares && EndsInOneLaunch(backend, scaled.values, weight, ending) &&
      run(SkinnyOf(backend, scaled, eps, weight))) {
    return Tensor();
  }
  const Tensor rows = NormedRows(backend, x, norm, eps, scaled, weight);
  if (EndsInOneLaunch(backend, rows, weight, ending) && run(SkinnyOf(backend, rows, weight))) return Tensor();
  return rows;
}

PlanEpilogue EndingOf(const NormLinearArgs& args) {
  return args.scaled.squares ? PlanEpilogue::kNormed : PlanEpilogue::kNone;
}

void SetOut(SkinnyParams& p, const Tensor& out) {
  p.out = out.f32();
  p.out_stride = out.stride(0);
}

}  // namespace

void NormLinear(Backend& backend, const NormLinearArgs& args) {
  CheckMatrix(args.x, args.x.dim(0), args.weight.dim(1));
  CheckMatrix(args.out, args.x.dim(0), args.weight.dim(0));
  if (args.x.dim(0) == 0) return;
  const PlanEpilogue ending = EndingOf(args);
  const auto end = [&](SkinnyParams& p) { SetOut(p, args.out); };
  const Tensor rows = RunNormed(backend, args.x, args.norm, args.eps, args.scaled, args.weight, ending, end);
  if (rows) LinearInto(backend, rows, args.weight, Tensor(), args.out, /*add=*/false, ending);
}

void LinearAdd(Backend& backend, const LinearAddArgs& args) {
  const int64_t rows = args.x.dim(0), n = args.weight.dim(0);
  const PlanEpilogue ending = args.scaled ? PlanEpilogue::kScaledRows : PlanEpilogue::kNone;
  if (args.scaled && EndsInOneLaunch(backend, args.x, args.weight, ending)) {
    CheckMatrix(args.x, rows, args.weight.dim(1));
    CheckMatrix(args.residual, rows, n);
    SkinnyParams p = SkinnyOf(backend, args.x, args.weight);
    ScaledRows scaled;
    scaled.values = Tensor::Empty(backend.pool(), DType::kBF16, {rows, n});
    p.out = args.residual.f32();
    p.out_stride = args.residual.stride(0);
    p.add = true;
    p.next_norm = VectorOf(args.next_norm, n);
    p.scaled = scaled.values.raw();
    scaled.squares = Tensor::Empty(backend.pool(), DType::kF32, {rows, ScheduleSkinny(p).tiles});
    p.squares_out = scaled.squares.f32();
    if (RunSkinny(backend, p)) {
      *args.scaled = std::move(scaled);
      return;
    }
  }
  if (args.scaled && CanNormToBf16(args.residual, args.next_norm)) {
    if (const Tensor slices = SlicesOf(backend, args.x, args.weight, ending)) {
      CheckMatrix(args.residual, rows, n);
      args.scaled->values = NormToBf16(backend, args.residual, args.next_norm, args.next_eps, slices);
      return;
    }
  }
  LinearInto(backend, args.x, args.weight, Tensor(), args.residual, /*add=*/true, ending);
}

void NormSwiGlu(Backend& backend, const NormSwiGluArgs& args) {
  const Context ctx{&backend};
  const int64_t rows = args.x.dim(0), ffn = args.gate_up.dim(0) / 2;
  CheckMatrix(args.x, rows, args.gate_up.dim(1));
  const bool bf16 = IsBf16Product(backend, args.gate_up) && ffn % 4 == 0;
  if (!bf16) {
    const Tensor both = ctx.EmptyF32({rows, 2 * ffn});
    LinearInto(backend, NormRows(backend, args.x, args.norm, args.eps, false), args.gate_up, Tensor(), both);
    *args.out = SwiGlu(ctx, both.Slice(1, 0, ffn), both.Slice(1, ffn, 2 * ffn));
    return;
  }
  *args.out = ctx.Empty(DType::kBF16, {rows, ffn});
  if (rows == 0) return;
  const PlanEpilogue ending = PlanEpilogue::kGlu;
  const auto end = [&](SkinnyParams& p) { p.glu = args.out->raw(); };
  const Tensor x = RunNormed(backend, args.x, args.norm, args.eps, args.scaled, args.gate_up, ending, end);
  if (!x) return;
  if (rows >= kGluRows && x.dtype() == DType::kBF16 && x.contiguous()) {
    const GluProductParams product{x.raw(), args.gate_up.raw(), args.out->raw(), rows, ffn, x.dim(1)};
    if (CanGluProduct(product)) {
      return LaunchGluProduct(product, DeviceOf(backend).multiprocessors(), StreamOf(backend));
    }
  }
  const DecomposeKShape shape = LinearShape(x, args.gate_up);
  const DecomposeKPlan way = WayOfLinear(backend, shape, ending);
  if (way.way == DecomposeKWay::kWide && way.splits == 1) {
    return LaunchWideGates(shape, way, args.out->raw(), StreamOf(backend));
  }
  const bool round = x.dtype() == DType::kBF16 && ffn % 8 == 0 && way.way == DecomposeKWay::kLibrary;
  const Tensor both = ctx.Empty(round ? DType::kBF16 : DType::kF32, {rows, 2 * ffn});
  LinearInto(backend, x, args.gate_up, Tensor(), both, /*add=*/false, ending);
  LaunchSwiGluToBf16(both.raw(), round, rows, ffn, args.out->raw(), StreamOf(backend));
}

void RopeAngles(Backend& backend, const RopeAnglesArgs& args) {
  RopeAnglesParams p;
  p.rows = args.positions.elements();
  p.pairs = static_cast<int>(args.config->inv_freq.size());
  STILLHOUSE_CHECK(p.pairs <= kMaxAnglePairs) << "rotary pairs: " << p.pairs;
  CheckMatrix(args.out, p.rows, 2 * p.pairs);
  STILLHOUSE_CHECK(args.out.contiguous() && args.positions.contiguous());
  p.positions = args.positions.i32();
  p.out = args.out.f32();
  p.scale = args.config->attention_scale;
  std::copy(args.config->inv_freq.begin(), args.config->inv_freq.end(), p.inv_freq);
  LaunchRopeAngles(p, StreamOf(backend));
}

void QkvRope(Backend& backend, const QkvRopeArgs& args) { LaunchQkvRope(TurnOf(args), StreamOf(backend)); }

void NormQkvRope(Backend& backend, const NormQkvRopeArgs& args) {
  const NormLinearArgs& product = args.product;
  QkvRopeParams turn = TurnOf(args.turn);
  STILLHOUSE_CHECK(product.out.raw() == args.turn.qkv.raw() && product.out.dtype() == args.turn.qkv.dtype() &&
                   product.out.dim(0) == turn.rows && product.out.contiguous())
      << product.out.DebugString();
  if (turn.rows == 0) return;
  Tensor slices;
  if (turn.qkv_bf16) {
    STILLHOUSE_CHECK(turn.rows > kCachedRows && IsBf16Product(backend, product.weight)) << product.out.DebugString();
    const Tensor rows = NormedRows(backend, product.x, product.norm, product.eps, product.scaled, product.weight);
    LinearInto(backend, rows, product.weight, Tensor(), product.out);
  } else {
    const bool turns = CanTurn(turn);
    const PlanEpilogue ending = turns ? PlanEpilogue::kTurn : EndingOf(product);
    const auto end = [&](SkinnyParams& p) {
      if (turns) {
        p.rope = &turn;
      } else {
        SetOut(p, product.out);
      }
    };
    const Tensor rows =
        RunNormed(backend, product.x, product.norm, product.eps, product.scaled, product.weight, ending, end);
    if (!rows && turns) return;
    if (rows && (slices = SlicesOf(backend, rows, product.weight, ending))) {
      turn.slices = slices.f32();
      turn.splits = static_cast<int>(slices.dim(0));
    } else if (rows) {
      LinearInto(backend, rows, product.weight, Tensor(), product.out, /*add=*/false, ending);
    }
  }
  LaunchQkvRope(turn, StreamOf(backend));
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

}  // namespace stillhouse::cuda
