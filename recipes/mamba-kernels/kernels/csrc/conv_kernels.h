// Kernels of the causal convolution: for widths up to 4, or wide, 5 to 8; for times adjacent in memory, or for tokens, with
// channels adjacent. Plain ones take what conv_plain.h says.
// launch: conv_forward threads=128 shared_base=0 shared_per_slab=0
#pragma once

#include "conv_backward_tokens.h"
#include "conv_plain.h"
#include "conv_update.h"

#include <type_traits>

// Forward along time, one vector at a time with segments, which is not what is timed, or where a lane has only one:
// code that is not run is still read.
template <class T, int TAPS>
DEVICE void conv_forward_along_time(const ConvForward& p) {
  if (p.segment) return conv::forward_along_time<T, TAPS, true, 1>(p);
  if (p.steps <= conv::TEAM * 8) return conv::forward_along_time<T, TAPS, false, 1>(p);
  conv::forward_along_time<T, TAPS, false, conv::FORWARD_AHEAD<T>>(p);
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

// Calls run with the number of taps, from 2 to 4.
template <class Run>
DEVICE void with_taps(int64_t width, const Run& run) {
  if (width == 4) return run(std::integral_constant<int, 4>());
  width == 3 ? run(std::integral_constant<int, 3>()) : run(std::integral_constant<int, 2>());
}

#define CONV_PLAIN(type, forward, backward)                                                            \
  KERNEL(conv_forward_plain_##type, conv::THREADS, forward, ConvForward) {                             \
    with_taps(p.sizes.width, [&](auto taps) {                                                          \
      p.steps > conv::TEAM * 8 ? conv::forward_plain<type, taps, conv::FORWARD_AHEAD<type>>(p)         \
                               : conv::forward_plain<type, taps, 1>(p);                                \
    });                                                                                                \
  }                                                                                                    \
  KERNEL(conv_backward_plain_##type, conv::BACKWARD_THREADS, backward, ConvBackward) {                 \
    SHARED float sums[conv::TIME_SUMS<4>];                                                             \
    with_taps(p.sizes.width, [&](auto taps) { conv::backward_plain<type, taps>(p, sums); });           \
  }

CONV_PLAIN(bf16, 8, 12)
CONV_PLAIN(fp16, 8, 12)
CONV_PLAIN(fp32, 6, 14)

#define CONV_UPDATE(type)                                                       \
  KERNEL(conv_update_##type, conv::THREADS, 6, ConvUpdate) {                    \
    p.sizes.width <= 4 ? conv::update<type, 4>(p) : conv::update<type, 8>(p);   \
  }

CONV_UPDATE(bf16)
CONV_UPDATE(fp16)
CONV_UPDATE(fp32)
KERNEL(conv_reduce, conv::THREADS, 8, ConvReduce) { conv::reduce(p); }
