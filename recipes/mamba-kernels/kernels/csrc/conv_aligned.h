// The convolution as training calls it: four taps, no segments, no states, and aligned rows. Channel-first,
// rows start on 16 bytes and are whole vectors of eight elements, backward of 16 bytes; token-major, tokens start on 16
// bytes and channels are whole vectors of four. Kernels of their own: unused code costs instruction fetches, and code
// in one kernel shares its registers.
// Equation: out[t] = silu(bias + sum over k of weight[k] x[t - width + 1 + k]), and its gradients as in
//   conv_backward.h.
// Tiling: forward 32 lanes on a piece of a row (fp32 128), eight times a lane; backward 128 threads side by side, 1024
//   times a step, from the last time to the first; token-major a lane has four channels for some steps.
// Alone: pytest recipes/mamba-kernels/tests/test_conv.py -k emulated
#pragma once

#include "conv_backward_token_major.h"
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

// Small tensors with unaligned rows: the output's vectors are aligned, so the first starts before the row. A vector
// that is not all in the row is written element by element, and so are inputs read where their alignment differs.
template <class T, int TAPS>
DEVICE void forward_unaligned(const ConvForward& p) {
  constexpr int TIMES = SMALL_TIMES<T>, BEFORE = Inputs<T, TAPS, TIMES>::BEFORE;
  const RowTile<LOGICAL_WARP> tile(p);
  if (tile.channel >= p.sizes.channels) return;
  const Row<T> in(p.x, tile.batch, tile.channel, p.sizes.length), out(p.out, tile.batch, tile.channel, p.sizes.length);
  const int shift = out.misalignment(), time = (tile.piece * LOGICAL_WARP + lane()) * TIMES - shift;
  if (time >= in.length) return;

  const bool ends = time + TIMES > in.length, full = time >= BEFORE && !ends && in.misalignment() == shift;
  T* to = out.data + time;
  float x[TAPS - 1 + TIMES], y[TIMES];
  Inputs<T, TAPS, TIMES> inputs;
  if (full) inputs.fetch(in.data + time, true);
  const SiluFilter<T, TAPS> filter(p, tile.channel);
  if (full) {
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

// Times that a block computes at once: its warps work on adjacent parts of a row, because memory is fastest in long
// runs.
constexpr int ALIGNED_TIMES = THREADS * 8, ALIGNED_WARPS = THREADS / WARP_SIZE;

// A lane's position in the rows of one channel, from the last time of the last row to the first of the first.
struct ReverseCursor {
  int left, time;
  const int row_times;

  // Advances by a step of the block; returns whether that is into another row.
  DEVICE bool next() {
    --left;
    time -= ALIGNED_TIMES;
    if (time >= 0) return false;
    time += row_times;
    return true;
  }
};

// Elements of a 16-byte access; rows are whole accesses.
template <class T>
constexpr int ACCESS_TIMES = 16 / sizeof(T);

// Eight times; of fp32 the last four lie `second` times after the first.
template <class T>
DEVICE RawVector<T, 8> load_accesses(const T* from, int second) {
  if constexpr (ACCESS_TIMES<T> == 8) return RawVector<T, 8>::of(load_vector8(from));
  const Vector<T, 4> first = load<4>(from), last = load<4>(from + second);
  RawVector<T, 8> y;
  __builtin_memcpy(y.word, &first, sizeof(first));
  __builtin_memcpy(y.word + 4, &last, sizeof(last));
  return y;
}

// The inputs of a step, as loaded. A lane's previous times are its left neighbour's last; the four before the warp's
// are one address for all lanes.
template <class T, int TAPS>
struct BackwardInputs {
  static constexpr int BEFORE = 4, PAST = TAPS - 1;
  RawVector<T, BEFORE> before;
  RawVector<T, 8> now, out_gradient;

  DEVICE void fetch(const T* x_before, const T* x, const T* gradient, int second) {
    before = RawVector<T, BEFORE>::of(load<BEFORE>(x_before));
    now = load_accesses(x, second);
    out_gradient = load_accesses(gradient, second);
  }
  // `later`: whether the row has times before the warp's.
  DEVICE void to_floats(float (&x)[PAST + 8], float (&g)[8], bool later) const {
    const int lane = thread_index() % WARP_SIZE;
    float past[BEFORE], present[8];
    before.zero_unless(later).to_floats(past);
    now.to_floats(present);
    out_gradient.to_floats(g);
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      const float left = shuffle(present[8 - PAST + i], (lane + WARP_SIZE - 1) % WARP_SIZE);
      x[i] = lane == 0 ? past[BEFORE - PAST + i] : left;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[PAST + i] = present[i];
  }
};

template <class T, int TAPS, int COUNT>
DEVICE void apply_silu_derivative(float (&g)[COUNT], const float (&x)[TAPS - 1 + COUNT], const Filter<TAPS>& filter) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) g[i] *= silu_derivative<T>(convolve_at(x, filter, i), 1.0f / SILU_SCALE<T>);
}

// Halo exchange between warps: g at the first times of a warp's vectors, for the warp to its left. Triple-buffered: a
// warp may be one step ahead of a reader, which needs the step before too.
struct Halo {
  float g[3][ALIGNED_WARPS][4];
};

// Stores eight times of every lane, those before `length`. Eight fp32 are two accesses, each half of the 32-byte
// sectors it touches; where the compiler separates them memory writes half sectors, a seventh of all time. So pairs of
// lanes exchange halves and store the even lane's eight, then the odd lane's.
template <class T>
DEVICE void store_full_sectors(T* row, int time, int length, const float (&y)[8]) {
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
    if (time < length) store_global(row + time, Vector8<T>::from_floats(y));
  }
}

// A block's range of the steps of all rows of a channel.
struct BlockRange {
  uint32_t channel, split;
  // Steps of a row; steps of the range; the row of its last step, and the time after that step.
  int steps, left, batch, after;

  DEVICE explicit BlockRange(const ConvBackward& p)
      : steps((static_cast<int>(p.sizes.length) + ALIGNED_TIMES - 1) / ALIGNED_TIMES) {
    const uint32_t block = static_cast<uint32_t>(block_index()), splits = static_cast<uint32_t>(p.splits);
    const uint32_t all = static_cast<uint32_t>(p.sizes.batch) * steps,
                   each = splits == 1 ? all : (all + splits - 1) / splits;
    channel = splits == 1 ? block : block / splits;
    split = block - channel * splits;
    const int begin = static_cast<int>(split * each), end = static_cast<int>(minimum(begin + each, all));
    left = end - begin;
    batch = splits == 1 ? static_cast<int>(p.sizes.batch) - 1 : (end - 1) / steps;
    after = (end - batch * steps) * ALIGNED_TIMES;
  }
};

// Stores g at the first times of a vector.
template <int PAST, int COUNT>
DEVICE void store_halo(float (&to)[4], const float (&g)[COUNT]) {
#pragma unroll
  for (int i = 0; i < PAST; ++i) to[i] = g[i];
}

// Appends the first times of the lane to the right to g, through `halo` where that is another warp's; `now` is the
// step's buffer, on return the next one's.
template <int PAST>
DEVICE void append_right(float (&g)[8 + PAST], Halo& halo, int& now, const ReverseCursor& at, int lane, int warp) {
  if (lane == 0) store_halo<PAST>(halo.g[now][warp], g);
  barrier();
  const bool last = warp == ALIGNED_WARPS - 1, row_ends = last && at.time + 8 >= at.row_times;
  const float* right = last ? halo.g[now == 0 ? 2 : now - 1][0] : halo.g[now][warp + 1];
  now = now == 2 ? 0 : now + 1;
#pragma unroll
  for (int i = 0; i < PAST; ++i) {
    const float neighbour = shuffle(g[i], (lane + 1) % WARP_SIZE);
    g[8 + i] = lane < WARP_SIZE - 1 ? neighbour : row_ends ? 0.0f : right[i];
  }
}

// Adds a step to the gradients of bias and weight; `inside` says which times the row has.
template <int TAPS, class Inside>
DEVICE void add_step(Gradients<TAPS>& gradients, const float (&g)[7 + TAPS], const float (&inputs)[7 + TAPS],
                     const Inside& inside) {
  gradients.bias += pairwise_sum8(g);
#pragma unroll
  for (int k = 0; k < TAPS; ++k) {
    float terms = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (inside(i)) terms += g[i] * inputs[i + k];
    gradients.weight[k] += terms;
  }
}

template <int TAPS>
DEVICE void gradient_of_x(float (&x_gradient)[8], const float (&g)[7 + TAPS], const Filter<TAPS>& filter) {
  constexpr int PAST = TAPS - 1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x_gradient[i] = filter.weight[PAST] * g[i];
#pragma unroll
    for (int k = 0; k < PAST; ++k) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
  }
}

// Loads the inputs of the cursor's step and advances it, and the rows where that is into another.
template <bool SILU_FULL_STEPS, class T, int TAPS>
DEVICE void fetch_step(BackwardInputs<T, TAPS>& to, ReverseCursor& loading, const T*& x, const T*& gradient,
                       const ConvBackward& p, int length, int lane) {
  if (loading.left <= 0) return;
  const auto in_row = [&](int time) { return SILU_FULL_STEPS ? time : minimum(time, length - ACCESS_TIMES<T>); };
  const int time = in_row(loading.time), before = in_row(maximum(loading.time - lane * 8 - 4, 0));
  to.fetch(x + before, x + time, gradient + time, in_row(loading.time + 4) - time);
  if (!loading.next()) return;
  x -= p.x.batch;
  gradient -= p.out_gradient.batch;
}

// SILU_FULL_STEPS: silu follows, and rows are whole steps.
template <class T, int TAPS, bool SILU_FULL_STEPS>
DEVICE void backward_aligned(const ConvBackward& p, float* sums, Halo& halo) {
  constexpr int PAST = TAPS - 1, PREFETCH = BACKWARD_PREFETCH<T, TAPS, false>, ACCESS = ACCESS_TIMES<T>;
  const int lane = thread_index() % WARP_SIZE, warp = thread_index() / WARP_SIZE;
  const int length = static_cast<int>(p.sizes.length);
  const BlockRange range(p);
  const T* x = row_of<T>(p.x, range.batch, range.channel);
  const T* gradient = row_of<T>(p.out_gradient, range.batch, range.channel);
  T* out = row_of<T>(p.x_gradient, range.batch, range.channel);
  ReverseCursor at{range.left, range.after - ALIGNED_TIMES + thread_index() * 8, range.steps * ALIGNED_TIMES};
  ReverseCursor loading = at;
  BackwardInputs<T, TAPS> loads[PREFETCH];
  const auto fetch = [&](auto& to) { fetch_step<SILU_FULL_STEPS>(to, loading, x, gradient, p, length, lane); };
#pragma unroll
  for (int i = 0; i < PREFETCH; ++i) fetch(loads[i]);

  // Behind the loads, because it waits for its own. Scaled by SILU_SCALE before silu, and g divided by it.
  const bool silu = SILU_FULL_STEPS || p.sizes.silu;
  const float scale = silu ? SILU_SCALE<T> : 1.0f;
  const Filter<TAPS> filter = Filter<TAPS>(p.weight, p.bias, TAPS, range.channel).scaled(scale);
  if (thread_index() == 0) {
    float g[4] = {};
    if (range.left > 0 && range.after < length) {
      float inputs[PAST + 4];
      Inputs<T, TAPS, 4> next_inputs;
      next_inputs.fetch(row_of<T>(p.x, range.batch, range.channel) + range.after, true);
      next_inputs.to_floats(inputs, true);
      load<4>(row_of<T>(p.out_gradient, range.batch, range.channel) + range.after).to_floats(g);
      if (silu) apply_silu_derivative<T>(g, inputs, filter);
    }
    store_halo<PAST>(halo.g[2][0], g);
  }
  Gradients<TAPS> gradients;
  int now = 0;
  // Returns whether there are more steps.
  const auto step = [&](BackwardInputs<T, TAPS>& loaded) {
    float inputs[PAST + 8], own[8], g[8 + PAST], x_gradient[8];
    loaded.to_floats(inputs, own, at.time >= WARP_SIZE * 8);
    if (silu) apply_silu_derivative<T>(own, inputs, filter);
    // Beyond the row's end g is 0; its product with an infinite input would not be.
    const auto inside = [&](int i) { return SILU_FULL_STEPS || at.time + i / ACCESS * ACCESS < length; };
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = inside(i) ? own[i] : 0.0f;
    // Issued before silu, this takes 5 % more time.
    fetch(loaded);
    append_right<PAST>(g, halo, now, at, lane, warp);
    add_step(gradients, g, inputs, inside);
    gradient_of_x(x_gradient, g, filter);
    store_full_sectors(out, at.time, SILU_FULL_STEPS ? at.row_times : length, x_gradient);
    if (at.next()) out -= p.x_gradient.batch;
    return at.left > 0;
  };
  // Not a loop over `loads`, which would go to local memory where the compiler does not unroll it.
  if (range.left > 0) {
    while (step(loads[0]) && (PREFETCH == 1 || step(loads[PREFETCH - 1]))) {
    }
  }
  store_sums<TAPS, ALIGNED_WARPS>(p, sums, range.channel, range.split, 0,
                                  [&](int k) { return (k < TAPS ? gradients.weight[k] : gradients.bias) * scale; });
}

}  // namespace conv
