// Runs kernels on the CPU: the threads of a block are fibers that meet at barriers, shuffles and matrix
// instructions. It is for tests: what diverges, leaves a lane behind, relies on a lane order or reads shared
// memory before writing it is found here, for waves of 32 and of 64 lanes, without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Launch {
  const char* kernel;
  int wave;
  int compiled_threads;
  void (*body)(const void* params);
  const void* params;
  int64_t blocks;
  int threads;
  size_t dynamic_shared_bytes;
};

// What a collective operation is called in messages, and what tells it from another of its kind.
struct Operation {
  const char* name;
  int variant;
};

// What one lane brings to a collective operation.
struct Lane {
  float value[8];
};

// Returns 0, or 1 when the kernel is wrong; emulator_message() then says how.
int launch(const Launch& launch);

// Puts a kernel on the list of emulator_kernels().
struct Listed {
  Listed(const char* kernel, int wave, int threads);
};

int thread_index();
int64_t block_index();
float* dynamic_shared();
void barrier();

// Waits for every lane of the wave; returns what each brought, valid until the wave's next operation but one.
const Lane* exchange(Operation operation, const float* values, int count);

}  // namespace emulator

// Lines `kernel threads`, of all kernels.
extern "C" __attribute__((visibility("default"))) const char* emulator_kernels();
// What was wrong with the last launch.
extern "C" __attribute__((visibility("default"))) const char* emulator_message();
