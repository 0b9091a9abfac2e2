// The causal convolution where nothing is special, as in training: at most four taps, no segments, no states, and either
// times adjacent, in rows that start on 16 bytes and are whole vectors of eight, or backward of 16 bytes, or channels, in
// vectors of four of tokens that start on 16 bytes. Kernels of their own: code that is not run is still read, and what shares
// a kernel shares its registers.
#pragma once

#include "conv_backward_tokens.h"
#include "conv_forward.h"

namespace conv {

// COUNT of a row's times and the four times before them, of which TAPS - 1 count; all as they are loaded.
template <class T, int TAPS, int COUNT = 8>
struct Inputs {
  static constexpr int BEFORE = 4, PAST = TAPS - 1;
  Words<T, BEFORE> before;
  Words<T, COUNT> now;

  // Where no times are before, what is read in their place does not count.
  DEVICE void fetch(const T* from, bool later) {
    before = Words<T, BEFORE>::of(load<BEFORE>(later ? from - BEFORE : from));
    now = Words<T, COUNT>::of(load<COUNT>(from));
  }
  DEVICE void to_floats(float (&x)[PAST + COUNT], bool later) const {
    float past[BEFORE], present[COUNT];
    before.only_if(later).to_floats(past);
    now.to_floats(present);
#pragma unroll
    for (int i = 0; i < PAST; ++i) x[i] = past[BEFORE - PAST + i];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[PAST + i] = present[i];
  }
};

// The result before silu at the i-th time of a vector.
template <int TAPS, int INPUTS>
DEVICE float convolved(const float (&x)[INPUTS], const Filter<TAPS>& filter, int i) {
  float y = filter.bias;
#pragma unroll
  for (int k = 0; k < TAPS; ++k) y += filter.weight[k] * x[i + k];
  return y;
}

template <class T>
DEVICE T* row_of(const Sequence& s, int64_t batch, int64_t channel) {
  return static_cast<T*>(s.data) + batch * s.batch + channel * s.channel;
}

// The filter and what follows it. Made after the first loads, for it waits for its own.
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
    for (int i = 0; i < COUNT; ++i) y[i] = convolved(x, filter, i);
    if (silu_after) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) y[i] = silu<T>(y[i]);
    }
  }
};

// LANES work side by side in a row. AHEAD: vectors that a lane loads ahead, and computes before it looks whether there
// are more.
template <class T, int TAPS, int LANES, int AHEAD>
DEVICE void forward_rows(const ConvForward& p) {
  constexpr int STEP = LANES * 8;
  const ConvSizes& sizes = p.sizes;
  const TeamPlace<LANES> place(p);
  if (place.channel >= sizes.channels) return;

  const T* in = row_of<T>(p.x, place.batch, place.channel);
  T* out = row_of<T>(p.out, place.batch, place.channel);
  const int steps = static_cast<int>(p.steps), length = static_cast<int>(sizes.length);
  const int begin = place.piece * steps, stop = smaller(begin + steps, length);
  Inputs<T, TAPS> loads[AHEAD];
  int time = begin + thread_index() % LANES * 8;
  const T* from = in + time;
  T* to = out + time;
#pragma unroll
  for (int v = 0; v < AHEAD; ++v) {
    if (time + v * STEP < stop) loads[v].fetch(from + v * STEP, v > 0 || time > 0);
  }
  const SiluFilter<T, TAPS> filter(p, place.channel);
  // Rolled: code for all vectors of a piece takes longer to read than to run.
#pragma unroll 1
  for (; time < stop; time += AHEAD * STEP, from += AHEAD * STEP, to += AHEAD * STEP) {
#pragma unroll
    for (int v = 0; v < AHEAD; ++v) {
      float x[TAPS - 1 + 8], y[8];
      loads[v].to_floats(x, v > 0 || time > 0);
      if (time + (v + AHEAD) * STEP < stop) loads[v].fetch(from + (v + AHEAD) * STEP, true);
      filter.apply(y, x);
      if (time + v * STEP < stop) store_global(to + v * STEP, Eight<T>::from_floats(y));
    }
  }
}

// What was fastest on an H200. Where a vector is two accesses, long runs are worth more than loads ahead.
template <class T>
constexpr int PLAIN_LANES = sizeof(T) == 4 ? THREADS : TEAM;
template <class T>
constexpr int PLAIN_AHEAD = sizeof(T) == 4 ? 1 : std::is_same_v<T, bf16> ? 8 : 4;

template <class T, int TAPS>
DEVICE void forward_plain(const ConvForward& p) {
  forward_rows<T, TAPS, PLAIN_LANES<T>, PLAIN_AHEAD<T>>(p);
}
// Of a small tensor a lane has a few times: eight, or of fp32 four, which is 16 bytes. Without a loop there is a fifth less
// code to read.
template <class T>
constexpr int FEW_TIMES = sizeof(T) == 4 ? 4 : 8;

template <class T, int TAPS>
DEVICE void forward_small(const ConvForward& p) {
  constexpr int TIMES = FEW_TIMES<T>;
  const ConvSizes& sizes = p.sizes;
  const TeamPlace<TEAM> place(p);
  const int time = (place.piece * TEAM + lane()) * TIMES;
  if (place.channel >= sizes.channels || time >= static_cast<int>(sizes.length)) return;

  Inputs<T, TAPS, TIMES> inputs;
  inputs.fetch(row_of<T>(p.x, place.batch, place.channel) + time, time > 0);
  const SiluFilter<T, TAPS> filter(p, place.channel);
  float x[TAPS - 1 + TIMES], y[TIMES];
  inputs.to_floats(x, time > 0);
  filter.apply(y, x);
  store_global(row_of<T>(p.out, place.batch, place.channel) + time, Vector<T, TIMES>::from_floats(y));
}

// The same of rows that may start anywhere: vectors of the output start on 16 bytes, so the first of them before the row. Those
// that are not in it as a whole are written one by one, and read so if the inputs start elsewhere; there are two or three in a row.
template <class T, int TAPS>
DEVICE void forward_ragged(const ConvForward& p) {
  constexpr int TIMES = FEW_TIMES<T>, BEFORE = Inputs<T, TAPS, TIMES>::BEFORE;
  const TeamPlace<TEAM> place(p);
  if (place.channel >= p.sizes.channels) return;
  const Row<T> in(p.x, place.batch, place.channel, p.sizes.length), out(p.out, place.batch, place.channel, p.sizes.length);
  const int shift = out.misalignment(), time = (place.piece * TEAM + lane()) * TIMES - shift;
  if (time >= in.length) return;

  const bool ends = time + TIMES > in.length, whole = time >= BEFORE && !ends && in.misalignment() == shift;
  T* to = out.data + time;
  float x[TAPS - 1 + TIMES], y[TIMES];
  Inputs<T, TAPS, TIMES> inputs;
  if (whole) inputs.fetch(in.data + time, true);
  const SiluFilter<T, TAPS> filter(p, place.channel);
  if (whole) {
    inputs.to_floats(x, true);
  } else {
#pragma unroll
    for (int i = 0; i < TAPS - 1 + TIMES; ++i) {
      const int t = time - (TAPS - 1) + i;
      x[i] = in.contains(t) ? to_float(in.data[t]) : 0.0f;
    }
  }
  filter.apply(y, x);
  if (time >= 0 && !ends) {
    store_global(to, Vector<T, TIMES>::from_floats(y));
  } else {
#pragma unroll
    for (int i = 0; i < TIMES; ++i)
      if (out.contains(time + i)) to[i] = from_float<T>(y[i]);
  }
}

// A lane's times of FORWARD_COLUMNS channels, from its unit's place among pieces of tokens, fewer than 2^31 in all.
struct TokensPlace {
  uint32_t batch, first;
  int begin;
  bool inside;

  DEVICE explicit TokensPlace(const ConvForward& p) {
    const uint32_t unit = static_cast<uint32_t>(block_index()) * THREADS + thread_index();
    const uint32_t groups = static_cast<uint32_t>(p.sizes.channels) / FORWARD_COLUMNS;
    const uint32_t rest = Reciprocal{p.group_reciprocal}.quotient(unit);
    batch = Reciprocal{p.piece_reciprocal}.quotient(rest);
    first = (unit - rest * groups) * FORWARD_COLUMNS;
    begin = static_cast<int>(rest - batch * static_cast<uint32_t>(p.pieces)) * static_cast<int>(p.steps);
    inside = batch < static_cast<uint32_t>(p.sizes.batch);
  }
};

template <class T, int TAPS>
DEVICE void forward_tokens_plain(const ConvForward& p) {
  const TokensPlace place(p);
  if (!place.inside) return;
  const int end = smaller(place.begin + static_cast<int>(p.steps), static_cast<int>(p.sizes.length));
  forward_columns<T, TAPS, false, true, true>(p, place.batch, place.first, place.begin, end);
}

// Of a small tensor a lane has SMALL_ROWS times, without a loop: code that takes longer to read than to run.
constexpr int SMALL_ROWS = 4;
template <class T, int TAPS>
DEVICE void forward_tokens_small(const ConvForward& p) {
  constexpr int PAST = TAPS - 1, COLUMNS = FORWARD_COLUMNS;
  const TokensPlace place(p);
  if (!place.inside) return;
  const int length = static_cast<int>(p.sizes.length);
  const Columns<T, COLUMNS> in(p.x, p.sizes.channels, place.batch, place.first);
  const Columns<T, COLUMNS> out(p.out, p.sizes.channels, place.batch, place.first);
  Words<T, COLUMNS> rows[PAST + SMALL_ROWS];
  load_rows<true>(rows, in, place.begin - PAST, length);
  const bool silu_after = p.sizes.silu != 0;
  const auto filters =
      Filters<TAPS, COLUMNS>(p.weight, p.bias, TAPS, place.first, COLUMNS).scaled(silu_after ? SILU_SCALE<T> : 1.0f);
  float x[PAST + SMALL_ROWS][COLUMNS];
#pragma unroll
  for (int i = 0; i < PAST + SMALL_ROWS; ++i) rows[i].only_if(i >= PAST || place.begin + i >= PAST).to_floats(x[i]);
  const Together<PAST + SMALL_ROWS, false> together(Segments(nullptr, length, 0), 0);
#pragma unroll
  for (int s = 0; s < SMALL_ROWS; ++s) {
    float y[COLUMNS];
    filters.apply(y, x, together, s);
    if (silu_after) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) y[c] = silu<T>(y[c]);
    }
    if (place.begin + s < length) out.template write<true>(place.begin + s, y);
  }
}

// What a block computes at once of a row: its waves work side by side, since memory is fastest in long runs.
constexpr int PLAIN_TIMES = THREADS * 8, PLAIN_WAVES = THREADS / WAVE;

// A lane's vectors in the rows of one channel, from the last time of the last row to the first of the first.
struct WayBack {
  int left, time;
  const int row_times;

  // Goes on by a step of the block; returns whether that is to another row.
  DEVICE bool next() {
    --left;
    time -= PLAIN_TIMES;
    if (time >= 0) return false;
    time += row_times;
    return true;
  }
};

// Rows are whole accesses of 16 bytes, so many times each.
template <class T>
constexpr int ACCESS_TIMES = 16 / sizeof(T);

// Eight times; of fp32 the last four from `second` times on behind the first.
template <class T>
DEVICE Words<T, 8> load_accesses(const T* from, int second) {
  if constexpr (ACCESS_TIMES<T> == 8) return Words<T, 8>::of(load_eight(from));
  const Vector<T, 4> first = load<4>(from), last = load<4>(from + second);
  Words<T, 8> y;
  __builtin_memcpy(y.word, &first, sizeof(first));
  __builtin_memcpy(y.word + 4, &last, sizeof(last));
  return y;
}

// What a step needs, as it is loaded. The times before a lane's are the last of its left neighbour's; the four before the
// wave's are one address for all of its lanes.
template <class T, int TAPS>
struct BackwardInputs {
  static constexpr int BEFORE = 4, PAST = TAPS - 1;
  Words<T, BEFORE> before;
  Words<T, 8> now, out_gradient;

  DEVICE void fetch(const T* x_before, const T* x, const T* gradient, int second) {
    before = Words<T, BEFORE>::of(load<BEFORE>(x_before));
    now = load_accesses(x, second);
    out_gradient = load_accesses(gradient, second);
  }
  // `later`: whether there are times before the wave's.
  DEVICE void to_floats(float (&x)[PAST + 8], float (&g)[8], bool later) const {
    const int lane = thread_index() % WAVE;
    float past[BEFORE], present[8];
    before.only_if(later).to_floats(past);
    now.to_floats(present);
    out_gradient.to_floats(g);
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      const float left = shuffle(present[8 - PAST + i], (lane + WAVE - 1) % WAVE);
      x[i] = lane == 0 ? past[BEFORE - PAST + i] : left;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[PAST + i] = present[i];
  }
};

template <class T, int TAPS, int COUNT>
DEVICE void through_silu(float (&g)[COUNT], const float (&x)[TAPS - 1 + COUNT], const Filter<TAPS>& filter) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) g[i] *= silu_slope<T>(convolved(x, filter, i), 1.0f / SILU_SCALE<T>);
}

// What waves tell those to their left: g at the first times of their vectors. Of a step, of the one before it, and of the
// one after it, which a wave may be in before others have read.
struct Edges {
  float g[3][PLAIN_WAVES][4];
};

// Eight times of every lane, those before `length`. Eight of fp32 are two accesses, and each would be half of every sector
// of 32 bytes that it touches; where the compiler lets time pass between them, half sectors are what memory writes, which
// cost a seventh of all time. So pairs of lanes swap halves, and write the even lane's eight, then the odd one's.
template <class T>
DEVICE void store_times(T* row, int time, int length, const float (&y)[8]) {
  if constexpr (sizeof(T) == 4) {
    const bool odd = thread_index() % 2;
    float of_even[4], of_odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float swapped = shuffle_xor<1>(odd ? y[i] : y[4 + i]);
      of_even[i] = odd ? swapped : y[i];
      of_odd[i] = odd ? y[4 + i] : swapped;
    }
    const int first = odd ? time - 4 : time;
    if (first < length) store_global(row + first, Vector<T, 4>::from_floats(of_even));
    if (first + 8 < length) store_global(row + first + 8, Vector<T, 4>::from_floats(of_odd));
  } else {
    if (time < length) store_global(row + time, Eight<T>::from_floats(y));
  }
}

// A block's share of the steps of all rows of a channel.
struct PlainShare {
  uint32_t channel, split;
  // Steps of a row; steps of the share; the row that its last step is in, and the time after that.
  int steps, left, batch, after;

  DEVICE explicit PlainShare(const ConvBackward& p)
      : steps((static_cast<int>(p.sizes.length) + PLAIN_TIMES - 1) / PLAIN_TIMES) {
    const uint32_t block = static_cast<uint32_t>(block_index()), splits = static_cast<uint32_t>(p.splits);
    const uint32_t all = static_cast<uint32_t>(p.sizes.batch) * steps, each = splits == 1 ? all : (all + splits - 1) / splits;
    channel = splits == 1 ? block : block / splits;
    split = block - channel * splits;
    const int begin = static_cast<int>(split * each), end = static_cast<int>(smaller(begin + each, all));
    left = end - begin;
    batch = splits == 1 ? static_cast<int>(p.sizes.batch) - 1 : (end - 1) / steps;
    after = (end - batch * steps) * PLAIN_TIMES;
  }
};

// SIMPLE: silu follows, and rows are whole steps.
template <class T, int TAPS, bool SIMPLE>
DEVICE void backward_plain(const ConvBackward& p, float* sums, Edges& edges) {
  constexpr int PAST = TAPS - 1, AHEAD = DEPTH<T, TAPS, false>;
  const int lane = thread_index() % WAVE, wave = thread_index() / WAVE, length = static_cast<int>(p.sizes.length);
  const PlainShare share(p);
  const T* x = row_of<T>(p.x, share.batch, share.channel);
  const T* gradient = row_of<T>(p.out_gradient, share.batch, share.channel);
  T* out = row_of<T>(p.x_gradient, share.batch, share.channel);

  WayBack at{share.left, share.after - PLAIN_TIMES + thread_index() * 8, share.steps * PLAIN_TIMES}, loading = at;
  BackwardInputs<T, TAPS> loads[AHEAD];
  const auto fetch = [&](BackwardInputs<T, TAPS>& to) {
    if (loading.left <= 0) return;
    const auto in_row = [&](int time) { return SIMPLE ? time : smaller(time, length - ACCESS_TIMES<T>); };
    const int time = in_row(loading.time), before = in_row(larger(loading.time - lane * 8 - 4, 0));
    to.fetch(x + before, x + time, gradient + time, in_row(loading.time + 4) - time);
    if (!loading.next()) return;
    x -= p.x.batch;
    gradient -= p.out_gradient.batch;
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) fetch(loads[i]);

  // After the loads, for it waits for its own. Before silu the filter is scaled, as silu wants it, and g divided by the
  // same: their product is not.
  const bool silu = SIMPLE || p.sizes.silu;
  const float scale = silu ? SILU_SCALE<T> : 1.0f;
  const Filter<TAPS> filter = Filter<TAPS>(p.weight, p.bias, TAPS, share.channel).scaled(scale);
  if (thread_index() == 0) {
    float g[4] = {};
    if (share.left > 0 && share.after < length) {
      float inputs[PAST + 4];
      Inputs<T, TAPS, 4> following;
      following.fetch(row_of<T>(p.x, share.batch, share.channel) + share.after, true);
      following.to_floats(inputs, true);
      load<4>(row_of<T>(p.out_gradient, share.batch, share.channel) + share.after).to_floats(g);
      if (silu) through_silu<T>(g, inputs, filter);
    }
#pragma unroll
    for (int i = 0; i < PAST; ++i) edges.g[2][0][i] = g[i];
  }

  Gradients<TAPS> gradients;
  int now = 0;
  // Returns whether there are more.
  const auto step = [&](BackwardInputs<T, TAPS>& loaded) {
    float inputs[PAST + 8], own[8], g[8 + PAST], x_gradient[8];
    loaded.to_floats(inputs, own, at.time >= WAVE * 8);
    if (silu) through_silu<T>(own, inputs, filter);
    // Beyond the row's end is nothing, not even the product of nothing with an infinite input.
    const auto inside = [&](int i) { return SIMPLE || at.time + i / ACCESS_TIMES<T> * ACCESS_TIMES<T> < length; };
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = inside(i) ? own[i] : 0.0f;
    // Not before silu, which takes 5 % more time.
    fetch(loaded);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < PAST; ++i) edges.g[now][wave][i] = g[i];
    }
    barrier();
    const bool last = wave == PLAIN_WAVES - 1, row_ends = last && at.time + 8 >= at.row_times;
    const float* right = last ? edges.g[now == 0 ? 2 : now - 1][0] : edges.g[now][wave + 1];
    now = now == 2 ? 0 : now + 1;
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      const float neighbour = shuffle(g[i], (lane + 1) % WAVE);
      g[8 + i] = lane < WAVE - 1 ? neighbour : row_ends ? 0.0f : right[i];
    }
    gradients.bias += sum_of_eight(g);
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      float terms = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (inside(i)) terms += g[i] * inputs[i + k];
      gradients.weight[k] += terms;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x_gradient[i] = filter.weight[PAST] * g[i];
#pragma unroll
      for (int k = 0; k < PAST; ++k) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
    }
    store_times(out, at.time, SIMPLE ? at.row_times : length, x_gradient);
    if (at.next()) out -= p.x_gradient.batch;
    return at.left > 0;
  };
  // Not a loop over `loads`: where the compiler does not unroll it, they go to memory.
  if (share.left > 0) {
    while (step(loads[0]) && (AHEAD == 1 || step(loads[AHEAD - 1]))) {
    }
  }
  store_sums<TAPS, PLAIN_WAVES>(p, sums, share.channel, share.split, 0, [&](int k) {
    return (k < TAPS ? gradients.weight[k] : gradients.bias) * scale;
  });
}

}  // namespace conv
