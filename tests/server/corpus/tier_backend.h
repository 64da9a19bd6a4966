// A device that is only memory: its copies to and from host memory end when a test says so, and its host memory can
// run out. Kernels are not called on it.
#ifndef STILLHOUSE_TESTS_SERVER_CORPUS_TIER_BACKEND_H_
#define STILLHOUSE_TESTS_SERVER_CORPUS_TIER_BACKEND_H_

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/tensor/bounded_memory.h"

namespace stillhouse::testing {

// Shut, it holds those who pass.
class Gate {
 public:
  void Open(bool open) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  void AwaitOneWaiting() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

class TierBackend final : public Backend {
 public:
  explicit TierBackend(int64_t limit = BoundedMemory::kNoLimit)
      : inner_(MakeCpuBackend({.threads = 1})),
        bound_(std::make_shared<BoundedMemory>(HostMemory(), limit)),
        pool_(bound_),
        host_(std::make_shared<Host>()) {}

  DeviceType device() const override { return DeviceType::kCpu; }
  const char* name() const override { return "memory"; }
  const KernelTable& kernels() const override { return inner_->kernels(); }
  ThreadPool& threads() override { return inner_->threads(); }
  BufferPool& pool() override { return pool_; }
  void Upload(const void* host, const Tensor& to) override { inner_->Upload(host, to); }
  void Download(const Tensor& from, void* host) override { inner_->Download(from, host); }
  void Copy(const Tensor& from, const Tensor& to) override { inner_->Copy(from, to); }
  void Zero(const Tensor& tensor) override { inner_->Zero(tensor); }
  void LimitMemory(int64_t bytes) override { bound_->SetLimit(bytes); }

  std::shared_ptr<RawMemory> copy_memory() override { return host_; }
  // The bytes move when somebody waits for them, not before; until then the target is garbage.
  std::unique_ptr<PendingCopy> StartCopy(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to,
                                         size_t bytes) override {
    const bool down = host_->Has(to->data());
    STILLHOUSE_CHECK(down != host_->Has(from->data())) << "between device and copy memory";
    ++(down ? copies_down : copies_up);
    std::memset(to->data(), 0x7f, bytes);
    return std::make_unique<Deferred>(std::move(from), std::move(to), bytes, down ? &gate_down : &gate_up);
  }

  void HostHasMemory(bool has) { host_->has_memory = has; }
  int64_t taken() const { return bound_->taken(); }

  Gate gate_down, gate_up;
  std::atomic<int> copies_down{0}, copies_up{0};

 private:
  class Host final : public RawMemory {
   public:
    DeviceType device() const override { return DeviceType::kCpu; }
    void* Allocate(size_t bytes) override {
      if (!has_memory) return nullptr;
      void* data = HostMemory()->Allocate(bytes);
      std::lock_guard<std::mutex> lock(mutex_);
      blocks_.insert(data);
      return data;
    }
    void Free(void* data, size_t bytes) override {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        blocks_.erase(data);
      }
      HostMemory()->Free(data, bytes);
    }
    bool Has(void* data) {
      std::lock_guard<std::mutex> lock(mutex_);
      return blocks_.contains(data);
    }
    std::atomic<bool> has_memory{true};

   private:
    std::mutex mutex_;
    std::set<void*> blocks_;
  };

  class Deferred final : public PendingCopy {
   public:
    Deferred(std::shared_ptr<Buffer> from, std::shared_ptr<Buffer> to, size_t bytes, Gate* gate)
        : from_(std::move(from)), to_(std::move(to)), bytes_(bytes), gate_(gate) {}
    ~Deferred() override { Wait(); }
    void Wait() override {
      if (done_) return;
      gate_->Pass();
      std::memcpy(to_->data(), from_->data(), bytes_);
      done_ = true;
    }

   private:
    const std::shared_ptr<Buffer> from_, to_;
    const size_t bytes_;
    Gate* const gate_;
    bool done_ = false;
  };

  std::unique_ptr<Backend> inner_;
  std::shared_ptr<BoundedMemory> bound_;
  BufferPool pool_;
  std::shared_ptr<Host> host_;
};

}  // namespace stillhouse::testing

#endif  // STILLHOUSE_TESTS_SERVER_CORPUS_TIER_BACKEND_H_
