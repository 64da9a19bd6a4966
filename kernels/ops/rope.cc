#include "kernels/ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/ops/kernel_table.h"

namespace stillhouse {
namespace {

// The pair index whose wavelength makes `rotations` turns over the original context (YaRN's correction dimension).
double CorrectionDim(double rotations, double theta, double original_context, int64_t rope_dim) {
  return static_cast<double>(rope_dim) * std::log(original_context / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(theta));
}

}  // namespace

std::string RopeConfig::Fingerprint() const {
  std::string text = absl::StrCat(layout == RopeLayout::kHalf ? "half" : "interleaved", ":", rope_dim, ":",
                                  absl::StrFormat("%.9g", attention_scale));
  for (double f : inv_freq) absl::StrAppendFormat(&text, ",%.17g", f);
  return text;
}

std::vector<double> RopeFrequencies(double theta, int64_t rope_dim) {
  STILLHOUSE_CHECK(theta > 0 && rope_dim >= 2 && rope_dim % 2 == 0) << theta << ", " << rope_dim;
  std::vector<double> inv_freq(static_cast<size_t>(rope_dim / 2));
  for (size_t j = 0; j < inv_freq.size(); ++j) {
    inv_freq[j] = std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(rope_dim));
  }
  return inv_freq;
}

void ApplyLlama3Scaling(double factor, double low_freq_factor, double high_freq_factor, double original_context,
                        std::vector<double>& inv_freq) {
  for (double& f : inv_freq) {
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength < original_context / high_freq_factor) continue;
    if (wavelength > original_context / low_freq_factor) {
      f /= factor;
    } else {
      const double smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
      f = (1 - smooth) * f / factor + smooth * f;
    }
  }
}

void ApplyLinearScaling(double factor, std::vector<double>& inv_freq) {
  for (double& f : inv_freq) f /= factor;
}

std::vector<double> NtkFrequencies(double theta, double factor, int64_t rope_dim) {
  STILLHOUSE_CHECK_GT(rope_dim, 2);
  const double d = static_cast<double>(rope_dim);
  return RopeFrequencies(theta * std::pow(factor, d / (d - 2)), rope_dim);
}

void ApplyYarnScaling(double theta, double factor, double beta_fast, double beta_slow, double original_context,
                      RopeConfig& config) {
  const int64_t pairs = static_cast<int64_t>(config.inv_freq.size());
  double low = std::floor(CorrectionDim(beta_fast, theta, original_context, config.rope_dim));
  double high = std::ceil(CorrectionDim(beta_slow, theta, original_context, config.rope_dim));
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rope_dim - 1));
  if (low == high) high += 0.001;  // a step, but no division by zero
  for (int64_t j = 0; j < pairs; ++j) {
    const double ramp = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    double& f = config.inv_freq[static_cast<size_t>(j)];
    f = f / factor * ramp + f * (1 - ramp);  // fast pairs keep their frequency, slow ones are interpolated
  }
  config.attention_scale = factor > 1 ? static_cast<float>(0.1 * std::log(factor) + 1.0) : 1.0f;
}

Tensor Rope(const Context& ctx, const Tensor& x, const Tensor& positions, const RopeConfig& config, bool inverse) {
  STILLHOUSE_CHECK(x.dtype() == DType::kF32 && x.rank() == 3) << x.DebugString();
  STILLHOUSE_CHECK(x.dim(2) == 1 || x.stride(2) == 1) << x.DebugString();
  STILLHOUSE_CHECK(positions.dtype() == DType::kI32 && positions.rank() == 1 && positions.contiguous());
  STILLHOUSE_CHECK_EQ(positions.dim(0), x.dim(0));
  STILLHOUSE_CHECK_LE(config.rope_dim, x.dim(2));
  STILLHOUSE_CHECK_EQ(config.rope_dim, 2 * static_cast<int64_t>(config.inv_freq.size()));
  Tensor out = ctx.EmptyF32(x.shape());
  ctx.kernels().Rope(*ctx.backend, {x, positions, out, &config, inverse});
  if (ctx.Wants(x)) {
    ctx.tape->Record("Rope", {out}, [backend = ctx.backend, x, positions, out, &config, inverse](Tape& tape) {
      backend->kernels().RopeGrad(*backend, {tape.Grad(out), positions, tape.Grad(x), &config, inverse});
    });
  }
  return out;
}

}  // namespace stillhouse
