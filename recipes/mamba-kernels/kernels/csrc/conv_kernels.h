// The convolution's kernels: widths up to 4, or 5 to 8 (wide); channel-first, or token-major. For the inputs of
// `aligned`, see conv_aligned_forward.h.
// Tiling: a kernel for every type, layout and kind of rows.
#pragma once

#include "conv_backward_token_major.h"
#include "conv_aligned_forward.h"
#include "conv_update.h"

// Channel-first. With segments, which are rare, or where a lane has one vector only, no prefetch: unused code costs
// instruction fetches.
template <class T, int TAPS>
DEVICE void conv_forward_along_time(const ConvForward& p) {
  if (p.segment) return conv::forward_along_time<T, TAPS, true, 1>(p);
  if (p.steps <= conv::LOGICAL_WARP * 8) return conv::forward_along_time<T, TAPS, false, 1>(p);
  conv::forward_along_time<T, TAPS, false, conv::FORWARD_PREFETCH<T>>(p);
}

// Resident blocks: with fewer too few loads would be in flight, with more registers would spill.
#define CONV_KERNELS(type, suffix, taps, forward, forward_token_major, backward, backward_token_major)                 \
  KERNEL(conv_forward_##suffix##type, conv::THREADS, forward, ConvForward) { conv_forward_along_time<type, taps>(p); } \
  KERNEL(conv_forward_token_major_##suffix##type, conv::THREADS, forward_token_major, ConvForward) {                   \
    p.segment ? conv::forward_along_channels<type, taps, true>(p)                                                      \
              : conv::forward_along_channels<type, taps, false>(p);                                                    \
  }                                                                                                                    \
  KERNEL(conv_backward_##suffix##type, conv::BACKWARD_THREADS, backward, ConvBackward) {                               \
    SHARED float sums[conv::TIME_SUMS<taps>];                                                                          \
    launch_dependent_grids();                                                                                          \
    p.segment ? conv::backward_along_time<type, taps, true>(p, sums)                                                   \
              : conv::backward_along_time<type, taps, false>(p, sums);                                                 \
  }                                                                                                                    \
  KERNEL(conv_backward_token_major_##suffix##type, conv::THREADS, backward_token_major, ConvBackward) {                \
    SHARED float sums[conv::CHANNEL_SUMS<type, taps>];                                                                 \
    launch_dependent_grids();                                                                                          \
    p.segment ? conv::backward_along_channels<type, taps, true>(p, sums)                                               \
              : conv::backward_along_channels<type, taps, false>(p, sums);                                             \
  }

CONV_KERNELS(bf16, , 4, 8, 4, 8, WARP_SIZE == 64 ? 2 : 3)
CONV_KERNELS(fp16, , 4, 8, 4, 8, 3)
CONV_KERNELS(fp32, , 4, 6, 4, 8, 3)
CONV_KERNELS(bf16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp32, wide_, 8, 4, 3, 4, 1)

// The width that models are trained with; narrower filters go by the kernels above. One kernel for several widths would
// have too few registers for any.
#define CONV_ALIGNED(type, forward)                                                  \
  KERNEL(conv_forward_aligned_##type, conv::THREADS, forward, ConvForward) {         \
    conv::forward_aligned<type, conv::ALIGNED_TAPS>(p);                              \
  }                                                                                  \
  KERNEL(conv_forward_small_##type, conv::THREADS, 8, ConvForward) {                 \
    conv::forward_small<type, conv::ALIGNED_TAPS>(p);                                \
  }                                                                                  \
  KERNEL(conv_forward_token_major_aligned_##type, conv::THREADS, 4, ConvForward) {   \
    conv::forward_token_major_aligned<type, conv::ALIGNED_TAPS>(p);                  \
  }                                                                                  \
  KERNEL(conv_forward_token_major_small_##type, conv::THREADS, 6, ConvForward) {     \
    conv::forward_token_major_small<type, conv::ALIGNED_TAPS>(p);                    \
  }                                                                                  \
  KERNEL(conv_backward_token_major_aligned_##type, conv::THREADS, 3, ConvBackward) { \
    SHARED float sums[conv::CHANNEL_SUMS<type, conv::ALIGNED_TAPS>];                 \
    launch_dependent_grids();                                                        \
    conv::backward_along_channels<type, conv::ALIGNED_TAPS, false, true>(p, sums);   \
  }

CONV_ALIGNED(bf16, 5)
CONV_ALIGNED(fp16, 8)
CONV_ALIGNED(fp32, 8)

#define CONV_UPDATE(type)                                                     \
  KERNEL(conv_update_##type, conv::THREADS, 6, ConvUpdate) {                  \
    p.sizes.width <= 4 ? conv::update<type, 4>(p) : conv::update<type, 8>(p); \
  }

CONV_UPDATE(bf16)
CONV_UPDATE(fp16)
CONV_UPDATE(fp32)
KERNEL(conv_reduce, conv::THREADS, 8, ConvReduce) {
  SHARED float sums[conv::REDUCE_ROWS][conv::REDUCE_COLUMNS];
  conv::reduce(p, sums);
}
