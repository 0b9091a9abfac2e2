// Causal convolution backward with channels adjacent in memory: a lane has COLUMNS of them for some steps, and
// the four teams of a block sum what they add to the gradients of weight and bias.
#pragma once

#include "conv_backward.h"

namespace conv {

// Eight bytes: more of fp32 would be more than registers hold.
template <class T>
constexpr int BACKWARD_COLUMNS = 8 / sizeof(T);
// Steps that a lane loads at once; in waves of 64 fewer where registers would not do.
template <class T, int TAPS>
constexpr int BACKWARD_ROWS = WAVE == 64 && sizeof(T) * TAPS > 16 ? 2 : 4;

// Shared memory for sums, in floats.
template <class T, int TAPS>
constexpr int CHANNEL_SUMS = THREADS * BACKWARD_COLUMNS<T> * (TAPS + 1);

// Some neighbouring channels, from the last step to the first. PLAIN: as conv_plain.h says.
template <class T, int TAPS, bool SEGMENTED, bool PLAIN>
struct Strip {
  static constexpr int PAST = TAPS - 1, COLUMNS = BACKWARD_COLUMNS<T>, ROWS = BACKWARD_ROWS<T, TAPS>;
  // Pieces of ROWS beyond the lane's own, of which it needs g alone.
  static constexpr int EXTRA = (PAST + ROWS - 1) / ROWS;
  using Times = Together<PAST + ROWS + PAST, SEGMENTED>;
  using Place = Columns<T, COLUMNS>;

  const ConvBackward& p;
  const int64_t batch, first;
  const int length, history;
  const Place in, initial, out_gradient, x_gradient, last;
  const Segments segments;
  const Filters<TAPS, COLUMNS> filters;
  float weight_gradient[COLUMNS][TAPS] = {}, bias_gradient[COLUMNS] = {};
  // From `time` - PAST on, and from `time` on.
  float x[PAST + ROWS][COLUMNS] = {}, g[ROWS + PAST][COLUMNS] = {};

  DEVICE Strip(const ConvBackward& p, int64_t batch, int64_t first, int count)
      : p(p),
        batch(batch),
        first(first),
        length(static_cast<int>(p.sizes.length)),
        history(PLAIN ? PAST : static_cast<int>(p.sizes.width) - 1),
        in(p.x, p.sizes.channels, batch, first),
        initial(p.initial, p.sizes.channels, batch, first),
        out_gradient(p.out_gradient, p.sizes.channels, batch, first),
        x_gradient(p.x_gradient, p.sizes.channels, batch, first),
        last(p.last_gradient, p.sizes.channels, batch, first),
        segments(p.segment, p.sizes.length, batch),
        filters(p.weight, p.bias, history + 1, first, PLAIN ? COLUMNS : count) {}

  DEVICE bool vectors() const { return in.vectors() && out_gradient.vectors() && x_gradient.vectors(); }

  DEVICE void through_silu(const Filters<TAPS, COLUMNS>& before_silu, const Times& together, int time) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      float z[COLUMNS];
      before_silu.apply(z, x, together, s);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) g[s][c] *= silu_slope<T>(z[c]);
    }
    // Outside, out_gradient is 0, but its product with an infinite slope is not.
    if (time + ROWS <= length) return;
#pragma unroll
    for (int s = 0; s < ROWS; ++s)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        if (time + s >= length) g[s][c] = 0.0f;
  }
  DEVICE void add_weight_gradient(const Times& together) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
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
  // The last inputs are also the last state.
  DEVICE void add_last(float (&sum)[ROWS][COLUMNS], int time) const {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      const int kept = time + s - (length - history);
      if (kept >= 0 && time + s < length && segments.same(time + s, length - 1))
        last.template read<false>(kept).to_floats(sum[s]);
    }
  }
  template <bool VECTORS>
  DEVICE void store_x_gradient(const Times& together, int time) const {
    float sum[ROWS][COLUMNS] = {};
    if (!PLAIN && p.last_gradient.data && time + ROWS > length - history) add_last(sum, time);
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filters.used(k) || !together.same(PAST + s, PAST + s + PAST - k)) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum[s][c] += filters.weight[c][k] * g[s + PAST - k][c];
      }
      if (time + s < length) x_gradient.template write<VECTORS>(time + s, sum[s]);
    }
  }
  // Makes room for the piece before.
  DEVICE void move_on() {
#pragma unroll
    for (int i = PAST - 1; i >= 0; --i) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        x[ROWS + i][c] = x[i][c];
        g[ROWS + i][c] = g[i][c];
      }
    }
  }

  template <bool VECTORS>
  DEVICE void walk(int begin, int steps) {
    const int pieces = smaller((length - begin + ROWS - 1) / ROWS, steps / ROWS + EXTRA);
    const int start = begin + (pieces - 1) * ROWS, known = !PLAIN && p.initial.data ? history : 0;
    // A piece reads the inputs from PAST before its first time on; the newest come with the piece behind it.
    Words<T, COLUMNS> behind[PAST], inputs[ROWS], gradients[ROWS];
    load_rows<VECTORS>(behind, in, start + ROWS - PAST, length);
    load_rows<VECTORS>(inputs, in, start - PAST, length);
    load_rows<VECTORS>(gradients, out_gradient, start, length);
    const Filters<TAPS, COLUMNS> before_silu = filters.scaled(SILU_SCALE<T>);
    mask_rows<VECTORS>(behind, initial, known, start + ROWS - PAST, length);
#pragma unroll
    for (int i = 0; i < PAST; ++i) behind[i].to_floats(x[i]);
#pragma unroll 1
    for (int time = start; time >= begin; time -= ROWS) {
      move_on();
      mask_rows<VECTORS>(inputs, initial, known, time - PAST, length);
      mask_rows<VECTORS>(gradients, initial, 0, time, length);
#pragma unroll
      for (int s = 0; s < ROWS; ++s) {
        inputs[s].to_floats(x[s]);
        gradients[s].to_floats(g[s]);
      }
      // The registers are free.
      load_rows<VECTORS>(inputs, in, time - ROWS - PAST, length);
      load_rows<VECTORS>(gradients, out_gradient, time - ROWS, length);
      const Times together(segments, time - PAST);
      if (p.sizes.silu) through_silu(before_silu, together, time);
      if (time >= begin + steps) continue;
      add_weight_gradient(together);
      store_x_gradient<VECTORS>(together, time);
    }
    if (!PLAIN && p.initial_gradient.data && begin == 0)
      for (int c = 0; c < in.count; ++c) store_initial_gradient<T>(p, segments, batch, first + c);
  }
};

template <class T, int TAPS, bool SEGMENTED, bool PLAIN = false>
DEVICE void backward_along_channels(const ConvBackward& p, float* sums) {
  constexpr int COLUMNS = BACKWARD_COLUMNS<T>, PLACES = TEAM * COLUMNS;
  const int steps = static_cast<int>(p.steps), width = PLAIN ? TAPS : static_cast<int>(p.sizes.width);
  const int64_t groups = ceil_quotient(p.sizes.channels, PLACES);
  const int64_t split = quotient(block_index(), groups), group = block_index() - split * groups;
  const int64_t pieces = ceil_quotient(p.sizes.length, TEAMS * steps);
  const int64_t batch = quotient(split, pieces);
  const int begin = (static_cast<int>(split - batch * pieces) * TEAMS + team()) * steps;
  const int64_t first = group * PLACES + lane() * COLUMNS;
  const int count = static_cast<int>(smaller<int64_t>(p.sizes.channels - first, COLUMNS));
  const int skip = TAPS - width;

  // Over [tap][column][team][lane].
  const auto sum_of = [&](int k, int c, int team) -> float& {
    return sums[((k * COLUMNS + c) * TEAMS + team) * TEAM + lane()];
  };
  if (count > 0) {
    Strip<T, TAPS, SEGMENTED, PLAIN> strip(p, batch, first, count);
    if (begin < p.sizes.length) {
      if constexpr (PLAIN) {
        strip.template walk<true>(begin, steps);
      } else {
        choose(strip.vectors(), [&](auto vectors) { strip.template walk<vectors>(begin, steps); });
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) sum_of(k, c, team()) = strip.weight_gradient[c][k];
      sum_of(TAPS, c, team()) = strip.bias_gradient[c];
    }
  }
  barrier();
  const int c = team();
  if (c >= smaller(count, COLUMNS)) return;
  const int64_t place = split * p.sizes.channels + first + c;
#pragma unroll 1
  for (int k = skip; k <= TAPS; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TEAMS; ++i) sum += sum_of(k, c, i);
    if (k == TAPS) {
      p.bias_partial[place] = sum;
    } else {
      p.weight_partial[place * width + k - skip] = sum;
    }
  }
}

}  // namespace conv
