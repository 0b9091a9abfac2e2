// The scan's kernels. `multi_tile`: more than 16 states; `token_major`: the channel stride is 1, not the time stride;
// `packed`: with segments. Each variant is a kernel of its own, because code in one kernel shares its registers.
// launch: scan_forward_multi_tile threads=256 shared_base=50704 shared_per_state_tile=4096
// launch: scan_forward threads=256 shared_base=50704 shared_per_state_tile=0
// launch: scan_backward_multi_tile threads=128 shared_base=72160 shared_per_state_tile=8192
// launch: scan_backward threads=128 shared_base=67552 shared_per_state_tile=8192
// launch on sm_90: scan_forward_multi_tile threads=256 registers=80 shared_base=50704 shared_per_state_tile=4096
// launch on sm_90: scan_forward threads=256 registers=80 shared_base=50704 shared_per_state_tile=0
// launch on gfx: scan_forward_multi_tile threads=128 shared_base=21392 shared_per_state_tile=2048
// launch on gfx: scan_forward threads=128 shared_base=21392 shared_per_state_tile=0
// launch on gfx: scan_backward_multi_tile threads=128 shared_base=60896 shared_per_state_tile=0
// launch on gfx: scan_backward threads=128 shared_base=56288 shared_per_state_tile=0
// Equation: DESIGN.md has those of both passes.
// Tiling: a kernel for every type, layout, number of state tiles, and with or without segments.
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_backward.h"
#include "scan_reduce.h"

static_assert(sizeof(ForwardShared) == (WARP_SPECIALIZED ? 50704 : 21392), "as the lines above say");
static_assert(sizeof(BackwardShared) == (HAS_MMA_TF32 ? 67552 : 56288),
              "as the lines above say; several state tiles 4608 more");

// Blocks that must be resident on a multiprocessor. Backward: at batch 2 the published shape has 2.5 blocks for each
// multiprocessor of an H200, and 168 registers fit three; several state tiles need more registers.
constexpr int FORWARD_BLOCKS = HAS_MMA_TF32 ? 3 : 1;
static_assert(!WARP_SPECIALIZED || 65536 / (FORWARD_BLOCKS * FORWARD_THREADS) / 8 * 8 == FORWARD_REGISTERS,
              "what ptxas gives them");
constexpr int BACKWARD_BLOCKS = HAS_MMA_TF32 ? 3 : 1;
constexpr int BACKWARD_MULTI_TILE_BLOCKS = HAS_MMA_TF32 ? 2 : 1;
constexpr int SPLIT_BLOCKS = HAS_MMA_TF32 ? 6 : 2;

#define SCAN_KERNEL(name, type, multi_tile, along_time, segmented)                                           \
  KERNEL(scan_forward##name##_##type, FORWARD_THREADS, FORWARD_BLOCKS, ScanForward) {                        \
    scan_forward<type, multi_tile, along_time, segmented>(p);                                                \
  }                                                                                                          \
  KERNEL(scan_backward##name##_##type, THREADS, (multi_tile) ? BACKWARD_MULTI_TILE_BLOCKS : BACKWARD_BLOCKS, \
         ScanBackward) {                                                                                     \
    scan_backward<type, multi_tile, along_time, segmented>(p);                                               \
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
