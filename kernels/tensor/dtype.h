// Element types, among them the block-quantised ones of GGUF files.
#ifndef STILLHOUSE_KERNELS_TENSOR_DTYPE_H_
#define STILLHOUSE_KERNELS_TENSOR_DTYPE_H_

#include <cstdint>

namespace stillhouse {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kI32,
  kI64,
  kU8,
  // GGUF blocks along the last dimension: 32 elements a block …
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  // … and 256 elements a block.
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
};

// Elements and bytes of the smallest unit that can be addressed: 1 element for plain types, a block for quantised ones.
int64_t BlockElements(DType dtype);
int64_t BlockBytes(DType dtype);
const char* DTypeName(DType dtype);
inline bool IsQuantized(DType dtype) { return dtype >= DType::kQ4_0; }

// Bytes of `elements` consecutive elements of one row; `elements` is a multiple of the block.
inline int64_t RowBytes(DType dtype, int64_t elements) { return elements / BlockElements(dtype) * BlockBytes(dtype); }

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_DTYPE_H_
