// Causal convolution forward, with times adjacent in memory or channels.
#pragma once

#include "conv.h"

namespace conv {

// Times adjacent: a team computes FORWARD_VECTORS vectors of eight times a lane.
constexpr int FORWARD_VECTORS = 4;
constexpr int FORWARD_TIMES = TEAM * 8 * FORWARD_VECTORS;
// Channels adjacent: the steps of a lane.
constexpr int FORWARD_STEPS = 32;

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

template <class T, int TAPS>
struct ForwardRows {
  Row<T> in, initial, out;
  Filter<TAPS> filter;
  Segments segments;
  bool silu_after, vectors;

  DEVICE ForwardRows(const ConvForward& p, int64_t batch, int64_t channel)
      : in(p.x, batch, channel, p.sizes.length),
        initial(p.initial, batch, channel, p.sizes.width - 1),
        out(p.out, batch, channel, p.sizes.length),
        filter(p.weight, p.bias, p.sizes.width, channel),
        segments(p.segment, p.sizes.length, batch),
        silu_after(p.sizes.silu != 0),
        vectors(in.stride == 1 && out.aligned(in.misalignment())) {}

  // Eight times from `time` on, and as many after each `step`; their loads are under way together.
  template <int COUNT, bool SEGMENTED, bool INSIDE>
  DEVICE void compute(int time, int step) const {
    constexpr int PAST = TAPS - 1;
    Vector<T, TAPS> before[COUNT];
    Eight<T> now[COUNT];
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      before[v] = in.template read<TAPS, INSIDE>(time + v * step - TAPS, vectors);
      now[v] = in.template read<8, INSIDE>(time + v * step, vectors);
    }
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      float x[PAST + 8], y[8];
      join(x, before[v], now[v]);
      if (!INSIDE) add_initial(x, initial, time + v * step - PAST);
      convolve<TAPS, SEGMENTED>(y, x, filter, segments, time + v * step);
      if (silu_after) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = silu(y[i]);
      }
      out.template write<INSIDE>(time + v * step, vectors, y);
    }
  }
};

template <class T, int TAPS, bool SEGMENTED>
DEVICE void forward_along_time(const ConvForward& p) {
  const ConvSizes& sizes = p.sizes;
  const int64_t pieces = ceil_quotient(sizes.length + 7, FORWARD_TIMES);
  const int64_t unit = block_index() * (THREADS / TEAM) + team();
  const int64_t row = quotient(unit, pieces), piece = unit - row * pieces;
  const int64_t batch = quotient(row, sizes.channels), channel = row - batch * sizes.channels;
  if (batch >= sizes.batch) return;

  const ForwardRows<T, TAPS> rows(p, batch, channel);
  constexpr int STEP = TEAM * 8, COUNT = SEGMENTED ? 1 : 2;
  const int length = rows.in.length;
  const int first = static_cast<int>(piece) * FORWARD_TIMES - rows.in.misalignment();
  const int last = smaller(first + FORWARD_TIMES, length);
  for (int start = first; start < last;) {
    // The same for all of the team, so that only its first and last vectors pay for edges.
    if (rows.vectors && start >= TAPS && start + COUNT * STEP <= length) {
      rows.template compute<COUNT, SEGMENTED, true>(start + lane() * 8, STEP);
      start += COUNT * STEP;
    } else {
      rows.template compute<1, SEGMENTED, false>(start + lane() * 8, STEP);
      start += STEP;
    }
  }
  if (p.last.data && piece == 0 && lane() == 0) store_last<T>(p, rows.segments, batch, channel);
}

template <class T, int TAPS, bool SEGMENTED>
DEVICE void forward_along_channels(const ConvForward& p) {
  constexpr int PAST = TAPS - 1;
  const ConvSizes& sizes = p.sizes;
  const int64_t groups = ceil_quotient(sizes.channels, COLUMNS);
  const int64_t pieces = ceil_quotient(sizes.length, FORWARD_STEPS);
  const int64_t unit = block_index() * THREADS + thread_index();
  const int64_t rest = quotient(unit, groups), first = (unit - rest * groups) * COLUMNS;
  const int64_t batch = quotient(rest, pieces);
  const int begin = static_cast<int>(rest - batch * pieces) * FORWARD_STEPS;
  if (batch >= sizes.batch) return;

  const Columns<T> in(p.x, sizes.channels, batch, first), out(p.out, sizes.channels, batch, first);
  const Columns<T> initial(p.initial, sizes.channels, batch, first);
  const Segments segments(p.segment, sizes.length, batch);
  const int length = static_cast<int>(sizes.length), end = smaller(begin + FORWARD_STEPS, length);
  const auto input = [&](int time) { return time < length ? in.read(time) : Vector<T, COLUMNS>{}; };
  Vector<T, COLUMNS> next[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) next[s] = input(begin + s);
  const Filters<TAPS> filters(p.weight, p.bias, sizes.width, first, out.count);
  float x[PAST + STEPS][COLUMNS];
  read_rows<T, PAST>(x, in, initial, sizes, begin - PAST);
#pragma unroll 1
  for (int time = begin; time < end; time += STEPS) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      next[s].to_floats(x[PAST + s]);
      if (time + STEPS < end) next[s] = input(time + STEPS + s);
    }
    const Together<PAST + STEPS, SEGMENTED> together(segments, time - PAST);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (time + s >= end) break;
      float y[COLUMNS];
      filters.apply(y, x, together, s);
      if (sizes.silu) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) y[c] = silu(y[c]);
      }
      out.write(time + s, y);
    }
#pragma unroll
    for (int s = 0; s < PAST; ++s)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) x[s][c] = x[STEPS + s][c];
  }
  if (p.last.data && begin == 0)
    for (int c = 0; c < out.count; ++c) store_last<T>(p, segments, batch, first + c);
}

}  // namespace conv
