#include "kernels/cpu/packed_weight.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/logging.h"

namespace stillhouse::cpu {
namespace {

constexpr size_t kArenaBlock = size_t{16} << 20;
constexpr size_t kAlignment = 64;

// Bytes of scales (and mins) in front of one row's quants in a block of the file.
int64_t HeaderBytes(DType dtype) { return dtype == DType::kQ4_1 ? 4 : 2; }

std::shared_ptr<Buffer> AllocateBlock(size_t bytes) {
  auto memory = HostMemory();
  void* data = memory->Allocate(bytes);
  STILLHOUSE_CHECK(data != nullptr) << "out of memory: " << bytes << " bytes asked for weights";
  return std::make_shared<Buffer>(data, bytes, DeviceType::kCpu,
                                  [memory](void* block, size_t size) { memory->Free(block, size); });
}

// One block of one row between its place in the file's order (`plain`) and in the packed one. Exactly one of the two
// directions: kToPacked, or back.
template <bool kToPacked>
void MoveBlock(DType dtype, int64_t lane, uint8_t* plain, uint8_t* packed) {
  const auto move = [](uint8_t* a, uint8_t* b, size_t n) { kToPacked ? std::memcpy(b, a, n) : std::memcpy(a, b, n); };
  const int64_t header = HeaderBytes(dtype);
  for (int64_t h = 0; h < header / 2; ++h) move(plain + 2 * h, packed + 2 * (h * kPackRows + lane), 2);
  plain += header;
  packed += header * kPackRows;
  if (dtype == DType::kQ8_0) {
    for (int64_t k = 0; k < kPackColumns; ++k) move(plain + k, packed + k * kPackRows + lane, 1);
  } else {
    for (int64_t j = 0; j < 4; ++j) move(plain + 4 * j, packed + 4 * (j * kPackRows + lane), 4);
  }
}

}  // namespace

std::shared_ptr<Buffer> WeightArena::Allocate(size_t bytes) {
  const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  // A large weight has a block of its own: it would waste the rest of a shared one.
  if (size > kArenaBlock / 4) return AllocateBlock(size);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!block_ || used_ + size > block_->bytes()) {
    block_ = AllocateBlock(kArenaBlock);
    used_ = 0;
  }
  void* data = static_cast<char*>(block_->data()) + used_;
  used_ += size;
  return std::make_shared<Buffer>(data, size, DeviceType::kCpu, [block = block_](void*, size_t) {});
}

bool CanPack(const Tensor& weight) {
  const DType dtype = weight.dtype();
  return (dtype == DType::kQ4_0 || dtype == DType::kQ4_1 || dtype == DType::kQ8_0) && weight.rank() == 2 &&
         weight.contiguous() && weight.dim(0) >= kPackRows && weight.dim(1) >= kPackColumns;
}

Tensor Pack(WeightArena& arena, const Tensor& weight) {
  STILLHOUSE_CHECK(CanPack(weight)) << weight.DebugString();
  const DType dtype = weight.dtype();
  const int64_t rows = weight.dim(0), columns = weight.dim(1);
  const int64_t padded = (rows + kPackRows - 1) / kPackRows * kPackRows;
  const int64_t row_bytes = RowBytes(dtype, columns), block = BlockBytes(dtype);
  const size_t bytes = static_cast<size_t>(padded * row_bytes);
  auto buffer = arena.Allocate(bytes);
  auto* out = static_cast<uint8_t*>(buffer->data());
  std::memset(out, 0, bytes);
  auto* in = static_cast<uint8_t*>(weight.raw());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < columns / kPackColumns; ++b) {
      MoveBlock<true>(dtype, r % kPackRows, in + r * row_bytes + b * block,
                      out + r / kPackRows * kPackRows * row_bytes + b * block * kPackRows);
    }
  }
  return Tensor::Wrap(nullptr, dtype, {padded, columns, 1}).WithBuffer(std::move(buffer), dtype).Slice(0, 0, rows);
}

PackedView::PackedView(const Tensor& weight)
    : dtype(weight.dtype()),
      groups(static_cast<const uint8_t*>(weight.buffer()->data())),
      group_bytes(kPackRows * RowBytes(weight.dtype(), weight.dim(1))),
      block_bytes(kPackRows * BlockBytes(weight.dtype())),
      first_row(weight.offset() / weight.dim(1)),
      rows(weight.dim(0)),
      columns(weight.dim(1)) {
  STILLHOUSE_CHECK(IsPacked(weight)) << weight.DebugString();
  groups += first_row / kPackRows * group_bytes;
  first_row %= kPackRows;
}

void UnpackRow(const PackedView& view, int64_t row, int64_t begin, int64_t end, uint8_t* out) {
  const int64_t r = view.first_row + row;
  const int64_t block = BlockBytes(view.dtype);
  const uint8_t* group = view.group(r / kPackRows);
  for (int64_t b = begin / kPackColumns; b < end / kPackColumns; ++b, out += block) {
    MoveBlock<false>(view.dtype, r % kPackRows, out, const_cast<uint8_t*>(group + b * view.block_bytes));
  }
}

}  // namespace stillhouse::cpu
