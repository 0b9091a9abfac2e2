// The convolution forward as training calls it: four taps, no segments, no states, and aligned rows. Channel-first,
// rows start on 16 bytes and are whole vectors of eight elements; token-major, tokens start on 16 bytes and channels
// are whole vectors of four. Also for small tensors.
// Kernels of their own: unused code costs instruction fetches, and code in one kernel shares its registers.
// Equation: out[t] = silu(bias + sum over k of weight[k] x[t - width + 1 + k]).
// Tiling: 32 lanes on a piece of a row (fp32 128), eight times a lane; token-major a lane has four channels for some
//   steps.
#pragma once

#include "conv_forward.h"

namespace conv {

constexpr int ALIGNED_TAPS = 4;

// COUNT times of a row and the four times before them, of which TAPS - 1 count; all as loaded.
template <class T, int TAPS, int COUNT = 8>
struct Inputs {
  static constexpr int BEFORE = 4, PAST = TAPS - 1;
  RawVector<T, BEFORE> before;
  RawVector<T, COUNT> now;

  // At the start of a row the previous times are read from it and not used.
  DEVICE void fetch(const T* from, bool later) {
    before = RawVector<T, BEFORE>::of(load<BEFORE>(later ? from - BEFORE : from));
    now = RawVector<T, COUNT>::of(load<COUNT>(from));
  }
  DEVICE void to_floats(float (&x)[PAST + COUNT], bool later) const {
    float past[BEFORE], present[COUNT];
    before.zero_unless(later).to_floats(past);
    now.to_floats(present);
#pragma unroll
    for (int i = 0; i < PAST; ++i) x[i] = past[BEFORE - PAST + i];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[PAST + i] = present[i];
  }
};

// The result before silu at time i of a vector.
template <int TAPS, int INPUTS>
DEVICE float convolve_at(const float (&x)[INPUTS], const Filter<TAPS>& filter, int i) {
  float y = filter.bias;
#pragma unroll
  for (int k = 0; k < TAPS; ++k) y += filter.weight[k] * x[i + k];
  return y;
}

template <class T>
DEVICE T* row_of(const Sequence& s, int64_t batch, int64_t channel) {
  return static_cast<T*>(s.data) + batch * s.batch + channel * s.channel;
}

// The filter and its silu. Constructed after the first loads are issued, because it waits for its own.
template <class T, int TAPS>
struct SiluFilter {
  const bool silu_after;
  const Filter<TAPS> filter;

  DEVICE SiluFilter(const ConvForward& p, int64_t channel)
      : silu_after(p.sizes.silu != 0),
        filter(Filter<TAPS>(p.weight, p.bias, TAPS, channel).scaled(silu_after ? SILU_SCALE<T> : 1.0f)) {}
  template <int COUNT>
  DEVICE void apply(float (&y)[COUNT], const float (&x)[TAPS - 1 + COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) y[i] = convolve_at(x, filter, i);
    if (silu_after) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) y[i] = silu<T>(y[i]);
    }
  }
};

// LANES work on a row. PREFETCH: the vectors that a lane loads ahead, and computes before it tests for the row's end.
template <class T, int TAPS, int LANES, int PREFETCH>
DEVICE void forward_rows(const ConvForward& p) {
  constexpr int STEP = LANES * 8;
  const ConvSizes& sizes = p.sizes;
  const RowTile<LANES> tile(p);
  if (tile.channel >= sizes.channels) return;

  const T* in = row_of<T>(p.x, tile.batch, tile.channel);
  T* out = row_of<T>(p.out, tile.batch, tile.channel);
  const int steps = static_cast<int>(p.steps), length = static_cast<int>(sizes.length);
  const int begin = tile.piece * steps, stop = minimum(begin + steps, length);
  Inputs<T, TAPS> loads[PREFETCH];
  int time = begin + thread_index() % LANES * 8;
  const T* from = in + time;
  T* to = out + time;
#pragma unroll
  for (int v = 0; v < PREFETCH; ++v) {
    if (time + v * STEP < stop) loads[v].fetch(from + v * STEP, v > 0 || time > 0);
  }
  const SiluFilter<T, TAPS> filter(p, tile.channel);
  // Not unrolled: code for all vectors of a piece takes longer to fetch than to run.
#pragma unroll 1
  for (; time < stop; time += PREFETCH * STEP, from += PREFETCH * STEP, to += PREFETCH * STEP) {
#pragma unroll
    for (int v = 0; v < PREFETCH; ++v) {
      float x[TAPS - 1 + 8], y[8];
      loads[v].to_floats(x, v > 0 || time > 0);
      if (time + (v + PREFETCH) * STEP < stop) loads[v].fetch(from + (v + PREFETCH) * STEP, true);
      filter.apply(y, x);
      if (time + v * STEP < stop) store_global(to + v * STEP, Vector8<T>::from_floats(y));
    }
  }
}

// The fastest on an H200. Where a vector takes two accesses, long contiguous runs are worth more than prefetching.
template <class T>
constexpr int ALIGNED_LANES = sizeof(T) == 4 ? THREADS : LOGICAL_WARP;
template <class T>
constexpr int ALIGNED_PREFETCH = sizeof(T) == 4            ? 1
                                 : std::is_same_v<T, bf16> ? 8
                                                           : 4;

template <class T, int TAPS>
DEVICE void forward_aligned(const ConvForward& p) {
  forward_rows<T, TAPS, ALIGNED_LANES<T>, ALIGNED_PREFETCH<T>>(p);
}
// Times of a lane in a small tensor: eight, or four of fp32, which are 16 bytes. Without the loop there is a fifth less
// code to fetch.
template <class T>
constexpr int SMALL_TIMES = sizeof(T) == 4 ? 4 : 8;

template <class T, int TAPS>
DEVICE void forward_small(const ConvForward& p) {
  constexpr int TIMES = SMALL_TIMES<T>;
  const ConvSizes& sizes = p.sizes;
  const RowTile<LOGICAL_WARP> tile(p);
  const int time = (tile.piece * LOGICAL_WARP + lane()) * TIMES;
  if (tile.channel >= sizes.channels || time >= static_cast<int>(sizes.length)) return;

  Inputs<T, TAPS, TIMES> inputs;
  inputs.fetch(row_of<T>(p.x, tile.batch, tile.channel) + time, time > 0);
  const SiluFilter<T, TAPS> filter(p, tile.channel);
  float x[TAPS - 1 + TIMES], y[TIMES];
  inputs.to_floats(x, time > 0);
  filter.apply(y, x);
  store_global(row_of<T>(p.out, tile.batch, tile.channel) + time, Vector<T, TIMES>::from_floats(y));
}

// A lane's times of FORWARD_COLUMNS channels, from its index among pieces of tokens, fewer than 2^31 in all.
struct TokenTile {
  uint32_t batch, first;
  int begin;
  bool inside;

  DEVICE explicit TokenTile(const ConvForward& p) {
    const uint32_t unit = static_cast<uint32_t>(block_index()) * THREADS + thread_index();
    const uint32_t groups = static_cast<uint32_t>(p.sizes.channels) / FORWARD_COLUMNS;
    const uint32_t rest = FastDivisor{p.group_reciprocal}.divide(unit);
    batch = FastDivisor{p.piece_reciprocal}.divide(rest);
    first = (unit - rest * groups) * FORWARD_COLUMNS;
    begin = static_cast<int>(rest - batch * static_cast<uint32_t>(p.pieces)) * static_cast<int>(p.steps);
    inside = batch < static_cast<uint32_t>(p.sizes.batch);
  }
};

template <class T, int TAPS>
DEVICE void forward_token_major_aligned(const ConvForward& p) {
  const TokenTile tile(p);
  if (!tile.inside) return;
  const int end = minimum(tile.begin + static_cast<int>(p.steps), static_cast<int>(p.sizes.length));
  forward_columns<T, TAPS, false, true, true>(p, tile.batch, tile.first, tile.begin, end);
}

// In a small tensor a lane has SMALL_ROWS times and no loop, whose code would take longer to fetch than to run.
constexpr int SMALL_ROWS = 4;
template <class T, int TAPS>
DEVICE void forward_token_major_small(const ConvForward& p) {
  constexpr int PAST = TAPS - 1, COLUMNS = FORWARD_COLUMNS;
  const TokenTile tile(p);
  if (!tile.inside) return;
  const int length = static_cast<int>(p.sizes.length);
  const Columns<T, COLUMNS> in(p.x, p.sizes.channels, tile.batch, tile.first);
  const Columns<T, COLUMNS> out(p.out, p.sizes.channels, tile.batch, tile.first);
  RawVector<T, COLUMNS> rows[PAST + SMALL_ROWS];
  load_rows<true>(rows, in, tile.begin - PAST, length);
  const bool silu_after = p.sizes.silu != 0;
  const auto filters =
      Filters<TAPS, COLUMNS>(p.weight, p.bias, TAPS, tile.first, COLUMNS).scaled(silu_after ? SILU_SCALE<T> : 1.0f);
  float x[PAST + SMALL_ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < PAST + SMALL_ROWS; ++i) rows[i].zero_unless(i >= PAST || tile.begin + i >= PAST).to_floats(x[i]);
  const SameSegment<PAST + SMALL_ROWS, false> same_segment(Segments(nullptr, length, 0), 0);
#pragma unroll
  for (int s = 0; s < SMALL_ROWS; ++s) {
    float y[COLUMNS];
    filters.apply(y, x, same_segment, s);
    if (silu_after) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) y[c] = silu<T>(y[c]);
    }
    if (tile.begin + s < length) out.template write<true>(tile.begin + s, y);
  }
}

}  // namespace conv
