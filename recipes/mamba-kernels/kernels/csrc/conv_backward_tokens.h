// Causal convolution backward with channels adjacent in memory: a lane has COLUMNS of them for BACKWARD_STEPS
// steps, and the four teams of a block sum what they add to the gradients of weight and bias.
#pragma once

#include "conv_backward.h"

namespace conv {

constexpr int BACKWARD_STEPS = 64;

// Shared memory for sums, in floats.
template <int TAPS>
constexpr int CHANNEL_SUMS = THREADS * COLUMNS * (TAPS + 1);

// COLUMNS neighbouring channels, BACKWARD_STEPS steps from the last to the first.
template <class T, int TAPS, bool SEGMENTED>
struct Strip {
  static constexpr int PAST = TAPS - 1;
  // Pieces of STEPS beyond the lane's own, of which it needs g alone.
  static constexpr int EXTRA = (PAST + STEPS - 1) / STEPS;
  using Times = Together<PAST + STEPS + PAST, SEGMENTED>;

  const ConvBackward& p;
  const Filters<TAPS> filters;
  float weight_gradient[COLUMNS][TAPS] = {}, bias_gradient[COLUMNS] = {};
  // From `time` - PAST on, and from `time` on.
  float x[PAST + STEPS][COLUMNS] = {}, g[STEPS + PAST][COLUMNS] = {};

  DEVICE Strip(const ConvBackward& p, int64_t first, int count)
      : p(p), filters(p.weight, p.bias, p.sizes.width, first, count) {}

  DEVICE void compute_gradient(const Times& together, int time) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      float y[COLUMNS];
      if (p.sizes.silu) filters.apply(y, x, together, s);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (p.sizes.silu) g[s][c] *= silu_slope(y[c]);
        if (time + s >= static_cast<int>(p.sizes.length)) g[s][c] = 0.0f;
      }
    }
  }
  DEVICE void add_weight_gradient(const Times& together) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) bias_gradient[c] += g[s][c];
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filters.used(k) || !together.same(s + k, s + PAST)) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) weight_gradient[c][k] += g[s][c] * x[s + k][c];
      }
    }
  }
  DEVICE void store_x_gradient(const Columns<T>& x_gradient, const Columns<T>& last, const Segments& segments,
                               const Times& together, int time) {
    const int length = static_cast<int>(p.sizes.length);
    const int first_kept = length - static_cast<int>(p.sizes.width) + 1;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (time + s >= length) break;
      float sum[COLUMNS] = {};
      if (last.given && time + s >= first_kept && segments.same(time + s, length - 1))
        last.read(time + s - first_kept).to_floats(sum);
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filters.used(k) || !together.same(PAST + s, PAST + s + PAST - k)) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum[c] += filters.weight[c][k] * g[s + PAST - k][c];
      }
      x_gradient.write(time + s, sum);
    }
  }
  // Makes room for the piece before.
  DEVICE void move_on() {
#pragma unroll
    for (int i = PAST - 1; i >= 0; --i) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        x[STEPS + i][c] = x[i][c];
        g[STEPS + i][c] = g[i][c];
      }
    }
  }

  DEVICE void walk(int64_t batch, int64_t first, int begin) {
    const ConvSizes& sizes = p.sizes;
    const Columns<T> in(p.x, sizes.channels, batch, first), initial(p.initial, sizes.channels, batch, first);
    const Columns<T> out_gradient(p.out_gradient, sizes.channels, batch, first), none{};
    const Columns<T> x_gradient(p.x_gradient, sizes.channels, batch, first);
    const Columns<T> last(p.last_gradient, sizes.channels, batch, first);
    const Segments segments(p.segment, sizes.length, batch);
    const int left = static_cast<int>(sizes.length) - begin;
    const int pieces = smaller((left + STEPS - 1) / STEPS, BACKWARD_STEPS / STEPS + EXTRA);
    int time = begin + (pieces - 1) * STEPS;

    // A piece reads the inputs from PAST before its first time on; the newest come with the piece behind it.
    read_rows<T, PAST>(x, in, initial, sizes, time + STEPS - PAST);
#pragma unroll 1
    for (int piece = pieces - 1; piece >= 0; --piece, time -= STEPS) {
      move_on();
      read_rows<T, STEPS>(x, in, initial, sizes, time - PAST);
      read_rows<T, STEPS>(g, out_gradient, none, sizes, time);
      const Times together(segments, time - PAST);
      compute_gradient(together, time);
      if (piece >= BACKWARD_STEPS / STEPS) continue;
      add_weight_gradient(together);
      store_x_gradient(x_gradient, last, segments, together, time);
    }
    if (p.initial_gradient.data && begin == 0)
      for (int c = 0; c < in.count; ++c) store_initial_gradient<T>(p, segments, batch, first + c);
  }
};

template <class T, int TAPS, bool SEGMENTED>
DEVICE void backward_along_channels(const ConvBackward& p, float* sums) {
  constexpr int STRIPS = THREADS / TEAM, PLACES = TEAM * COLUMNS;
  const int64_t groups = ceil_quotient(p.sizes.channels, PLACES);
  const int64_t split = quotient(block_index(), groups), group = block_index() - split * groups;
  const int64_t pieces = ceil_quotient(p.sizes.length, STRIPS * BACKWARD_STEPS);
  const int64_t batch = quotient(split, pieces);
  const int begin = (static_cast<int>(split - batch * pieces) * STRIPS + team()) * BACKWARD_STEPS;
  const int64_t first = group * PLACES + lane() * COLUMNS;
  const int count = static_cast<int>(smaller<int64_t>(p.sizes.channels - first, COLUMNS));
  const int skip = TAPS - static_cast<int>(p.sizes.width);

  // Over [tap][column][strip][lane].
  const auto sum_of = [&](int k, int c, int strip) -> float& {
    return sums[((k * COLUMNS + c) * STRIPS + strip) * TEAM + lane()];
  };
  if (count > 0) {
    Strip<T, TAPS, SEGMENTED> strip(p, first, count);
    if (begin < p.sizes.length) strip.walk(batch, first, begin);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) sum_of(k, c, team()) = strip.weight_gradient[c][k];
      sum_of(TAPS, c, team()) = strip.bias_gradient[c];
    }
  }
  barrier();
  const int c = team();
  if (c >= count) return;
  const int64_t place = split * p.sizes.channels + first + c;
#pragma unroll 1
  for (int k = skip; k <= TAPS; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) sum += sum_of(k, c, i);
    if (k == TAPS) {
      p.bias_partial[place] = sum;
    } else {
      p.weight_partial[place * p.sizes.width + k - skip] = sum;
    }
  }
}

}  // namespace conv
