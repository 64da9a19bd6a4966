#include "kernels/tensor/device.h"

#include <cstring>
#include <utility>

namespace stillhouse {
namespace {

class DoneCopy final : public PendingCopy {
 public:
  void Wait() override {}
};

}  // namespace

std::unique_ptr<PendingCopy> TensorDevice::StartCopy(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to,
                                                     size_t bytes) {
  STILLHOUSE_CHECK(from->device() == DeviceType::kCpu && to->device() == DeviceType::kCpu);
  STILLHOUSE_CHECK(bytes <= from->bytes() && bytes <= to->bytes()) << bytes;
  std::memcpy(to->data(), from->data(), bytes);
  return std::make_unique<DoneCopy>();
}

TensorDevice::MemoryUse TensorDevice::memory() {
  MemoryUse use;
  use.cached = static_cast<int64_t>(pool().cached_bytes());
  use.taken = static_cast<int64_t>(pool().lent_bytes()) + use.cached;
  use.used = use.taken;
  use.overflowed = static_cast<int64_t>(pool().overflowed_bytes());
  return use;
}

}  // namespace stillhouse
