// The convolution backward as training calls it: four taps, no segments, no states, rows that start on 16 bytes and
// are whole vectors of 16 bytes.
// Kernels of their own: unused code costs instruction fetches, and code in one kernel shares its registers.
// Equation: the gradients of conv_backward.h.
// Tiling: 128 threads side by side, 1024 times a step, from the last time to the first.
// Alone: pytest recipes/mamba-kernels/tests/test_conv.py -k emulated
#pragma once

#include "conv_aligned_forward.h"
#include "conv_backward.h"

namespace conv {

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
