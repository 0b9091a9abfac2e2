// Causal convolution, forward: channel-first and token-major.
// Equation: out[t] = silu(bias + sum over k of weight[k] x[t - width + 1 + k]).
// Tiling: channel-first a block has four channels, 32 lanes a piece of a row each, eight times a lane; token-major a
//   lane has four channels for `steps` steps.
#pragma once

#include "conv_common.h"

namespace conv {

// Channel-first: vectors of eight times that a lane loads ahead.
template <class T>
constexpr int FORWARD_PREFETCH = 8 / sizeof(T);
// Token-major: a lane's channels, and the steps that it loads at once.
constexpr int FORWARD_COLUMNS = 4;
constexpr int FORWARD_ROWS = 8;

// The last width - 1 inputs of a channel.
template <class T>
DEVICE void store_last(const ConvForward& p, const Segments& segments, int64_t batch, int64_t channel) {
  const int history = static_cast<int>(p.sizes.width) - 1, length = static_cast<int>(p.sizes.length);
  const Row<T> x(p.x, batch, channel, length), initial(p.initial, batch, channel, history);
  const Row<T> last(p.last, batch, channel, history);
#pragma unroll 1
  for (int j = 0; j < history; ++j) {
    const int time = length - history + j;
    last[j] = segments.same(time, length - 1) ? input_at(x, initial, time) : T{};
  }
}

template <class T, int TAPS, bool SEGMENTED, int PREFETCH>
struct ForwardRow {
  static constexpr int PAST = TAPS - 1, STEP = LOGICAL_WARP * 8;

  const Row<T> in, out;
  const Segments segments;
  const bool silu_after;
  // Vectors start this much before a multiple of eight times.
  const int shift, start;
  const bool vectors;
  // Between these times all vectors of the logical warp, and the times before them, lie in the row.
  const int first_full, last_full;

  DEVICE ForwardRow(const ConvForward& p, int64_t batch, int64_t channel, int piece)
      : in(p.x, batch, channel, p.sizes.length),
        out(p.out, batch, channel, p.sizes.length),
        segments(p.segment, p.sizes.length, batch),
        silu_after(p.sizes.silu != 0),
        shift(in.misalignment()),
        start(piece * static_cast<int>(p.steps) - shift),
        vectors(in.stride == 1 && out.aligned(shift)),
        first_full(piece == 0 && (p.initial.data || shift) ? start + STEP : start),
        last_full(start + (vectors ? minimum(in.length - start, static_cast<int>(p.steps)) / STEP * STEP : 0)) {}

  template <bool EXACT>
  DEVICE void compute(float (&y)[8], const float (&x)[PAST + 8], const Filter<TAPS>& filter, int time) const {
    convolve<TAPS, SEGMENTED, EXACT>(y, x, filter, segments, time);
    if (silu_after) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = silu<T>(y[i]);
    }
  }
  // The filter is constructed after the first loads are issued, because it waits for its own.
  template <bool EXACT, class MakeFilter>
  DEVICE void compute_full(const MakeFilter& make_filter) const {
    RawVector<T, TAPS> before[PREFETCH];
    RawVector<T, 8> now[PREFETCH];
    const auto load = [&](int v, int first) {
      const int time = first + lane() * 8;
      before[v] = in.template load_vector<TAPS>(maximum(time - TAPS, 0));
      now[v] = in.template load_vector<8>(time);
    };
#pragma unroll
    for (int v = 0; v < PREFETCH; ++v) load(v, minimum(first_full + v * STEP, last_full - STEP));
    const Filter<TAPS> filter = make_filter();
    // Not unrolled: code for all vectors of a piece takes longer to fetch than to run.
#pragma unroll 1
    for (int first = first_full; first < last_full; first += PREFETCH * STEP) {
#pragma unroll
      for (int v = 0; v < PREFETCH; ++v) {
        const int time = first + v * STEP + lane() * 8;
        float x[PAST + 8], y[8];
        concatenate(x, before[v].zero_unless(time > 0), now[v]);
        if (first + (v + PREFETCH) * STEP < last_full) load(v, first + (v + PREFETCH) * STEP);
        if (first + v * STEP >= last_full) continue;
        compute<EXACT>(y, x, filter, time);
        out.store_vector(time, y);
      }
    }
  }
  // The other vectors from `time` on and before `stop`.
  DEVICE void compute_edges(const Filter<TAPS>& filter, const Row<T>& initial, int time, int stop) const {
#pragma unroll 1
    for (; time < stop; time += STEP) {
      if (time >= first_full && time < last_full) continue;
      float x[PAST + 8], y[8];
      concatenate(x, in.template read<TAPS>(time - TAPS, vectors), in.template read<8>(time, vectors));
      add_initial(x, initial, time - PAST);
      compute<false>(y, x, filter, time);
      out.write(time, vectors, y);
    }
  }
};

// Division by a number that the host knows: in a small call a division takes a tenth of the time.
struct FastDivisor {
  // The low 32 bits hold ceil(2^(31 + shift) / divisor), the high bits `shift`, the bit length of divisor - 1: exact
  // for all dividends below 2^31.
  uint64_t of_divisor;

  DEVICE uint32_t divide(uint32_t x) const {
    const uint64_t product = static_cast<uint64_t>(2 * x) * static_cast<uint32_t>(of_divisor);
    return static_cast<uint32_t>(product >> 32) >> static_cast<uint32_t>(of_divisor >> 32);
  }
};

// The piece of a row that LANES threads work on. Block indices, which fit 31 bits, iterate over pieces, then channels,
// then the batch; the rows of a block are adjacent channels.
template <int LANES>
struct RowTile {
  int64_t batch, channel;
  int piece, pieces;

  DEVICE explicit RowTile(const ConvForward& p) : pieces(static_cast<int>(p.pieces)) {
    const uint32_t block = static_cast<uint32_t>(block_index());
    constexpr uint32_t ROWS = THREADS / LANES;
    const uint32_t groups = static_cast<uint32_t>(p.sizes.channels + ROWS - 1) / ROWS;
    const uint32_t rest = FastDivisor{p.piece_reciprocal}.divide(block);
    const uint32_t row = FastDivisor{p.group_reciprocal}.divide(rest);
    piece = static_cast<int>(block - rest * static_cast<uint32_t>(pieces));
    batch = row;
    channel = static_cast<int64_t>(rest - row * groups) * ROWS + thread_index() / LANES;
  }
};

template <class T, int TAPS, bool SEGMENTED, int PREFETCH>
DEVICE void forward_along_time(const ConvForward& p) {
  const ConvSizes& sizes = p.sizes;
  const RowTile<LOGICAL_WARP> tile(p);
  if (tile.channel >= sizes.channels) return;

  using Row = ForwardRow<T, TAPS, SEGMENTED, PREFETCH>;
  const Row row(p, tile.batch, tile.channel, tile.piece);
  const auto make_filter = [&] {
    return Filter<TAPS>(p.weight, p.bias, sizes.width, tile.channel).scaled(row.silu_after ? SILU_SCALE<T> : 1.0f);
  };
  const bool any = row.first_full < row.last_full;
  if (any) bool_switch(sizes.width == TAPS, [&](auto exact) { row.template compute_full<exact>(make_filter); });
  // The last piece includes what a shift pushes beyond it.
  const int stop = tile.piece + 1 == tile.pieces ? row.in.length : row.start + static_cast<int>(p.steps);
  if (!any || row.first_full > row.start || row.last_full < stop) {
    const conv::Row<T> initial(p.initial, tile.batch, tile.channel, sizes.width - 1);
    row.compute_edges(make_filter(), initial, row.start + lane() * 8, stop);
  }
  if (p.last.data && tile.piece == 0 && lane() == 0) store_last<T>(p, row.segments, tile.batch, tile.channel);
}

// Times [begin, end) of FORWARD_COLUMNS channels. ALIGNED: see conv_aligned_forward.h.
template <class T, int TAPS, bool SEGMENTED, bool VECTORS, bool ALIGNED>
DEVICE void forward_columns(const ConvForward& p, int64_t batch, int64_t first, int begin, int end) {
  constexpr int PAST = TAPS - 1, ROWS = FORWARD_ROWS, COLUMNS = FORWARD_COLUMNS;
  using Columns = Columns<T, COLUMNS>;
  const ConvSizes& sizes = p.sizes;
  const int length = static_cast<int>(sizes.length), width = ALIGNED ? TAPS : static_cast<int>(sizes.width);
  const Columns in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  const Columns initial(p.initial, sizes.channels, batch, first);
  const Segments segments(p.segment, sizes.length, batch);
  RawVector<T, COLUMNS> past[PAST], rows[ROWS];
  load_rows<VECTORS>(past, in, begin - PAST, length);
  load_rows<VECTORS>(rows, in, begin, length);
  const bool silu_after = sizes.silu != 0;
  const auto filters = Filters<TAPS, COLUMNS>(p.weight, p.bias, width, first, ALIGNED ? COLUMNS : in.count)
                           .scaled(silu_after ? SILU_SCALE<T> : 1.0f);
  mask_rows<VECTORS>(past, initial, !ALIGNED && p.initial.data ? width - 1 : 0, begin - PAST, length);
  float x[PAST + ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < PAST; ++i) past[i].to_floats(x[i]);
#pragma unroll 1
  for (int time = begin; time < end; time += ROWS) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) rows[s].to_floats(x[PAST + s]);
    if (time + ROWS < end) load_rows<VECTORS>(rows, in, time + ROWS, length);
    const SameSegment<PAST + ROWS, SEGMENTED> same_segment(segments, time - PAST);
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      float y[COLUMNS];
      filters.apply(y, x, same_segment, s);
      if (silu_after) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) y[c] = silu<T>(y[c]);
      }
      if (time + s < end) out.template write<VECTORS>(time + s, y);
    }
#pragma unroll
    for (int s = 0; s < PAST; ++s)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) x[s][c] = x[ROWS + s][c];
  }
}

template <class T, int TAPS, bool SEGMENTED>
DEVICE void forward_along_channels(const ConvForward& p) {
  const ConvSizes& sizes = p.sizes;
  const int64_t groups = ceil_div(sizes.channels, FORWARD_COLUMNS);
  const int64_t unit = block_index() * THREADS + thread_index();
  const int64_t rest = divide(unit, groups), first = (unit - rest * groups) * FORWARD_COLUMNS;
  const int64_t batch = divide(rest, p.pieces);
  if (batch >= sizes.batch) return;
  const int steps = static_cast<int>(p.steps), begin = static_cast<int>(rest - batch * p.pieces) * steps;
  const int end = minimum(begin + steps, static_cast<int>(sizes.length));

  const Columns<T, FORWARD_COLUMNS> in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  bool_switch(in.vectors() && out.vectors(),
              [&](auto vectors) { forward_columns<T, TAPS, SEGMENTED, vectors, false>(p, batch, first, begin, end); });
  if (p.last.data && begin == 0)
    for (int c = 0; c < out.count; ++c) store_last<T>(p, Segments(p.segment, sizes.length, batch), batch, first + c);
}

}  // namespace conv
