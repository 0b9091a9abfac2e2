// The scan's kernels. `multi_tile`: more than 16 states; `token_major`: the channel stride is 1, not the time stride;
// `packed`: with segments. Each variant is a kernel of its own, because code in one kernel shares its registers.
// Equation: DESIGN.md has those of both passes.
// Tiling: a kernel for every type, layout, number of state tiles, and with or without segments.
#pragma once

#include "scan_forward.h"
#include "scan_backward.h"
#include "scan_reduce.h"

// Blocks that must be resident on a multiprocessor. Backward: at batch 2 the published shape has 2.5 blocks for each
// multiprocessor of an H200, and 168 registers fit three; several state tiles need more registers.
constexpr int FORWARD_BLOCKS = HAS_MMA_TF32 ? 3 : 1;
static_assert(!WARP_SPECIALIZED || 65536 / (FORWARD_BLOCKS * FORWARD_THREADS) / 8 * 8 == FORWARD_REGISTERS,
              "what ptxas gives them");
constexpr int BACKWARD_BLOCKS = HAS_MMA_TF32 ? 3 : 1;
constexpr int BACKWARD_MULTI_TILE_BLOCKS = HAS_MMA_TF32 ? 2 : 1;
constexpr int SPLIT_BLOCKS = HAS_MMA_TF32 ? 6 : 2;

// Behind a block's shared memory lie what state tiles leave for each other: forward their states, backward dt u of the
// chunk and, with tensor cores, carries and gradients of A.
template <bool MULTI_TILE>
constexpr LaunchSizes FORWARD_LAUNCH = {FORWARD_THREADS, REALLOCATES_REGISTERS ? FORWARD_REGISTERS : 0,
                                        sizeof(ForwardShared), MULTI_TILE ? FORWARD_COPIES * STATES_BYTES : 0};
template <bool MULTI_TILE>
constexpr LaunchSizes BACKWARD_LAUNCH = {THREADS, 0,
                                         sizeof(BackwardShared) + (MULTI_TILE ? TILED_INPUT * sizeof(float) : 0),
                                         HAS_MMA_TF32 ? CARRIES * STATES_BYTES : 0};

#define SCAN_KERNEL(name, type, multi_tile, along_time, segmented)                               \
  KERNEL(scan_forward##name##_##type, FORWARD_LAUNCH<multi_tile>, FORWARD_BLOCKS, ScanForward) { \
    scan_forward<type, multi_tile, along_time, segmented>(p);                                    \
  }                                                                                              \
  KERNEL(scan_backward##name##_##type, BACKWARD_LAUNCH<multi_tile>,                              \
         (multi_tile) ? BACKWARD_MULTI_TILE_BLOCKS : BACKWARD_BLOCKS, ScanBackward) {            \
    scan_backward<type, multi_tile, along_time, segmented>(p);                                   \
  }

#define SPLIT_KERNEL(name, type, along_time, segmented)                             \
  KERNEL(scan_split_forward##name##_##type, THREADS, SPLIT_BLOCKS, ScanForward) {   \
    split_state<ForwardSplit<type>, type, along_time, segmented>(p);                \
  }                                                                                 \
  KERNEL(scan_split_backward##name##_##type, THREADS, SPLIT_BLOCKS, ScanBackward) { \
    split_state<BackwardSplit<type>, type, along_time, segmented>(p);               \
  }

#define SCAN_KERNELS(type)                                             \
  SCAN_KERNEL(, type, false, true, false)                              \
  SCAN_KERNEL(_packed, type, false, true, true)                        \
  SCAN_KERNEL(_token_major, type, false, false, false)                 \
  SCAN_KERNEL(_token_major_packed, type, false, false, true)           \
  SCAN_KERNEL(_multi_tile, type, true, true, false)                    \
  SCAN_KERNEL(_multi_tile_packed, type, true, true, true)              \
  SCAN_KERNEL(_multi_tile_token_major, type, true, false, false)       \
  SCAN_KERNEL(_multi_tile_token_major_packed, type, true, false, true) \
  SPLIT_KERNEL(, type, true, false)                                    \
  SPLIT_KERNEL(_packed, type, true, true)                              \
  SPLIT_KERNEL(_token_major, type, false, false)                       \
  SPLIT_KERNEL(_token_major_packed, type, false, true)                 \
  KERNEL(scan_reduce_##type, THREADS, 4, ScanReduce) { scan_reduce<type>(p); }

SCAN_KERNELS(bf16)
SCAN_KERNELS(fp16)
SCAN_KERNELS(fp32)
