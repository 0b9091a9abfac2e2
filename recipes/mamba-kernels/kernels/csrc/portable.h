// What differs between NVIDIA GPUs, AMD GPUs and the CPU that emulates them. One source, three compilers:
// nvcc for sm_80 and newer, clang or hipcc for gfx9 (builtins only: neither ROCm's headers nor its device
// libraries are needed), and any C++17 compiler for the emulator.
//
// A kernel sees blocks of threads along x, waves of WAVE lanes, a barrier, shuffles and exponentials. There
// are no floating-point atomics here: gfx90a turns them into compare-and-swap loops unless a flag permits
// the unsafe form, and no sum that uses them can be repeated bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__
// `threads` is the size of every block; `blocks` is how many must fit on a multiprocessor at once.
#define KERNEL(name, threads, blocks, Params) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Params p)
// Starts on 16 bytes, as everywhere below.
#define SHARED __shared__ __align__(16)
constexpr int WAVE = 32;
constexpr bool HAS_MATRIX_TF32 = true;

DEVICE int thread_index() { return threadIdx.x; }
// The same, found again at each call: kept in local memory until it is needed, it would take longer to come.
DEVICE int thread_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
DEVICE int64_t block_index() { return blockIdx.x; }
DEVICE void barrier() { __syncthreads(); }
// Every thread of four neighbouring waves has COUNT registers from here on, fewer than a launch bound gives it, or more
// once others gave theirs up. Each role is one branch of a kernel. Does nothing where the hardware cannot.
template <int COUNT>
DEVICE void give_up_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
DEVICE void claim_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
// A kernel that is launched to overlap the one before it starts when all blocks of that one have let it, or have ended;
// what the other wrote is there once a thread has waited for its end. In other launches, and before sm_90, these do nothing.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE float* dynamic_shared() {
  extern __shared__ __align__(16) float memory[];
  return memory;
}
// 16 bytes to shared memory without a register between; there when the same thread has called copies_done().
DEVICE void copy_async(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
}
DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Starts to read what is needed soon.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }
DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }
template <int mask>
DEVICE float shuffle_xor(float x) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
// What `lane` of the wave holds.
DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// To be added to exponents whose powers are multiplied with each other many times: exp2_fast is low by 0.1 to 0.45 of
// 2^-24 on average between -1 and 0 on an H200 (NOTES.md), and of -0 it is 1 all the same.
constexpr float EXPONENT_SHIFT = 2e-8f;
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#elif defined(__HIP__)

#if !defined(__GFX9__) && defined(__HIP_DEVICE_COMPILE__)
#error "a wave is 64 lanes and a compute unit four SIMDs here, which holds for gfx9 alone"
#endif
#define DEVICE __attribute__((device, always_inline)) inline
// HIP's own second launch bound counts waves per SIMD, of which a compute unit has four.
#define KERNEL(name, threads, blocks, Params)                                           \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads),      \
                            amdgpu_waves_per_eu(((blocks) * (((threads) + 63) / 64) + 3) / 4))) void \
  name(const Params p)
#define SHARED __attribute__((shared, aligned(16)))
// warpSize is no compile-time constant since ROCm 7.
constexpr int WAVE = 64;
constexpr bool HAS_MATRIX_TF32 = false;

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int thread_index_again() { return thread_index(); }
DEVICE int64_t block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void copy_async(void* shared, const void* from) { __builtin_memcpy(shared, from, 16); }
template <int COUNT>
DEVICE void give_up_registers() {}
template <int COUNT>
DEVICE void claim_registers() {}
DEVICE void let_next_start() {}
DEVICE void wait_for_kernel_before() {}
DEVICE void prefetch(const void*) {}
DEVICE void copies_done() {}
extern __attribute__((shared, aligned(16))) float dynamic_memory[];
DEVICE float* dynamic_shared() { return dynamic_memory; }
DEVICE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
DEVICE float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

template <int control>
DEVICE int data_parallel(int x) {
  return __builtin_amdgcn_update_dpp(0, x, control, 0xf, 0xf, true);
}
// Within a row of 16 lanes the operand itself can be permuted for free; within 32 the LDS crossbar does it
// without an address; across the halves of the wave it needs one.
template <int mask>
DEVICE float shuffle_xor(float x) {
  static_assert(mask > 0 && mask < WAVE, "a lane of the same wave");
  const int bits = __builtin_bit_cast(int, x);
  int y;
  if constexpr (mask < 4) {
    y = data_parallel<(0 ^ mask) | (1 ^ mask) << 2 | (2 ^ mask) << 4 | (3 ^ mask) << 6>(bits);
  } else if constexpr (mask == 7) {
    y = data_parallel<0x141>(bits);  // mirrored in half a row
  } else if constexpr (mask == 8) {
    y = data_parallel<0x128>(bits);  // rotated by half a row
  } else if constexpr (mask == 15) {
    y = data_parallel<0x140>(bits);  // mirrored in a row
  } else if constexpr (mask < 32) {
    y = __builtin_amdgcn_ds_swizzle(bits, mask << 10 | 0x1f);
  } else {
    y = __builtin_amdgcn_ds_bpermute((thread_index() % WAVE ^ mask) * 4, bits);
  }
  return __builtin_bit_cast(float, y);
}
DEVICE float shuffle(float x, int lane) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, x)));
}
// The instruction itself: without the builtin the compiler wraps it in a rescue of subnormal results.
DEVICE float exp2_fast(float x) {
#if __has_builtin(__builtin_amdgcn_exp2f)
  return __builtin_amdgcn_exp2f(x);
#else
  float y;
  asm("v_exp_f32 %0, %1" : "=v"(y) : "v"(x));
  return y;
#endif
}
// Not measured.
constexpr float EXPONENT_SHIFT = 0.0f;
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }

#else

#include <cmath>

#include "emulator.h"

#define DEVICE inline
#define EMULATED_NAME_(name, wave) name##_w##wave
#define EMULATED_NAME(name, wave) EMULATED_NAME_(name, wave)
#define KERNEL(name, threads, blocks, Params)                                                         \
  static void name##_thread(const Params& p);                                                         \
  static const emulator::Listed name##_listed(#name, EMULATED_WAVE, (threads));                       \
  extern "C" __attribute__((visibility("default"))) int EMULATED_NAME(name, EMULATED_WAVE)(           \
      const Params* p, int64_t grid, int size, size_t dynamic_shared_bytes) {                         \
    const auto body = [](const void* params) { name##_thread(*static_cast<const Params*>(params)); }; \
    return emulator::launch(                                                                          \
        {#name, EMULATED_WAVE, (threads), body, p, grid, size ? size : (threads), dynamic_shared_bytes});                \
  }                                                                                                   \
  static void name##_thread(const Params& p)
// Thread-local, so that every worker has the shared memory of its own block and can find it to poison it.
#define SHARED alignas(16) static thread_local
constexpr int WAVE = EMULATED_WAVE;
constexpr bool HAS_MATRIX_TF32 = WAVE == 32;

DEVICE int thread_index() { return emulator::thread_index(); }
DEVICE int thread_index_again() { return thread_index(); }
DEVICE int64_t block_index() { return emulator::block_index(); }
DEVICE void barrier() { emulator::barrier(); }
template <int COUNT>
DEVICE void give_up_registers() {}
template <int COUNT>
DEVICE void claim_registers() {}
DEVICE void let_next_start() {}
DEVICE void wait_for_kernel_before() {}
DEVICE float* dynamic_shared() { return emulator::dynamic_shared(); }
DEVICE void copy_async(void* shared, const void* from) { __builtin_memcpy(shared, from, 16); }
DEVICE void prefetch(const void*) {}
DEVICE void copies_done() {}
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
  static_assert(mask > 0 && mask < WAVE, "a lane of the same wave");
  return emulator::exchange({"shuffle_xor", mask}, &x, 1)[thread_index() % WAVE ^ mask].value[0];
}
DEVICE float shuffle(float x, int lane) {
  return emulator::exchange({"shuffle", 0}, &x, 1)[lane].value[0];
}
// The GPUs' instructions flush subnormal numbers, in and out.
DEVICE float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
DEVICE float exp2_fast(float x) { return flush(std::exp2(flush(x))); }
constexpr float EXPONENT_SHIFT = 0.0f;
DEVICE float reciprocal(float x) { return flush(1.0f / flush(x)); }

#endif

#include "types.h"
#include "matrix.h"
