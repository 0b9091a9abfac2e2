// Causal convolution backward, token-major: a lane has COLUMNS channels for some steps, and the four logical warps of a
// block sum their contributions to the gradients of weight and bias.
// Tiling: a lane has 8 bytes of channels for `steps` steps, a block 256 bytes of channels for four times as many.
#pragma once

#include "conv_backward.h"

namespace conv {

// Eight bytes: more of fp32 would not fit the registers.
template <class T>
constexpr int BACKWARD_COLUMNS = 8 / sizeof(T);
// Steps that a lane loads at once; fewer in warps of 64 where registers would not suffice.
template <class T, int TAPS>
constexpr int BACKWARD_ROWS = WARP_SIZE == 64 && sizeof(T) * TAPS > 16 ? 2 : 4;

// Shared memory of the sums, in floats.
template <class T, int TAPS>
constexpr int CHANNEL_SUMS = THREADS * BACKWARD_COLUMNS<T> * (TAPS + 1);

// COLUMNS adjacent channels, from the last step to the first. ALIGNED: see conv_aligned_forward.h.
template <class T, int TAPS, bool SEGMENTED, bool ALIGNED>
struct BackwardColumns {
  static constexpr int PAST = TAPS - 1, COLUMNS = BACKWARD_COLUMNS<T>, ROWS = BACKWARD_ROWS<T, TAPS>;
  // Pieces of ROWS after the lane's own, of which it needs g alone.
  static constexpr int EXTRA = (PAST + ROWS - 1) / ROWS;
  using Times = SameSegment<PAST + ROWS + PAST, SEGMENTED>;
  using Channels = Columns<T, COLUMNS>;

  const ConvBackward& p;
  const int64_t batch, first;
  const int length, history;
  const Channels in, initial, out_gradient, x_gradient, last;
  const Segments segments;
  const Filters<TAPS, COLUMNS> filters;
  float weight_gradient[COLUMNS][TAPS] = {}, bias_gradient[COLUMNS] = {};
  // From `time` - PAST on, and from `time` on.
  float x[PAST + ROWS][COLUMNS] = {}, g[ROWS + PAST][COLUMNS] = {};

  DEVICE BackwardColumns(const ConvBackward& p, int64_t batch, int64_t first, int count)
      : p(p),
        batch(batch),
        first(first),
        length(static_cast<int>(p.sizes.length)),
        history(ALIGNED ? PAST : static_cast<int>(p.sizes.width) - 1),
        in(p.x, p.sizes.channels, batch, first),
        initial(p.initial, p.sizes.channels, batch, first),
        out_gradient(p.out_gradient, p.sizes.channels, batch, first),
        x_gradient(p.x_gradient, p.sizes.channels, batch, first),
        last(p.last_gradient, p.sizes.channels, batch, first),
        segments(p.segment, p.sizes.length, batch),
        filters(p.weight, p.bias, history + 1, first, ALIGNED ? COLUMNS : count) {}

  DEVICE bool vectors() const { return in.vectors() && out_gradient.vectors() && x_gradient.vectors(); }

  DEVICE void apply_silu_derivative(const Filters<TAPS, COLUMNS>& before_silu, const Times& same_segment, int time) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      float z[COLUMNS];
      before_silu.apply(z, x, same_segment, s);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) g[s][c] *= silu_derivative<T>(z[c]);
    }
    // Outside, out_gradient is 0; its product with an infinite derivative would not be.
    if (time + ROWS <= length) return;
#pragma unroll
    for (int s = 0; s < ROWS; ++s)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        if (time + s >= length) g[s][c] = 0.0f;
  }
  DEVICE void add_weight_gradient(const Times& same_segment) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) bias_gradient[c] += g[s][c];
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filters.used(k) || !same_segment.same(s + k, s + PAST)) continue;
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
  DEVICE void store_x_gradient(const Times& same_segment, int time) const {
    float sum[ROWS][COLUMNS] = {};
    if (!ALIGNED && p.last_gradient.data && time + ROWS > length - history) add_last(sum, time);
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filters.used(k) || !same_segment.same(PAST + s, PAST + s + PAST - k)) continue;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) sum[s][c] += filters.weight[c][k] * g[s + PAST - k][c];
      }
      if (time + s < length) x_gradient.template write<VECTORS>(time + s, sum[s]);
    }
  }
  // Shifts the window to the piece before.
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
    const int pieces = minimum((length - begin + ROWS - 1) / ROWS, steps / ROWS + EXTRA);
    const int start = begin + (pieces - 1) * ROWS, known = !ALIGNED && p.initial.data ? history : 0;
    // A piece reads the inputs from PAST before its first time on; its newest inputs come with the piece after it.
    RawVector<T, COLUMNS> behind[PAST], inputs[ROWS], gradients[ROWS];
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
      // Reuses the registers.
      load_rows<VECTORS>(inputs, in, time - ROWS - PAST, length);
      load_rows<VECTORS>(gradients, out_gradient, time - ROWS, length);
      const Times same_segment(segments, time - PAST);
      if (p.sizes.silu) apply_silu_derivative(before_silu, same_segment, time);
      if (time >= begin + steps) continue;
      add_weight_gradient(same_segment);
      store_x_gradient<VECTORS>(same_segment, time);
    }
    if (!ALIGNED && p.initial_gradient.data && begin == 0)
      for (int c = 0; c < in.count; ++c) store_initial_gradient<T>(p, segments, batch, first + c);
  }
};

template <class T, int TAPS, bool SEGMENTED, bool ALIGNED = false>
DEVICE void backward_along_channels(const ConvBackward& p, float* sums) {
  constexpr int COLUMNS = BACKWARD_COLUMNS<T>, TILE_CHANNELS = LOGICAL_WARP * COLUMNS;
  const int steps = static_cast<int>(p.steps), width = ALIGNED ? TAPS : static_cast<int>(p.sizes.width);
  const int64_t groups = ceil_div(p.sizes.channels, TILE_CHANNELS);
  const int64_t split = divide(block_index(), groups), group = block_index() - split * groups;
  const int64_t pieces = ceil_div(p.sizes.length, LOGICAL_WARPS * steps);
  const int64_t batch = divide(split, pieces);
  const int begin = (static_cast<int>(split - batch * pieces) * LOGICAL_WARPS + logical_warp()) * steps;
  const int64_t first = group * TILE_CHANNELS + lane() * COLUMNS;
  const int count = static_cast<int>(minimum<int64_t>(p.sizes.channels - first, COLUMNS));
  const int unused_taps = TAPS - width;

  // Over [tap][column][logical warp][lane].
  const auto strided_sum = [&](int k, int c, int logical_warp) -> float& {
    return sums[((k * COLUMNS + c) * LOGICAL_WARPS + logical_warp) * LOGICAL_WARP + lane()];
  };
  if (count > 0) {
    BackwardColumns<T, TAPS, SEGMENTED, ALIGNED> columns(p, batch, first, count);
    if (begin < p.sizes.length) {
      if constexpr (ALIGNED) {
        columns.template walk<true>(begin, steps);
      } else {
        bool_switch(columns.vectors(), [&](auto vectors) { columns.template walk<vectors>(begin, steps); });
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) strided_sum(k, c, logical_warp()) = columns.weight_gradient[c][k];
      strided_sum(TAPS, c, logical_warp()) = columns.bias_gradient[c];
    }
  }
  barrier();
  const int c = logical_warp();
  if (c >= minimum(count, COLUMNS)) return;
  const int64_t position = split * p.sizes.channels + first + c;
#pragma unroll 1
  for (int k = unused_taps; k <= TAPS; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LOGICAL_WARPS; ++i) sum += strided_sum(k, c, i);
    float* to = k == TAPS ? p.bias_partial + position : p.weight_partial + (position * width + k - unused_taps);
    *global_pointer<float>(reinterpret_cast<uintptr_t>(to)) = sum;
  }
}

}  // namespace conv
