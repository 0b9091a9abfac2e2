// Kernels of the causal convolution. The plain ones are for widths up to 4, the wide ones for 5 to 8; those
// for tokens expect channels adjacent in memory.
// launch: conv_forward threads=128 shared_base=0 shared_per_slab=0
#pragma once

#include "conv_backward_tokens.h"
#include "conv_forward.h"
#include "conv_update.h"

// Forward along time, one vector after the other where eight at once would be large and is not what is timed, with
// segments, or where a lane has only one: code that is not run is still read.
template <class T, int TAPS>
DEVICE void conv_forward_along_time(const ConvForward& p) {
  if (p.segment) return conv::forward_along_time<T, TAPS, true, 1>(p);
  if (p.steps <= conv::TEAM * 8) return conv::forward_along_time<T, TAPS, false, 1>(p);
  conv::forward_along_time<T, TAPS, false, conv::FORWARD_VECTORS>(p);
}

// Blocks on a multiprocessor: fewer would be too few loads under way, more would spill registers.
#define CONV_KERNELS(type, suffix, taps, forward, forward_tokens, backward, backward_tokens)              \
  KERNEL(conv_forward_##suffix##type, conv::THREADS, forward, ConvForward) {                              \
    conv_forward_along_time<type, taps>(p);                                                               \
  }                                                                                                       \
  KERNEL(conv_forward_tokens_##suffix##type, conv::THREADS, forward_tokens, ConvForward) {                \
    p.segment ? conv::forward_along_channels<type, taps, true>(p)                                         \
              : conv::forward_along_channels<type, taps, false>(p);                                       \
  }                                                                                                       \
  KERNEL(conv_backward_##suffix##type, conv::BACKWARD_THREADS, backward, ConvBackward) {                           \
    SHARED float sums[conv::TIME_SUMS<taps>];                                                             \
    p.segment ? conv::backward_along_time<type, taps, true>(p, sums)                                      \
              : conv::backward_along_time<type, taps, false>(p, sums);                                    \
  }                                                                                                       \
  KERNEL(conv_backward_tokens_##suffix##type, conv::THREADS, backward_tokens, ConvBackward) {             \
    SHARED float sums[conv::CHANNEL_SUMS<taps>];                                                          \
    p.segment ? conv::backward_along_channels<type, taps, true>(p, sums)                                  \
              : conv::backward_along_channels<type, taps, false>(p, sums);                                \
  }

CONV_KERNELS(bf16, , 4, 8, 4, 8, WAVE == 64 ? 2 : 3)
CONV_KERNELS(fp16, , 4, 8, 4, 8, 3)
CONV_KERNELS(fp32, , 4, 6, 4, 8, 3)
CONV_KERNELS(bf16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp32, wide_, 8, 4, 3, 4, 1)

#define CONV_UPDATE(type)                                                       \
  KERNEL(conv_update_##type, conv::THREADS, 6, ConvUpdate) {                    \
    p.sizes.width <= 4 ? conv::update<type, 4>(p) : conv::update<type, 8>(p);   \
  }

CONV_UPDATE(bf16)
CONV_UPDATE(fp16)
CONV_UPDATE(fp32)
KERNEL(conv_reduce, conv::THREADS, 8, ConvReduce) { conv::reduce(p); }
