// Causal convolution forward, with times adjacent in memory or channels.
#pragma once

#include "conv.h"

namespace conv {

// Times adjacent: the most vectors of eight times that a lane computes, and how many are loaded ahead. More of
// them make the preparation small, fewer loads ahead leave registers for more waves.
constexpr int FORWARD_VECTORS = 8;
constexpr int FORWARD_AHEAD = 3;
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

template <class T, int TAPS, bool SEGMENTED, int VECTORS>
struct ForwardRow {
  static constexpr int PAST = TAPS - 1, STEP = TEAM * 8;
  static constexpr int AHEAD = VECTORS < FORWARD_AHEAD ? VECTORS : FORWARD_AHEAD;

  const Row<T> in, out;
  const Segments segments;
  const bool silu_after;
  // Vectors start this much before a multiple of eight times.
  const int shift, start;
  const bool vectors;
  // Those from the first to the last of these times, and the times before them, lie in the row.
  const int first_whole, last_whole;
  Words<T, TAPS> before[VECTORS];
  Words<T, 8> now[VECTORS];

  DEVICE ForwardRow(const ConvForward& p, int64_t batch, int64_t channel, int piece)
      : in(p.x, batch, channel, p.sizes.length),
        out(p.out, batch, channel, p.sizes.length),
        segments(p.segment, p.sizes.length, batch),
        silu_after(p.sizes.silu != 0),
        shift(in.misalignment()),
        start(piece * static_cast<int>(p.steps) - shift),
        vectors(in.stride == 1 && out.aligned(shift)),
        first_whole(p.initial.data || shift ? (TAPS + shift + 7) / 8 * 8 - shift : 0),
        last_whole(vectors ? last_vector(static_cast<int>(p.steps)) : -1) {}

  // Negative where there are too few to repeat.
  DEVICE int last_vector(int steps) const {
    const int last = smaller((in.length + shift) / 8 * 8 - 8 - shift, start + steps - 8);
    return last < larger(first_whole, TAPS) ? -1 : last;
  }
  DEVICE bool whole(int time) const { return time >= first_whole && time <= last_whole; }

  // Vector v of those from `time` on, one after each STEP. Loads also where there is no whole one, and repeats
  // another then, because what is loaded under a condition is waited for.
  DEVICE void load_whole(int v, int time) {
    const int t = smaller(v > 0 ? time + v * STEP : larger(time, first_whole), last_whole);
    before[v] = in.template load_vector<TAPS>(v > 0 ? t - TAPS : larger(t - TAPS, 0));
    now[v] = in.template load_vector<8>(t);
  }
  DEVICE void load_first(int time) {
#pragma unroll
    for (int v = 0; v < AHEAD; ++v) load_whole(v, time);
  }
  template <bool EXACT>
  DEVICE void compute(float (&y)[8], const float (&x)[PAST + 8], const Filter<TAPS>& filter, int time) const {
    convolve<TAPS, SEGMENTED, EXACT>(y, x, filter, segments, time);
    if (silu_after) {
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = silu(y[i]);
    }
  }
  template <bool EXACT>
  DEVICE void compute_whole(const Filter<TAPS>& filter, int time) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int t = time + v * STEP;
      if (v + AHEAD < VECTORS) load_whole(v + AHEAD, time);
      if (!whole(t)) continue;
      float x[PAST + 8], y[8];
      join(x, v > 0 ? before[v] : before[v].only_if(t > 0), now[v]);
      compute<EXACT>(y, x, filter, t);
      out.store_vector(t, y);
    }
  }
  // The others from `time` on and before `stop`.
  DEVICE void compute_edges(const Filter<TAPS>& filter, const Row<T>& initial, int time, int stop) const {
#pragma unroll 1
    for (; time < stop; time += STEP) {
      if (whole(time)) continue;
      float x[PAST + 8], y[8];
      join(x, in.template read<TAPS>(time - TAPS, vectors), in.template read<8>(time, vectors));
      add_initial(x, initial, time - PAST);
      compute<false>(y, x, filter, time);
      out.write(time, vectors, y);
    }
  }
};

template <class T, int TAPS, bool SEGMENTED, int VECTORS>
DEVICE void forward_along_time(const ConvForward& p) {
  const ConvSizes& sizes = p.sizes;
  // Blocks fit 32 bits. The teams of one have neighbouring channels.
  const uint32_t block = static_cast<uint32_t>(block_index()), pieces = static_cast<uint32_t>(p.pieces);
  const uint32_t groups = static_cast<uint32_t>((sizes.channels + TEAMS - 1) / TEAMS);
  const uint32_t rest = block / pieces, piece = block - rest * pieces;
  const uint32_t batch = rest / groups, group = rest - batch * groups;
  const int64_t channel = static_cast<int64_t>(group) * TEAMS + team();
  if (channel >= sizes.channels) return;

  using Row = ForwardRow<T, TAPS, SEGMENTED, VECTORS>;
  Row row(p, batch, channel, static_cast<int>(piece));
  const int length = row.in.length, time = row.start + lane() * 8;
  const bool any = row.last_whole >= 0;
  if (any) row.load_first(time);
  // After the loads, for it waits for its own.
  const Filter<TAPS> filter =
      Filter<TAPS>(p.weight, p.bias, sizes.width, channel).scaled(row.silu_after ? SILU_SCALE : 1.0f);
  if (any) {
    choose(filter.skip == 0, [&](auto exact) {
      row.template compute_whole<exact>(filter, time);
#pragma unroll 1
      for (int t = time + Row::STEP; VECTORS == 1 && t <= row.last_whole; t += Row::STEP) {
        row.load_first(t);
        row.template compute_whole<exact>(filter, t);
      }
    });
  }
  if (!any || row.shift != 0 || length % 8 != 0 || p.initial.data) {
    // The last piece has also what a shift pushes beyond it.
    const int stop = piece + 1 == pieces ? length : row.start + static_cast<int>(p.steps);
    row.compute_edges(filter, conv::Row<T>(p.initial, batch, channel, sizes.width - 1), time, stop);
  }
  if (p.last.data && piece == 0 && lane() == 0) store_last<T>(p, row.segments, batch, channel);
}

// Times [begin, end) of FORWARD_COLUMNS channels.
template <class T, int TAPS, bool SEGMENTED, bool VECTORS>
DEVICE void forward_columns(const ConvForward& p, int64_t batch, int64_t first, int begin, int end) {
  constexpr int PAST = TAPS - 1, ROWS = FORWARD_ROWS, COLUMNS = FORWARD_COLUMNS;
  using Columns = Columns<T, COLUMNS>;
  const ConvSizes& sizes = p.sizes;
  const int length = static_cast<int>(sizes.length);
  const Columns in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  const Columns initial(p.initial, sizes.channels, batch, first);
  const Segments segments(p.segment, sizes.length, batch);
  Words<T, COLUMNS> past[PAST], rows[ROWS];
  load_rows<VECTORS>(past, in, begin - PAST, length);
  load_rows<VECTORS>(rows, in, begin, length);
  const bool silu_after = sizes.silu != 0;
  const auto filters = Filters<TAPS, COLUMNS>(p.weight, p.bias, sizes.width, first, in.count)
                           .scaled(silu_after ? SILU_SCALE : 1.0f);
  mask_rows<VECTORS>(past, initial, p.initial.data ? static_cast<int>(sizes.width) - 1 : 0, begin - PAST, length);
  float x[PAST + ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < PAST; ++i) past[i].to_floats(x[i]);
#pragma unroll 1
  for (int time = begin; time < end; time += ROWS) {
#pragma unroll
    for (int s = 0; s < ROWS; ++s) rows[s].to_floats(x[PAST + s]);
    load_rows<VECTORS>(rows, in, time + ROWS, length);
    const Together<PAST + ROWS, SEGMENTED> together(segments, time - PAST);
#pragma unroll
    for (int s = 0; s < ROWS; ++s) {
      float y[COLUMNS];
      filters.apply(y, x, together, s);
      if (silu_after) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) y[c] = silu(y[c]);
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
    forward_columns<T, TAPS, SEGMENTED, vectors>(p, batch, first, begin, end);
  });
  if (p.last.data && begin == 0)
    for (int c = 0; c < out.count; ++c)
      store_last<T>(p, Segments(p.segment, sizes.length, batch), batch, first + c);
}

}  // namespace conv
