// What reaches a split of time; see shares.h.
#pragma once

#include "quads.h"
#include "shares.h"

// Splits that are read at once: each alone would wait for memory. Few where each number is read by itself: code that is not
// run is still read.
constexpr int SPLITS_AT_ONCE = 8, FEW_SPLITS_AT_ONCE = 2;

// Adds what is left of what `count` splits hand on, from the nearest on, so that no decay or product waits for another. Reads
// AT_ONCE of them together. Returns what they span.
template <int AT_ONCE, bool SEGMENTED, class Load>
DEVICE Span add_leaving(float (&carry)[4], const float (&a)[4], const float* leaves_at, const float* span_at, int64_t leaves_apart,
                        int64_t spans_apart, int count, const Load& load) {
  Span between;
#pragma unroll 1
  for (; count > 0; count -= AT_ONCE) {
    float leaves[AT_ONCE][4];
    Span spans[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (k < count) {
        load(leaves[k], leaves_at);
        spans[k] = Span::read(span_at);
      }
      leaves_at += leaves_apart;
      span_at += spans_apart;
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (k >= count) break;
      between.add_what_is_left<SEGMENTED>(carry, leaves[k], a);
      between.add(spans[k]);
    }
  }
  return between;
}

// The carry that reaches a split of what enters the sequence, if anything does, and of what leaves the splits on the way.
template <bool FORWARD, bool SEGMENTED, class Params>
DEVICE void arriving(float (&carry)[4], const Params& p, const float* enters, const Share& share, const QuadLane& lane,
                     int64_t slab) {
  constexpr int64_t TOWARDS = FORWARD ? -1 : 1;
  const ScanSizes& sizes = p.sizes;
  const QuadAddress address(sizes, share.place, lane, slab);
  const int64_t channels = sizes.batch * sizes.channels, nearest = share.split + TOWARDS;
#pragma unroll
  for (int e = 0; e < 4; ++e) carry[e] = 0.0f;
  if (address.access.inside == 0) return;
  float first[4] = {}, a[4] = {};
  if (enters) address.load(first, enters);
  const int count = static_cast<int>(FORWARD ? share.split : p.splits - 1 - share.split);
  Span between;
  if (count > 0) {
    load_quad_decay(a, p.a, sizes, share.place, lane, slab);
    const float* leaves = p.carries + (nearest * channels * sizes.states + address.start);
    const float* spans = p.spans + Span::index(sizes, share.place, nearest, lane.channel());
    const int64_t leaves_apart = TOWARDS * channels * sizes.states, spans_apart = TOWARDS * channels * 2;
    if (address.access.wide) {
      between = add_leaving<SPLITS_AT_ONCE, SEGMENTED>(carry, a, leaves, spans, leaves_apart, spans_apart, count,
                                                       [](float (&x)[4], const float* at) { load_four(x, at); });
    } else {
      between = add_leaving<FEW_SPLITS_AT_ONCE, SEGMENTED>(carry, a, leaves, spans, leaves_apart, spans_apart, count,
                                                           [&](float (&x)[4], const float* at) { address.access.load(x, at); });
    }
  }
  if (enters) between.add_what_is_left<SEGMENTED>(carry, first, a);
}
