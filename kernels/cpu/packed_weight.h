// Quantised weights laid out for the CPU kernels: eight rows side by side, so that a vector lane is a row.
//
// Types Q4_0, Q4_1 and Q8_0. Rows are taken in groups of eight (a last group is padded with rows of zeros); a group is
// a sequence of blocks of 32 columns, each as large as eight blocks of the file:
//
//   Q4_0  d[8] f16,         nibbles 4 × [8 rows × 4 bytes]   byte b of part j: column 4j + b low, 16 + 4j + b high
//   Q4_1  d[8], m[8] f16,   nibbles likewise
//   Q8_0  d[8] f16,         32 × [8 rows × i8]               column by column
//
// The values are the file's; only their order differs. A packed weight is a Tensor of shape [N, K, 1] (the third
// dimension marks it) in memory of a WeightArena. Row slices of it are views as of any tensor.
#ifndef STILLHOUSE_KERNELS_CPU_PACKED_WEIGHT_H_
#define STILLHOUSE_KERNELS_CPU_PACKED_WEIGHT_H_

#include <cstdint>
#include <memory>
#include <mutex>

#include "kernels/tensor/tensor.h"

namespace stillhouse::cpu {

inline constexpr int64_t kPackRows = 8;
inline constexpr int64_t kPackColumns = 32;

// Memory for weights: cut from large blocks, so that a model's weights lie on huge pages and little is wasted. A block
// is freed with the last weight in it. Any thread.
class WeightArena {
 public:
  std::shared_ptr<Buffer> Allocate(size_t bytes);

 private:
  std::mutex mutex_;
  std::shared_ptr<Buffer> block_;
  size_t used_ = 0;
};

// True for a weight that Pack can lay out: a contiguous matrix of one of the three types, with at least one group.
bool CanPack(const Tensor& weight);
Tensor Pack(WeightArena& arena, const Tensor& weight);
inline bool IsPacked(const Tensor& weight) { return weight.rank() == 3; }

// Where the rows of a packed weight (or of a row slice of one) are.
struct PackedView {
  explicit PackedView(const Tensor& weight);

  const uint8_t* group(int64_t index) const { return groups + index * group_bytes; }
  // Groups can be used as they are only if the first row begins one.
  bool aligned() const { return first_row == 0; }

  DType dtype;
  const uint8_t* groups;  // from the group that holds the first row
  int64_t group_bytes;
  int64_t block_bytes;
  int64_t first_row;  // within that group
  int64_t rows, columns;
};

// Columns [begin, end) (whole blocks) of one row (counted from the view's first) in the file's format.
void UnpackRow(const PackedView& view, int64_t row, int64_t begin, int64_t end, uint8_t* out);

}  // namespace stillhouse::cpu

#endif  // STILLHOUSE_KERNELS_CPU_PACKED_WEIGHT_H_
