// Rotary position embedding (Su et al. 2021).
#ifndef STILLHOUSE_KERNELS_OPS_ROPE_H_
#define STILLHOUSE_KERNELS_OPS_ROPE_H_

#include <string>
#include <vector>

#include "kernels/ops/context.h"

namespace stillhouse {

enum class RopeLayout : uint8_t {
  kHalf,         // pairs (j, j + rope_dim/2): Hugging Face Llama, Qwen
  kInterleaved,  // pairs (2j, 2j + 1): GGUF `llama` weights are permuted for this one
};

// The frequencies of a model: inv_freq[j] for pair j, in fp64; angles are pos · inv_freq in fp64, then cos and sin in
// fp32. `attention_scale` multiplies cos and sin (YaRN; 1 otherwise).
struct RopeConfig {
  RopeLayout layout = RopeLayout::kHalf;
  int64_t rope_dim = 0;
  std::vector<double> inv_freq;  // rope_dim / 2
  float attention_scale = 1.0f;

  // Identity of everything above, for artifact fingerprints.
  std::string Fingerprint() const;
};

// theta^(-2j/rope_dim).
std::vector<double> RopeFrequencies(double theta, int64_t rope_dim);
// Llama-3 scaling by wavelength λ = 2π/f: λ < original/high keeps f, λ > original/low gives f/factor, smooth between.
void ApplyLlama3Scaling(double factor, double low_freq_factor, double high_freq_factor, double original_context,
                        std::vector<double>& inv_freq);
void ApplyLinearScaling(double factor, std::vector<double>& inv_freq);
// NTK-aware scaling: the base is theta · factor^(rope_dim/(rope_dim−2)).
std::vector<double> NtkFrequencies(double theta, double factor, int64_t rope_dim);
// YaRN (Peng et al. 2023): frequencies blended between interpolation and extrapolation; sets attention_scale =
// 0.1·ln(factor) + 1.
void ApplyYarnScaling(double theta, double factor, double beta_fast, double beta_slow, double original_context,
                      RopeConfig& config);

// out = x rotated by its row's position: x, out f32 [R, H, d] (d contiguous; may be the same memory when not recorded),
// positions i32 [R]. The first rope_dim elements of each head turn, the rest pass. inverse negates sin
// (and divides by attention_scale): Rope(inverse) ∘ Rope = identity.
struct RopeArgs {
  Tensor x, positions, out;
  const RopeConfig* config = nullptr;
  bool inverse = false;
};
// dx += rotation by the negated angle of dout.
struct RopeGradArgs {
  Tensor dout, positions, dx;
  const RopeConfig* config = nullptr;
  bool inverse = false;
};
// `config` must outlive the tape.
Tensor Rope(const Context& ctx, const Tensor& x, const Tensor& positions, const RopeConfig& config,
            bool inverse = false);

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_OPS_ROPE_H_
