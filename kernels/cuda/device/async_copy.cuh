// Copies from global to shared memory that run beside the arithmetic (cp.async), in groups that a thread waits for.
#ifndef STILLHOUSE_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_
#define STILLHOUSE_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_

#include <cstdint>

namespace stillhouse::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes; both addresses are multiples of 16. Where `valid` is false nothing is read and zeros are written.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid = true) {
  CopyAsync16(SharedAddress(shared), global, valid);
}

// 4 bytes.
__device__ __forceinline__ void CopyAsync4(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(SharedAddress(shared)), "l"(global) : "memory");
}

// Ends the thread's current group (which may be empty).
__device__ __forceinline__ void CopyAsyncCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most the last `kPending` groups of the thread are under way. Other threads' copies need a barrier too.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// True in one thread of a warp, all of which ask: a branch that the compiler knows to be one thread's.
__device__ __forceinline__ bool OneOfWarp() {
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(one));
  return one != 0;
}

// The compiler has made the values by now: before a wait, say.
template <typename... Values>
__device__ __forceinline__ void Hold(Values&... values) {
  const auto hold = [](auto& value) {
    if constexpr (sizeof(value) == 8) {
      asm volatile("" : "+l"(value));
    } else {
      asm volatile("" : "+r"(value));
    }
  };
  (hold(values), ...);
}

// A kernel launched with the programmatic attribute starts while the one before it still runs; what that one wrote may
// be read after this.
__device__ __forceinline__ void WaitForPreviousKernel() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// Lets the next such kernel start early.
__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

}  // namespace stillhouse::cuda

#endif  // STILLHOUSE_KERNELS_CUDA_DEVICE_ASYNC_COPY_CUH_
