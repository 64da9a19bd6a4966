#include "server/model/config.h"

#include <cmath>

namespace stillhouse {

float ModelConfig::attention_scale() const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

std::string ModelConfig::RopeLayoutName() const { return rope.layout == RopeLayout::kHalf ? "half" : "interleaved"; }

}  // namespace stillhouse
