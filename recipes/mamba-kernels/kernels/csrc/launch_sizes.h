// What a launch of a kernel asks for beside its blocks. A kernel is compiled with its sizes, and its code object holds
// them as an array `<kernel>_launch`, from which the host writes kernels.json: they stand in one place.
// Equation: dynamic shared memory of a block = shared_base + shared_per_state_tile * ceil(states / 16), in bytes.
// Tiling: none, that of each kernel.
// Alone: pytest recipes/mamba-kernels/tests/test_compile.py -k lists
#pragma once

#include <cstdint>

struct LaunchSizes {
  int32_t threads;
  // Set where warps hand registers to each other: with fewer they would wait for ever. A build that gives other ones is
  // refused.
  int32_t registers = 0;
  int32_t shared_base = 0, shared_per_state_tile = 0;
};

// The elements of `<kernel>_launch`; `sizes` is LaunchSizes, or a number of threads.
#define LAUNCH_ARRAY(sizes) \
  { LaunchSizes{sizes}.registers, LaunchSizes{sizes}.shared_base, LaunchSizes{sizes}.shared_per_state_tile }
