// Causal convolution forward, with times adjacent in memory or channels.
#pragma once

#include "conv.h"

namespace conv {

// Times adjacent: vectors of eight times that a lane loads ahead.
template <class T>
constexpr int FORWARD_AHEAD = 8 / sizeof(T);
// Channels adjacent: what a lane has of them, and the steps that it loads at once.
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

template <class T, int TAPS, bool SEGMENTED, int AHEAD>
struct ForwardRow {
  static constexpr int PAST = TAPS - 1, STEP = TEAM * 8;

  const Row<T> in, out;
  const Segments segments;
  const bool silu_after;
  // Vectors start this much before a multiple of eight times.
  const int shift, start;
  const bool vectors;
  // The team's vectors from the first to before the last of these times, and the times before them, lie in the row.
  const int first_whole, last_whole;

  DEVICE ForwardRow(const ConvForward& p, int64_t batch, int64_t channel, int piece)
      : in(p.x, batch, channel, p.sizes.length),
        out(p.out, batch, channel, p.sizes.length),
        segments(p.segment, p.sizes.length, batch),
        silu_after(p.sizes.silu != 0),
        shift(in.misalignment()),
        start(piece * static_cast<int>(p.steps) - shift),
        vectors(in.stride == 1 && out.aligned(shift)),
        first_whole(piece == 0 && (p.initial.data || shift) ? start + STEP : start),
        last_whole(start + (vectors ? smaller(in.length - start, static_cast<int>(p.steps)) / STEP * STEP : 0)) {}

  template <bool EXACT>
  DEVICE void compute(float (&y)[8], const float (&x)[PAST + 8], const Filter<TAPS>& filter, int time) const {
    convolve<TAPS, SEGMENTED, EXACT>(y, x, filter, segments, time);
    if (silu_after) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = silu<T>(y[i]);
    }
  }
  // The filter is made after the first loads, for it waits for its own.
  template <bool EXACT, class MakeFilter>
  DEVICE void compute_whole(const MakeFilter& make_filter) const {
    Words<T, TAPS> before[AHEAD];
    Words<T, 8> now[AHEAD];
    const auto load = [&](int v, int first) {
      const int time = first + lane() * 8;
      before[v] = in.template load_vector<TAPS>(larger(time - TAPS, 0));
      now[v] = in.template load_vector<8>(time);
    };
#pragma unroll
    for (int v = 0; v < AHEAD; ++v) load(v, smaller(first_whole + v * STEP, last_whole - STEP));
    const Filter<TAPS> filter = make_filter();
    // Rolled: code for all vectors of a piece takes longer to read than to run.
#pragma unroll 1
    for (int first = first_whole; first < last_whole; first += AHEAD * STEP) {
#pragma unroll
      for (int v = 0; v < AHEAD; ++v) {
        const int time = first + v * STEP + lane() * 8;
        float x[PAST + 8], y[8];
        join(x, before[v].only_if(time > 0), now[v]);
        if (first + (v + AHEAD) * STEP < last_whole) load(v, first + (v + AHEAD) * STEP);
        if (first + v * STEP >= last_whole) continue;
        compute<EXACT>(y, x, filter, time);
        out.store_vector(time, y);
      }
    }
  }
  // The others from `time` on and before `stop`.
  DEVICE void compute_edges(const Filter<TAPS>& filter, const Row<T>& initial, int time, int stop) const {
#pragma unroll 1
    for (; time < stop; time += STEP) {
      if (time >= first_whole && time < last_whole) continue;
      float x[PAST + 8], y[8];
      join(x, in.template read<TAPS>(time - TAPS, vectors), in.template read<8>(time, vectors));
      add_initial(x, initial, time - PAST);
      compute<false>(y, x, filter, time);
      out.write(time, vectors, y);
    }
  }
};

// A division by a number that the host knows: a tenth of a small call would go by while it divides.
struct Reciprocal {
  // In the low 32 bits ceil(2^(31 + shift) / divisor), in the high ones `shift`, which is how many bits divisor - 1 has:
  // that makes all quotients of numbers below 2^31 exact.
  uint64_t of_divisor;

  DEVICE uint32_t quotient(uint32_t x) const {
    const uint64_t product = static_cast<uint64_t>(2 * x) * static_cast<uint32_t>(of_divisor);
    return static_cast<uint32_t>(product >> 32) >> static_cast<uint32_t>(of_divisor >> 32);
  }
};

// The piece of a row of LANES threads of a block. Blocks, which fit 31 bits, go through pieces first, then channels, then
// the batch; what works on a row in one block has neighbours that work on neighbouring channels.
template <int LANES>
struct TeamPlace {
  int64_t batch, channel;
  int piece, pieces;

  DEVICE explicit TeamPlace(const ConvForward& p) : pieces(static_cast<int>(p.pieces)) {
    const uint32_t block = static_cast<uint32_t>(block_index());
    constexpr uint32_t ROWS = THREADS / LANES;
    const uint32_t groups = static_cast<uint32_t>(p.sizes.channels + ROWS - 1) / ROWS;
    const uint32_t rest = Reciprocal{p.piece_reciprocal}.quotient(block);
    const uint32_t row = Reciprocal{p.group_reciprocal}.quotient(rest);
    piece = static_cast<int>(block - rest * static_cast<uint32_t>(pieces));
    batch = row;
    channel = static_cast<int64_t>(rest - row * groups) * ROWS + thread_index() / LANES;
  }
};

template <class T, int TAPS, bool SEGMENTED, int AHEAD>
DEVICE void forward_along_time(const ConvForward& p) {
  const ConvSizes& sizes = p.sizes;
  const TeamPlace<TEAM> place(p);
  if (place.channel >= sizes.channels) return;

  using Row = ForwardRow<T, TAPS, SEGMENTED, AHEAD>;
  const Row row(p, place.batch, place.channel, place.piece);
  const auto make_filter = [&] {
    return Filter<TAPS>(p.weight, p.bias, sizes.width, place.channel).scaled(row.silu_after ? SILU_SCALE<T> : 1.0f);
  };
  const bool any = row.first_whole < row.last_whole;
  if (any) choose(sizes.width == TAPS, [&](auto exact) { row.template compute_whole<exact>(make_filter); });
  // The last piece has also what a shift pushes beyond it.
  const int stop = place.piece + 1 == place.pieces ? row.in.length : row.start + static_cast<int>(p.steps);
  if (!any || row.first_whole > row.start || row.last_whole < stop) {
    const conv::Row<T> initial(p.initial, place.batch, place.channel, sizes.width - 1);
    row.compute_edges(make_filter(), initial, row.start + lane() * 8, stop);
  }
  if (p.last.data && place.piece == 0 && lane() == 0) store_last<T>(p, row.segments, place.batch, place.channel);
}

// Times [begin, end) of FORWARD_COLUMNS channels. PLAIN: as conv_plain.h says.
template <class T, int TAPS, bool SEGMENTED, bool VECTORS, bool PLAIN>
DEVICE void forward_columns(const ConvForward& p, int64_t batch, int64_t first, int begin, int end) {
  constexpr int PAST = TAPS - 1, ROWS = FORWARD_ROWS, COLUMNS = FORWARD_COLUMNS;
  using Columns = Columns<T, COLUMNS>;
  const ConvSizes& sizes = p.sizes;
  const int length = static_cast<int>(sizes.length), width = PLAIN ? TAPS : static_cast<int>(sizes.width);
  const Columns in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  const Columns initial(p.initial, sizes.channels, batch, first);
  const Segments segments(p.segment, sizes.length, batch);
  Words<T, COLUMNS> past[PAST], rows[ROWS];
  load_rows<VECTORS>(past, in, begin - PAST, length);
  load_rows<VECTORS>(rows, in, begin, length);
  const bool silu_after = sizes.silu != 0;
  const auto filters = Filters<TAPS, COLUMNS>(p.weight, p.bias, width, first, PLAIN ? COLUMNS : in.count)
                           .scaled(silu_after ? SILU_SCALE<T> : 1.0f);
  mask_rows<VECTORS>(past, initial, !PLAIN && p.initial.data ? width - 1 : 0, begin - PAST, length);
  float x[PAST + ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < PAST; ++i) past[i].to_floats(x[i]);
#pragma unroll 1
  for (int time = begin; time < end; time += ROWS) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) rows[s].to_floats(x[PAST + s]);
    if (time + ROWS < end) load_rows<VECTORS>(rows, in, time + ROWS, length);
    const Together<PAST + ROWS, SEGMENTED> together(segments, time - PAST);
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      float y[COLUMNS];
      filters.apply(y, x, together, s);
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
  const int64_t groups = ceil_quotient(sizes.channels, FORWARD_COLUMNS);
  const int64_t unit = block_index() * THREADS + thread_index();
  const int64_t rest = quotient(unit, groups), first = (unit - rest * groups) * FORWARD_COLUMNS;
  const int64_t batch = quotient(rest, p.pieces);
  if (batch >= sizes.batch) return;
  const int steps = static_cast<int>(p.steps), begin = static_cast<int>(rest - batch * p.pieces) * steps;
  const int end = smaller(begin + steps, static_cast<int>(sizes.length));

  const Columns<T, FORWARD_COLUMNS> in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  choose(in.vectors() && out.vectors(), [&](auto vectors) {
    forward_columns<T, TAPS, SEGMENTED, vectors, false>(p, batch, first, begin, end);
  });
  if (p.last.data && begin == 0)
    for (int c = 0; c < out.count; ++c)
      store_last<T>(p, Segments(p.segment, sizes.length, batch), batch, first + c);
}

}  // namespace conv
