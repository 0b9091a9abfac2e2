// Kernels of the causal convolution: for widths up to 4, or wide, 5 to 8; for times adjacent in memory, or for tokens, with
// channels adjacent. Plain ones take what conv_plain.h says.
// launch: conv_forward threads=128 shared_base=0 shared_per_slab=0
#pragma once

#include "conv_plain.h"
#include "conv_update.h"

// Forward along time, one vector at a time with segments, which is not what is timed, or where a lane has only one:
// code that is not run is still read.
template <class T, int TAPS>
DEVICE void conv_forward_along_time(const ConvForward& p) {
  if (p.segment) return conv::forward_along_time<T, TAPS, true, 1>(p);
  if (p.steps <= conv::TEAM * 8) return conv::forward_along_time<T, TAPS, false, 1>(p);
  conv::forward_along_time<T, TAPS, false, conv::FORWARD_AHEAD<T>>(p);
}

// Blocks on a multiprocessor: fewer would be too few loads under way, more would spill registers.
#define CONV_KERNELS(type, suffix, taps, forward, forward_tokens, backward, backward_tokens)  \
  KERNEL(conv_forward_##suffix##type, conv::THREADS, forward, ConvForward) {                  \
    conv_forward_along_time<type, taps>(p);                                                   \
  }                                                                                           \
  KERNEL(conv_forward_tokens_##suffix##type, conv::THREADS, forward_tokens, ConvForward) {    \
    p.segment ? conv::forward_along_channels<type, taps, true>(p)                             \
              : conv::forward_along_channels<type, taps, false>(p);                           \
  }                                                                                           \
  KERNEL(conv_backward_##suffix##type, conv::BACKWARD_THREADS, backward, ConvBackward) {      \
    SHARED float sums[conv::TIME_SUMS<taps>];                                                 \
    let_next_start();                                                                         \
    p.segment ? conv::backward_along_time<type, taps, true>(p, sums)                          \
              : conv::backward_along_time<type, taps, false>(p, sums);                        \
  }                                                                                           \
  KERNEL(conv_backward_tokens_##suffix##type, conv::THREADS, backward_tokens, ConvBackward) { \
    SHARED float sums[conv::CHANNEL_SUMS<type, taps>];                                        \
    let_next_start();                                                                         \
    p.segment ? conv::backward_along_channels<type, taps, true>(p, sums)                      \
              : conv::backward_along_channels<type, taps, false>(p, sums);                    \
  }

CONV_KERNELS(bf16, , 4, 8, 4, 8, WAVE == 64 ? 2 : 3)
CONV_KERNELS(fp16, , 4, 8, 4, 8, 3)
CONV_KERNELS(fp32, , 4, 6, 4, 8, 3)
CONV_KERNELS(bf16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp16, wide_, 8, 4, 3, 4, 1)
CONV_KERNELS(fp32, wide_, 8, 4, 3, 4, 1)

// One kernel for each width: in one for all of them the compiler has too few registers for any.
#define CONV_PLAIN(type, taps, forward)                                               \
  KERNEL(conv_forward_plain##taps##_##type, conv::THREADS, forward, ConvForward) {    \
    conv::forward_plain<type, taps>(p);                                               \
  }                                                                                   \
  KERNEL(conv_forward_small##taps##_##type, conv::THREADS, 8, ConvForward) {          \
    conv::forward_small<type, taps>(p);                                               \
  }                                                                                   \
  KERNEL(conv_forward_ragged##taps##_##type, conv::THREADS, 8, ConvForward) {         \
    conv::forward_ragged<type, taps>(p);                                              \
  }                                                                                   \
  KERNEL(conv_forward_tokens_plain##taps##_##type, conv::THREADS, 4, ConvForward) {   \
    conv::forward_tokens_plain<type, taps>(p);                                        \
  }                                                                                   \
  KERNEL(conv_forward_tokens_small##taps##_##type, conv::THREADS, 6, ConvForward) {   \
    conv::forward_tokens_small<type, taps>(p);                                        \
  }                                                                                   \
  KERNEL(conv_backward_tokens_plain##taps##_##type, conv::THREADS, 3, ConvBackward) { \
    SHARED float sums[conv::CHANNEL_SUMS<type, taps>];                                \
    let_next_start();                                                                 \
    conv::backward_along_channels<type, taps, false, true>(p, sums);                  \
  }                                                                                   \
  KERNEL(conv_backward_plain##taps##_##type, conv::THREADS, 7, ConvBackward) {        \
    SHARED float sums[conv::TIME_SUMS<taps, conv::PLAIN_WAVES>];                      \
    SHARED conv::Edges edges;                                                         \
    let_next_start();                                                                 \
    p.sizes.silu && p.sizes.length % conv::PLAIN_TIMES == 0                           \
        ? conv::backward_plain<type, taps, true>(p, sums, edges)                      \
        : conv::backward_plain<type, taps, false>(p, sums, edges);                    \
  }
#define CONV_PLAIN_WIDTHS(type, forward) \
  CONV_PLAIN(type, 2, forward) CONV_PLAIN(type, 3, forward) CONV_PLAIN(type, 4, forward)

CONV_PLAIN_WIDTHS(bf16, 5)
CONV_PLAIN_WIDTHS(fp16, 8)
CONV_PLAIN_WIDTHS(fp32, 8)

#define CONV_UPDATE(type)                                                       \
  KERNEL(conv_update_##type, conv::THREADS, 6, ConvUpdate) {                    \
    p.sizes.width <= 4 ? conv::update<type, 4>(p) : conv::update<type, 8>(p);   \
  }

CONV_UPDATE(bf16)
CONV_UPDATE(fp16)
CONV_UPDATE(fp32)
KERNEL(conv_reduce, conv::THREADS, 8, ConvReduce) {
  SHARED float sums[conv::REDUCE_PARTS][conv::REDUCE_PLACES];
  conv::reduce(p, sums);
}
