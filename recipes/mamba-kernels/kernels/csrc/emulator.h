// Runs kernels on the CPU, for tests: the threads of a block are fibers that synchronize at barriers, shuffles and mma
// instructions. It finds divergence, a missing lane, reliance on an order of lanes and a read of unwritten shared
// memory, for warps of 32 and of 64 lanes, without a GPU.
// Tiling: a block at a time on each worker, its threads as fibers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Launch {
  const char* kernel;
  int warp;
  int compiled_threads;
  void (*body)(const void* params);
  const void* params;
  int64_t blocks;
  int threads;
  size_t dynamic_shared_bytes;
};

// A collective operation: its name in messages, and the variant that tells two of one name apart.
struct Operation {
  const char* name;
  int variant;
};

// The values that one lane contributes to a collective operation.
struct Lane {
  float value[8];
};

// Returns 0, or 1 for a wrong kernel; emulator_message() then says how.
int launch(const Launch& launch);

// Registers a kernel for emulator_kernels(); `launch` as in launch_sizes.h.
struct Listed {
  Listed(const char* kernel, int threads, const int32_t (&launch)[3]);
};

int thread_index();
int64_t block_index();
float* dynamic_shared();
void barrier();

// Waits for every lane of the warp and returns their values, valid until the warp's next operation but one.
const Lane* exchange(Operation operation, const float* values, int count);

}  // namespace emulator

// A line `kernel threads registers shared_base shared_per_state_tile` for every kernel and size of warps.
extern "C" __attribute__((visibility("default"))) const char* emulator_kernels();
// What was wrong with the last launch.
extern "C" __attribute__((visibility("default"))) const char* emulator_message();
