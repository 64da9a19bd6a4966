#include "kernels/ops/random_fill.h"

#include <cmath>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/ops/quant.h"
#include "kernels/ops/random_unit.h"

namespace stillhouse::cpu {

void RandomFill(Backend& backend, const RandomFillArgs& args) {
  const float factor = args.scale * std::sqrt(3.0f);
  backend.threads().ParallelRanges(args.out.elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = factor * RandomUnit(args.seed, static_cast<uint64_t>(i));
      if (args.out.dtype() == DType::kBF16) {
        args.out.data<uint16_t>()[i] = FloatToBf16(value);
      } else {
        args.out.f32()[i] = value;
      }
    }
  });
}

}  // namespace stillhouse::cpu
