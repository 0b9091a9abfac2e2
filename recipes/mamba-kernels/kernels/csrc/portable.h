// Everything that differs between NVIDIA GPUs, AMD GPUs and the CPU that emulates them. One source, three compilers:
// nvcc for sm_80 and newer; clang or hipcc for gfx9, with builtins alone, so neither ROCm's headers nor its device
// libraries are needed; any C++17 compiler for the emulator.
//
// A kernel sees blocks of threads along x, warps of WARP_SIZE lanes (AMD's wavefronts), a barrier, shuffles and
// exponentials. No floating-point atomics: gfx90a turns them into compare-and-swap loops unless a flag permits the
// unsafe form, and a sum made of them does not repeat bit for bit.
// Tiling: blocks along x of whole warps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

// KERNEL(name, sizes, blocks, Params) { body } defines a kernel; `sizes` are LaunchSizes, or the threads of a block;
// `blocks` must be resident on a multiprocessor. A unit of compilation (unit.cpp) has the one kernel for which
// SELECT_<kernel> is defined as SELECTED; of the others it has templates that nothing instantiates.
#if defined(LIST_KERNELS)
#define KERNEL(name, ...) LISTED_KERNEL name
#elif defined(UNIT)
#define SELECTED ~, BUILT
#define SECOND_(first, second, ...) second
#define SECOND(...) SECOND_(__VA_ARGS__)
#define KERNEL_AS_(mode, ...) KERNEL_##mode(__VA_ARGS__)
#define KERNEL_AS(mode, ...) KERNEL_AS_(mode, __VA_ARGS__)
#define KERNEL(name, ...) KERNEL_AS(SECOND(SELECT_##name, SKIPPED, ~), name, __VA_ARGS__)
#define KERNEL_SKIPPED(name, sizes, blocks, Params) \
  template <class>                                  \
  DEVICE void name##_skipped(const Params& p)
#else
#define KERNEL(...) KERNEL_BUILT(__VA_ARGS__)
#endif

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
#define KERNEL_BUILT(name, sizes, blocks, Params)                             \
  extern "C" __device__ const int32_t name##_launch[3] = LAUNCH_ARRAY(sizes); \
  extern "C" __global__ void __launch_bounds__(LaunchSizes{sizes}.threads, blocks) name(const Params p)
// 16-byte alignment, as everywhere below.
#define SHARED __shared__ __align__(16)
constexpr int WARP_SIZE = 32;
constexpr bool HAS_MMA_TF32 = true;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool REALLOCATES_REGISTERS = true;
#else
constexpr bool REALLOCATES_REGISTERS = false;
#endif

DEVICE int thread_index() { return threadIdx.x; }
// Reads the thread index again: a spilled copy in local memory would take longer to come.
DEVICE int reload_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
DEVICE int64_t block_index() { return blockIdx.x; }
DEVICE void barrier() { __syncthreads(); }
// Orders accesses to shared memory between the lanes of a warp.
DEVICE void warp_sync() { __syncwarp(); }
// Hides a value from the compiler, which would compute it again at each use instead of keeping it in a register.
DEVICE uint32_t opaque(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}
// Hides a loop's index where the compiler would advance every address instead.
DEVICE int opaque_index(int index) { return index; }
// Sets the registers of every thread of a warpgroup (four adjacent warps) to COUNT: fewer than the launch bound gives,
// or more once another warpgroup gave up its own. Each role is one branch of a kernel. No effect where the hardware
// lacks it.
template <int COUNT>
DEVICE void deallocate_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
DEVICE void allocate_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
// Programmatic dependent launch: a dependent kernel starts when every block of its predecessor has launched it or
// ended, and sees the predecessor's writes once it has waited. No effect in other launches, and before sm_90.
DEVICE void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE float* dynamic_shared() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}
// Asynchronous copy of 16 bytes to shared memory; complete when the same thread has called cp_async_wait().
DEVICE void cp_async(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Prefetches into L1.
DEVICE void prefetch_l1(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }
template <class T>
DEVICE T* global_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
template <int mask>
DEVICE float shuffle_xor(float x) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
// The value of `lane` in this warp.
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Correction to an exponent whose power is multiplied into a product many times: on an H200, exp2_approx is low by 0.1
// to 0.45 of 2^-24 on average between -1 and 0 (NOTES.md). The power of -0 stays 1.
constexpr float EXP2_CORRECTION = 2e-8f;
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#elif defined(__HIP__)

#if !defined(__GFX9__) && defined(__HIP_DEVICE_COMPILE__)
#error "a warp is 64 lanes and a compute unit four SIMDs here, which holds for gfx9 alone"
#endif
#define DEVICE __attribute__((device, always_inline)) inline
// HIP's second launch bound counts wavefronts per SIMD; a compute unit has four SIMDs.
#define KERNEL_BUILT(name, sizes, blocks, Params)                                                                \
  extern "C" __attribute__((device, used, visibility("default")))                                                \
  const int32_t name##_launch[3] = LAUNCH_ARRAY(sizes);                                                          \
  extern "C" __attribute__((global,                                                                              \
                            amdgpu_flat_work_group_size(LaunchSizes{sizes}.threads, LaunchSizes{sizes}.threads), \
                            amdgpu_waves_per_eu(((blocks) * ((LaunchSizes{sizes}.threads + 63) / 64) + 3) / 4))) \
  void name(const Params p)
#define SHARED __attribute__((shared, aligned(16)))
// warpSize is no compile-time constant since ROCm 7.
constexpr int WARP_SIZE = 64;
constexpr bool HAS_MMA_TF32 = false;
constexpr bool REALLOCATES_REGISTERS = false;

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int reload_thread_index() { return thread_index(); }
DEVICE int64_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void warp_sync() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
// A pointer to global memory from its address. clang would access what an integer points to, or one of two pointers,
// with flat instructions, which also wait for LDS.
template <class T>
DEVICE T* global_pointer(uintptr_t address) {
  return (T*)(__attribute__((address_space(1))) T*)address;
}
DEVICE uint32_t opaque(uint32_t x) { return x; }
// clang advances every address of a loop by itself: 24 of the forward pass's 154 slots for four steps; base addresses
// and immediate offsets need 15.
DEVICE int opaque_index(int index) {
  asm("" : "+v"(index));
  return index;
}
extern __attribute__((shared, aligned(16))) float dynamic_memory[];
DEVICE float* dynamic_shared() { return dynamic_memory; }
DEVICE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
DEVICE float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

template <int control>
DEVICE int dpp_permute(int x) {
  return __builtin_amdgcn_update_dpp(0, x, control, 0xf, 0xf, true);
}
// Within a row of 16 lanes DPP permutes the operand at no cost; within 32 lanes the LDS crossbar does it without an
// address; across the halves of the wavefront it needs an address.
template <int mask>
DEVICE float shuffle_xor(float x) {
  static_assert(mask > 0 && mask < WARP_SIZE, "a lane of the same warp");
  const int bits = __builtin_bit_cast(int, x);
  int y;
  if constexpr (mask < 4) {
    y = dpp_permute<(0 ^ mask) | (1 ^ mask) << 2 | (2 ^ mask) << 4 | (3 ^ mask) << 6>(bits);
  } else if constexpr (mask == 7) {
    y = dpp_permute<0x141>(bits);  // mirrored in half a row
  } else if constexpr (mask == 8) {
    y = dpp_permute<0x128>(bits);  // rotated by half a row
  } else if constexpr (mask == 15) {
    y = dpp_permute<0x140>(bits);  // mirrored in a row
  } else if constexpr (mask < 32) {
    y = __builtin_amdgcn_ds_swizzle(bits, mask << 10 | 0x1f);
  } else {
    y = __builtin_amdgcn_ds_bpermute((thread_index() % WARP_SIZE ^ mask) * 4, bits);
  }
  return __builtin_bit_cast(float, y);
}
DEVICE float shuffle(float x, int lane) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, x)));
}
// The bare instruction: without the builtin the compiler adds handling of subnormal results.
DEVICE float exp2_approx(float x) {
#if __has_builtin(__builtin_amdgcn_exp2f)
  return __builtin_amdgcn_exp2f(x);
#else
  float y;
  asm("v_exp_f32 %0, %1" : "=v"(y) : "v"(x));
  return y;
#endif
}
// Not measured on this architecture.
constexpr float EXP2_CORRECTION = 0.0f;
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

#else

#include <cmath>

#include "emulator.h"

#define DEVICE inline
#define EMULATED_NAME_(name, warp) name##_w##warp
#define EMULATED_NAME(name, warp) EMULATED_NAME_(name, warp)
#define KERNEL_BUILT(name, sizes, blocks, Params)                                                          \
  static void name##_thread(const Params& p);                                                              \
  static const int32_t name##_launch[3] = LAUNCH_ARRAY(sizes);                                             \
  static const emulator::Listed name##_listed(#name, LaunchSizes{sizes}.threads, name##_launch);           \
  extern "C" __attribute__((visibility("default"))) int EMULATED_NAME(name, EMULATED_WARP_SIZE)(           \
      const Params* p, int64_t grid, int size, size_t dynamic_shared_bytes) {                              \
    const auto body = [](const void* params) { name##_thread(*static_cast<const Params*>(params)); };      \
    const int threads = LaunchSizes{sizes}.threads;                                                        \
    return emulator::launch(                                                                               \
        {#name, EMULATED_WARP_SIZE, threads, body, p, grid, size ? size : threads, dynamic_shared_bytes}); \
  }                                                                                                        \
  static void name##_thread(const Params& p)
// Thread-local: every worker has its block's shared memory, and can find it to poison it.
#define SHARED alignas(16) static thread_local
constexpr int WARP_SIZE = EMULATED_WARP_SIZE;
constexpr bool HAS_MMA_TF32 = WARP_SIZE == 32;
constexpr bool REALLOCATES_REGISTERS = false;

DEVICE int thread_index() { return emulator::thread_index(); }
DEVICE int reload_thread_index() { return thread_index(); }
DEVICE int64_t block_index() { return emulator::block_index(); }
DEVICE void barrier() { emulator::barrier(); }
DEVICE float* dynamic_shared() { return emulator::dynamic_shared(); }
template <class T>
DEVICE T* global_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
DEVICE float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
template <int mask>
DEVICE float shuffle_xor(float x) {
  static_assert(mask > 0 && mask < WARP_SIZE, "a lane of the same warp");
  return emulator::exchange({"shuffle_xor", mask}, &x, 1)[thread_index() % WARP_SIZE ^ mask].value[0];
}
DEVICE float shuffle(float x, int lane) {
  return emulator::exchange({"shuffle", 0}, &x, 1)[lane].value[0];
}
DEVICE void warp_sync() { shuffle_xor<1>(0.0f); }
DEVICE uint32_t opaque(uint32_t x) { return x; }
DEVICE int opaque_index(int index) { return index; }
// GPU instructions flush subnormal inputs and outputs.
DEVICE float flush_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
DEVICE float exp2_approx(float x) { return flush_subnormal(std::exp2(flush_subnormal(x))); }
constexpr float EXP2_CORRECTION = 0.0f;
DEVICE float reciprocal(float x) { return flush_subnormal(1.0f / flush_subnormal(x)); }

#endif

#if !defined(__CUDACC__)
DEVICE void cp_async(void* shared, const void* from) { __builtin_memcpy(shared, from, 16); }
template <int COUNT>
DEVICE void deallocate_registers() {}
template <int COUNT>
DEVICE void allocate_registers() {}
DEVICE void launch_dependent_grids() {}
DEVICE void wait_on_dependent_grids() {}
DEVICE void prefetch_l1(const void*) {}
DEVICE void cp_async_wait() {}
#endif

#include "numeric_types.h"
#include "mma.h"
