// Memory that tensors share, and the pool that lends it.
#ifndef STILLHOUSE_KERNELS_TENSOR_BUFFER_H_
#define STILLHOUSE_KERNELS_TENSOR_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace stillhouse {

enum class DeviceType : uint8_t { kCpu, kCuda };

// A block of memory with one address and a releaser. Shared by every tensor that views it; freed with the last of them.
class Buffer {
 public:
  Buffer(void* data, size_t bytes, DeviceType device, std::function<void(void*, size_t)> release)
      : data_(data), bytes_(bytes), device_(device), release_(std::move(release)) {}
  ~Buffer() {
    if (release_) release_(data_, bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  DeviceType device() const { return device_; }

 private:
  void* data_;
  size_t bytes_;
  DeviceType device_;
  std::function<void(void*, size_t)> release_;
};

// How a device hands out raw memory. Alignment is at least 64 bytes; null when there is none left. Any thread.
class RawMemory {
 public:
  virtual ~RawMemory() = default;
  virtual DeviceType device() const = 0;
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data, size_t bytes) = 0;
  // What a block of `bytes` takes of the device, which hands memory out in whole grains.
  virtual size_t Granted(size_t bytes) const { return bytes; }
};

// Host memory; large blocks are page aligned (huge pages are asked for).
std::shared_ptr<RawMemory> HostMemory();

// Keeps freed blocks by size class, so that a step's short-lived tensors cost no system call and no page fault.
// Buffers may outlive the pool. Any thread. Contents of a new buffer are undefined.
class BufferPool {
 public:
  // `limit_bytes` bounds what the pool keeps for reuse beyond what was lent at one time since the last Trim: a step
  // that is repeated finds its blocks. Sizes that nobody asked for longest go first.
  // A pool that `keeps` its blocks never gives one back by itself: somebody knows their addresses.
  // `overflow` is host memory that the device reaches, however slowly.
  explicit BufferPool(std::shared_ptr<RawMemory> memory, size_t limit_bytes = size_t{2} << 30, bool keeps = false,
                      std::shared_ptr<RawMemory> overflow = nullptr);

  // A buffer of at least `bytes`, for work that has begun and cannot stop half-way. Where there is no memory left, also
  // after Reclaim, it is the overflow's: the work ends as it would have, slowly, and whoever runs it sees
  // overflowed_bytes() grow and asks for no more of it. Only a host without memory ends the process, with a clear log.
  std::shared_ptr<Buffer> Allocate(size_t bytes);
  // The same for what can be refused: null if there is no memory left, also after Reclaim.
  std::shared_ptr<Buffer> TryAllocate(size_t bytes);
  // What a buffer of at least `bytes` takes: what budgets count.
  size_t BlockBytes(size_t bytes) const;

  // Called when the device has nothing left and no block is cached: gives memory up elsewhere (at least `bytes`, if it
  // can) and says whether it did. Called on the allocating thread, without locks of the pool; must not allocate here.
  // Returns when no call of the former one runs any more. Null: nobody.
  using Reclaimer = std::function<bool(size_t bytes)>;
  void SetReclaimer(Reclaimer reclaimer);
  // Gives cached blocks back, or asks the reclaimer. False if neither freed anything.
  bool Reclaim(size_t bytes);

  // Gives cached blocks back to the device, and says how many bytes they were.
  size_t Trim();

  DeviceType device() const;
  size_t lent_bytes() const;    // in use now
  size_t cached_bytes() const;  // kept for reuse
  size_t peak_bytes() const;    // most ever lent
  // That Allocate took of the overflow so far: it only grows. None of the other numbers.
  size_t overflowed_bytes() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace stillhouse

#endif  // STILLHOUSE_KERNELS_TENSOR_BUFFER_H_
