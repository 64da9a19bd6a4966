#include "kernels/tensor/dtype.h"

#include "kernels/base/logging.h"

namespace stillhouse {
namespace {

struct Row {
  const char* name;
  int64_t elements;
  int64_t bytes;
};

// In the order of the enum.
constexpr Row kRows[] = {
    {"f32", 1, 4},      {"f16", 1, 2},      {"bf16", 1, 2},     {"i32", 1, 4},      {"i64", 1, 8},    {"u8", 1, 1},
    {"q4_0", 32, 18},   {"q4_1", 32, 20},   {"q5_0", 32, 22},   {"q5_1", 32, 24},   {"q8_0", 32, 34}, {"q2_k", 256, 84},
    {"q3_k", 256, 110}, {"q4_k", 256, 144}, {"q5_k", 256, 176}, {"q6_k", 256, 210},
};

const Row& Get(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  STILLHOUSE_CHECK(index < sizeof(kRows) / sizeof(kRows[0]));
  return kRows[index];
}

}  // namespace

int64_t BlockElements(DType dtype) { return Get(dtype).elements; }
int64_t BlockBytes(DType dtype) { return Get(dtype).bytes; }
const char* DTypeName(DType dtype) { return Get(dtype).name; }

}  // namespace stillhouse
