// The scan's kernels: `many` for more than 16 states, `tokens` where channels are adjacent in memory instead of
// times, `packed` with segments. Kernels of their own, because what shares a kernel shares its registers.
// launch: scan_forward_many threads=256 shared_base=50704 shared_per_slab=4096
// launch: scan_forward threads=256 shared_base=50704 shared_per_slab=0
// launch: scan_backward_many threads=128 shared_base=72160 shared_per_slab=8192
// launch: scan_backward threads=128 shared_base=67552 shared_per_slab=8192
// launch on sm_90: scan_forward_many threads=256 registers=80 shared_base=50704 shared_per_slab=4096
// launch on sm_90: scan_forward threads=256 registers=80 shared_base=50704 shared_per_slab=0
// launch on gfx: scan_forward_many threads=128 shared_base=21392 shared_per_slab=2048
// launch on gfx: scan_forward threads=128 shared_base=21392 shared_per_slab=0
// launch on gfx: scan_backward_many threads=128 shared_base=60896 shared_per_slab=0
// launch on gfx: scan_backward threads=128 shared_base=56288 shared_per_slab=0
#pragma once

#include "scan_backward.h"
#include "scan_reduce.h"

static_assert(sizeof(ForwardShared) == (HELPED ? 50704 : 21392), "as the lines above say");
static_assert(sizeof(BackwardShared) == (HAS_MATRIX_TF32 ? 67552 : 56288), "as the lines above say; several slabs 4608 more");

// So many blocks must fit on a multiprocessor. Backward: at batch 2 the published shape has 2.5 for each of an
// H200's, and all of them fit at 168 registers; several slabs take more registers than that leaves.
constexpr int FORWARD_BLOCKS = HAS_MATRIX_TF32 ? 3 : 1;
static_assert(!HELPED || 65536 / (FORWARD_BLOCKS * FORWARD_THREADS) / 8 * 8 == FORWARD_REGISTERS, "what ptxas gives them");
constexpr int BACKWARD_BLOCKS = HAS_MATRIX_TF32 ? 3 : 1;
constexpr int BACKWARD_MANY_BLOCKS = HAS_MATRIX_TF32 ? 2 : 1;
constexpr int SPLIT_BLOCKS = HAS_MATRIX_TF32 ? 6 : 2;

#define SCAN_KERNEL(name, type, many, along_time, segmented)                      \
  KERNEL(scan_forward##name##_##type, FORWARD_THREADS, FORWARD_BLOCKS, ScanForward) {        \
    scan_forward<type, many, along_time, segmented>(p);                           \
  }                                                                               \
  KERNEL(scan_backward##name##_##type, THREADS, (many) ? BACKWARD_MANY_BLOCKS : BACKWARD_BLOCKS, ScanBackward) { \
    scan_backward<type, many, along_time, segmented>(p);                          \
  }

#define SPLIT_KERNEL(name, type, along_time, segmented)                        \
  KERNEL(scan_states##name##_##type, THREADS, SPLIT_BLOCKS, ScanForward) {     \
    scan_split<ForwardSplit<type>, type, along_time, segmented>(p);            \
  }                                                                            \
  KERNEL(scan_carries##name##_##type, THREADS, SPLIT_BLOCKS, ScanBackward) {   \
    scan_split<BackwardSplit<type>, type, along_time, segmented>(p);           \
  }

#define SCAN_KERNELS(type)                                        \
  SCAN_KERNEL(, type, false, true, false)                         \
  SCAN_KERNEL(_packed, type, false, true, true)                   \
  SCAN_KERNEL(_tokens, type, false, false, false)                 \
  SCAN_KERNEL(_tokens_packed, type, false, false, true)           \
  SCAN_KERNEL(_many, type, true, true, false)                     \
  SCAN_KERNEL(_many_packed, type, true, true, true)               \
  SCAN_KERNEL(_many_tokens, type, true, false, false)             \
  SCAN_KERNEL(_many_tokens_packed, type, true, false, true)       \
  SPLIT_KERNEL(, type, true, false)                               \
  SPLIT_KERNEL(_packed, type, true, true)                         \
  SPLIT_KERNEL(_tokens, type, false, false)                       \
  SPLIT_KERNEL(_tokens_packed, type, false, true)                 \
  KERNEL(scan_reduce_##type, THREADS, 4, ScanReduce) { scan_reduce<type>(p); }

SCAN_KERNELS(bf16)
SCAN_KERNELS(fp16)
SCAN_KERNELS(fp32)
