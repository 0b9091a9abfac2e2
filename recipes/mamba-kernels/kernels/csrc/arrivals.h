// What reaches a split of time; see shares.h.
#pragma once

#include "quads.h"
#include "shares.h"

// Splits that are read at once: each alone would wait for memory.
constexpr int SPLITS_AT_ONCE = 8;

// The carry that reaches a split of what enters the sequence, if anything does, and of what leaves the splits on the way.
// From the nearest on, so that no decay or product waits for another.
template <bool FORWARD, class Params>
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
  if (count > 0) load_quad_decay(a, p.a, sizes, share.place, lane, slab);
  const float* leaves_at = p.carries + (nearest * channels * sizes.states + address.start);
  const float* span_at = p.spans + Span::index(sizes, share.place, nearest, lane.channel());
  Span between;
#pragma unroll 1
  for (int done = 0; done < count; done += SPLITS_AT_ONCE) {
    float leaves[SPLITS_AT_ONCE][4];
    Span spans[SPLITS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < SPLITS_AT_ONCE; ++k) {
      address.access.load(leaves[k], leaves_at);
      spans[k] = Span::read(span_at);
      // The last is read again, and not used.
      const int64_t further = done + k + 1 < count ? TOWARDS * channels : 0;
      leaves_at += further * sizes.states;
      span_at += further * 2;
    }
#pragma unroll
    for (int k = 0; k < SPLITS_AT_ONCE; ++k) {
      if (done + k >= count) break;
      between.add_what_is_left(carry, leaves[k], a);
      between.add(spans[k]);
    }
  }
  if (enters) between.add_what_is_left(carry, first, a);
}
