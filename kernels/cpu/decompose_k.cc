#include "kernels/ops/decompose_k.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"

namespace stillhouse::cpu {

namespace {

float At(const Tensor& t, int64_t i, int64_t j) {
  const int64_t at = i * t.stride(0) + j * t.stride(1);
  if (t.dtype() == DType::kF32) return t.f32()[at];
  const uint32_t bits = static_cast<uint32_t>(t.data<uint16_t>()[at]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Σ e^{c − max} over [begin, end), and the row turned into those exponentials.
float Exponentiate(float* c, int64_t n) {
  const float best = *std::max_element(c, c + n);
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += c[i] = std::exp(c[i] - best);
  return sum;
}

// exp, then columns and rows in turn to sum 1. The largest element is taken out first: it cancels in the first step.
void Sinkhorn(const DecomposeKOptions& options, float* m) {
  const int64_t n = options.sinkhorn_n;
  Exponentiate(m, n * n);
  for (int32_t round = 0; round < options.sinkhorn_rounds; ++round) {
    for (bool columns : {true, false}) {
      const int64_t along = columns ? n : 1, across = columns ? 1 : n;
      for (int64_t i = 0; i < n; ++i) {
        float sum = options.sinkhorn_eps;
        for (int64_t j = 0; j < n; ++j) sum += m[i * across + j * along];
        for (int64_t j = 0; j < n; ++j) m[i * across + j * along] /= sum;
      }
    }
  }
}

void Finish(const DecomposeKArgs& args, int64_t row, std::vector<float>& c) {
  const DecomposeKOptions& options = args.options;
  const int64_t n = static_cast<int64_t>(c.size());
  switch (options.epilogue) {
    case Epilogue::kNone:
      break;
    case Epilogue::kRelu:
      for (float& v : c) v = std::max(v, 0.0f);
      break;
    case Epilogue::kSilu:
      for (float& v : c) v = v / (1.0f + std::exp(-v));
      break;
    case Epilogue::kSigmoid:
      for (float& v : c) v = 1.0f / (1.0f + std::exp(-v));
      break;
    case Epilogue::kScaleBias:
      for (int64_t j = 0; j < n; ++j) c[j] = options.scale * c[j] + (args.bias ? args.bias.f32()[j] : 0.0f);
      break;
    case Epilogue::kSoftmax: {
      const float sum = Exponentiate(c.data(), n);
      for (float& v : c) v /= sum;
      break;
    }
    case Epilogue::kTopK: {
      std::vector<int32_t> order(static_cast<size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + options.top_k, order.end(),
                        [&](int32_t a, int32_t b) { return c[a] != c[b] ? c[a] > c[b] : a < b; });
      for (int32_t i = 0; i < options.top_k; ++i) {
        args.top_ids.i32()[row * options.top_k + i] = order[i];
        args.top_values.f32()[row * options.top_k + i] = c[order[i]];
      }
      return;
    }
    case Epilogue::kSinkhorn:
      Sinkhorn(options, c.data() + n - int64_t{options.sinkhorn_n} * options.sinkhorn_n);
      break;
  }
  std::copy(c.begin(), c.end(), args.out.f32() + row * n);
}

}  // namespace

void DecomposeK(Backend& backend, const DecomposeKArgs& args) {
  const int64_t rows = args.a.dim(0), width = args.a.dim(1), n = args.b.dim(1);
  backend.threads().ParallelFor(rows, [&](int64_t r, int) {
    // Slices of K on their own, then their sums: the error of a long sum of floats stays small.
    constexpr int64_t kSlice = 512;
    std::vector<float> c(static_cast<size_t>(n), 0.0f), partial(static_cast<size_t>(n));
    for (int64_t begin = 0; begin < width; begin += kSlice) {
      std::fill(partial.begin(), partial.end(), 0.0f);
      for (int64_t k = begin; k < std::min(width, begin + kSlice); ++k) {
        const float a = At(args.a, r, k);
        for (int64_t j = 0; j < n; ++j) partial[j] += a * At(args.b, k, j);
      }
      for (int64_t j = 0; j < n; ++j) c[j] += partial[j];
    }
    Finish(args, r, c);
  });
}

}  // namespace stillhouse::cpu
