// Models of known shapes with generated parameters: for measuring, where only the shape matters.
#ifndef STILLHOUSE_SERVER_LOAD_RANDOM_WEIGHTS_H_
#define STILLHOUSE_SERVER_LOAD_RANDOM_WEIGHTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/config.h"
#include "server/model/weights.h"

namespace stillhouse {

// "llama-3.1-8b", "qwen3-4b", "smollm2-135m".
std::vector<std::string> RandomWeightShapes();

// The published hyperparameters of a shape, named "llama-3.1-8b (generated weights, seed 1)". INVALID_ARGUMENT lists
// the shapes that there are.
absl::StatusOr<ModelConfig> RandomWeightConfig(const std::string& shape, uint64_t seed = 1);

// Parameters generated where the backend keeps them (never as fp32 on the host), in bf16 before the backend prepares
// them; the same on every backend. Matrices have a standard deviation of 0.02, those that write to the residual stream
// 0.02/√(2·layers); norms are 1. What the model says is noise.
absl::StatusOr<std::shared_ptr<const Weights>> RandomWeights(const Context& ctx, const std::string& shape,
                                                             uint64_t seed = 1);

}  // namespace stillhouse

#endif  // STILLHOUSE_SERVER_LOAD_RANDOM_WEIGHTS_H_
