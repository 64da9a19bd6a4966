// What only the CUDA backend has: bf16 storage, and uploads that do not wait. Skipped where there is no GPU; everything
// else is asked of it by the tests of the ops, with STILLHOUSE_TEST_DEVICE=cuda.
#include "kernels/cuda/cuda_backend.h"

#include <gtest/gtest.h>

#include "kernels/ops/gather.h"
#include "kernels/ops/matmul.h"
#include "kernels/ops/quant.h"
#include "tests/kernels/quant_reference.h"

namespace stillhouse::testing {
namespace {

std::unique_ptr<Backend> MakeCuda(CudaStorage storage) {
  CudaBackendOptions options;
  options.threads = 1;
  options.storage = storage;
  auto backend = MakeCudaBackend(options);
  return backend.ok() ? *std::move(backend) : nullptr;
}

Doubles Rounded(Doubles values) {
  for (double& v : values) v = Bf16ToFloat(FloatToBf16(static_cast<float>(v)));
  return values;
}

Doubles Download(const Context& ctx, const Tensor& t) {
  const std::vector<float> values = ctx.ToFloats(t);
  return Doubles(values.begin(), values.end());
}

// ‖got − want‖ / ‖size‖: sums that cancel are as far off as their terms are large.
double ErrorAgainst(const Doubles& got, const Doubles& want, const Doubles& size) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += size[i] * size[i];
  }
  return std::sqrt(difference / (norm + 1e-300));
}

// A product in bf16 is that of the rounded operands, summed in fp32.
TEST(CudaStorage, Bf16ProductsAreThoseOfRoundedOperands) {
  const auto backend = MakeCuda(CudaStorage::kBf16);
  if (!backend) GTEST_SKIP() << "no GPU";
  const Context ctx{backend.get(), nullptr};
  std::mt19937 rng = TestRng(80);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_1, DType::kQ8_0, DType::kQ6_K}) {
    for (const auto& [m, n, blocks] : {std::array<int64_t, 3>{1, 7, 1}, {3, 64, 3}, {37, 61, 2}, {130, 200, 5}}) {
      const int64_t k = blocks * std::max<int64_t>(BlockElements(dtype), 32);
      const std::vector<uint8_t> bytes = RandomStorage(rng, dtype, n * k);
      const Doubles weight = Rounded(StorageValues(dtype, bytes, n * k));
      const Tensor w = PrepareWeight(ctx, Tensor::Wrap(bytes.data(), dtype, {n, k}));
      ASSERT_EQ(w.dtype(), DType::kBF16);
      const Doubles x = RandomValues(rng, m * k), g = RandomValues(rng, m * n);
      const Doubles rx = Rounded(x), rg = Rounded(g);
      Doubles out(static_cast<size_t>(m * n)), out_size(out.size()), dx(static_cast<size_t>(m * k)), dx_size(dx.size());
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t l = 0; l < k; ++l) {
            const double a = rx[i * k + l] * weight[j * k + l], b = rg[i * n + j] * weight[j * k + l];
            out[i * n + j] += a;
            out_size[i * n + j] += std::fabs(a);
            dx[i * k + l] += b;
            dx_size[i * k + l] += std::fabs(b);
          }
        }
      }
      Tape tape(*backend);
      const Context train{backend.get(), &tape};
      const Tensor tx = ToTensor(ctx, x, {m, k}, true);
      tape.Watch(tx);
      const Tensor y = Linear(train, tx, w);
      EXPECT_LE(ErrorAgainst(Download(ctx, y), out, out_size), 1e-6) << DTypeName(dtype) << " " << m << " " << n;
      tape.BackwardFrom({y}, {ToTensor(ctx, g, {m, n})});
      EXPECT_LE(ErrorAgainst(Download(ctx, tape.Grad(tx)), dx, dx_size), 1e-6) << DTypeName(dtype) << " " << m;
      // Embedding rows are the stored values.
      const Doubles rows = Download(ctx, Embedding(ctx, w, ctx.Ints({static_cast<int32_t>(n - 1), 0}, {2})));
      for (int64_t l = 0; l < k; ++l) {
        ASSERT_EQ(rows[l], weight[(n - 1) * k + l]) << DTypeName(dtype);
        ASSERT_EQ(rows[k + l], weight[l]) << DTypeName(dtype);
      }
    }
  }
}

// Far more than the ring of pinned memory holds, from host memory that changes at once.
TEST(CudaUploads, KeepTheirValues) {
  const auto backend = MakeCuda(CudaStorage::kF32);
  if (!backend) GTEST_SKIP() << "no GPU";
  const Context ctx{backend.get(), nullptr};
  std::vector<Tensor> sent;
  std::vector<int32_t> values;
  for (int32_t i = 0; i < 3000; ++i) {
    values.assign(static_cast<size_t>(1 + i % 4096), i);
    sent.push_back(ctx.Ints(values, {static_cast<int64_t>(values.size())}));
    std::fill(values.begin(), values.end(), -1);
  }
  for (int32_t i = 0; i < 3000; ++i) {
    const std::vector<int32_t> got = ctx.ToInts(sent[static_cast<size_t>(i)]);
    ASSERT_TRUE(std::all_of(got.begin(), got.end(), [i](int32_t v) { return v == i; })) << i;
  }
  const std::vector<float> large(size_t{3} << 20, 2.5f);  // more than the ring
  EXPECT_EQ(ctx.ToFloats(ctx.Floats(large, {static_cast<int64_t>(large.size())})), large);
}

TEST(CudaMemory, IsTheDrivers) {
  const auto backend = MakeCuda(CudaStorage::kF32);
  if (!backend) GTEST_SKIP() << "no GPU";
  const TensorDevice::MemoryUse before = backend->memory();
  EXPECT_GT(before.free, 0);
  const Context ctx{backend.get(), nullptr};
  const int64_t bytes = int64_t{512} << 20;
  const Tensor large = ctx.EmptyF32({bytes / 4});
  EXPECT_GE(backend->memory().used - before.used, bytes);
}

}  // namespace
}  // namespace stillhouse::testing
