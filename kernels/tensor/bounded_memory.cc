#include "kernels/tensor/bounded_memory.h"

namespace stillhouse {

void* BoundedMemory::Allocate(size_t bytes) {
  const int64_t granted = static_cast<int64_t>(Granted(bytes));
  // Taken before it is asked for, so that callers who race never pass the limit together.
  int64_t taken = taken_.load();
  do {
    if (granted > limit_.load() - taken) return nullptr;
  } while (!taken_.compare_exchange_weak(taken, taken + granted));
  void* data = memory_->Allocate(bytes);
  if (!data) taken_.fetch_sub(granted);
  return data;
}

void BoundedMemory::Free(void* data, size_t bytes) {
  memory_->Free(data, bytes);
  taken_.fetch_sub(static_cast<int64_t>(Granted(bytes)));
}

}  // namespace stillhouse
