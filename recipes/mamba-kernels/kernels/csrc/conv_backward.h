// Causal convolution backward. The result before silu is computed again; its gradient g = out_gradient
// silu'(result) yields x_gradient[t] = sum over j of weight[width - 1 - j] g[t + j] and the gradients of weight
// and bias, which blocks sum over their share of all times and sequences of a channel.
#pragma once

#include "conv.h"

namespace conv {

// Times adjacent: what a wave computes at once.
constexpr int BACKWARD_TIMES = WAVE * 8;
constexpr int WAVES = THREADS / WAVE;

// Shared memory for sums, in floats.
template <int TAPS>
constexpr int TIME_SUMS = WAVES * (TAPS + 1);

template <int mask = 1>
DEVICE float wave_sum(float x) {
  if constexpr (mask < WAVE) return wave_sum<2 * mask>(x + shuffle_xor<mask>(x));
  return x;
}

// g at one time, from memory.
template <class T>
DEVICE float gradient_at(const ConvBackward& p, const Segments& segments, int64_t batch, int64_t channel,
                         int time) {
  const int width = static_cast<int>(p.sizes.width);
  const Row<T> x(p.x, batch, channel, p.sizes.length), initial(p.initial, batch, channel, width - 1);
  const Row<T> out_gradient(p.out_gradient, batch, channel, p.sizes.length);
  const float g = to_float(out_gradient[time]);
  if (!p.sizes.silu) return g;
  float y = p.bias ? p.bias[channel] : 0.0f;
#pragma unroll 1
  for (int k = 0; k < width; ++k) {
    const int from = time - (width - 1) + k;
    if (segments.same(from, time)) y += p.weight[channel * width + k] * to_float(input_at(x, initial, from));
  }
  return g * silu_slope(y);
}

// The gradient of the initial state: what x_gradient is at negative times.
template <class T>
DEVICE void store_initial_gradient(const ConvBackward& p, const Segments& segments, int64_t batch,
                                   int64_t channel) {
  const int width = static_cast<int>(p.sizes.width), length = static_cast<int>(p.sizes.length);
  const int history = width - 1;
  const Row<T> gradient(p.initial_gradient, batch, channel, history);
  const Row<T> last(p.last_gradient, batch, channel, history);
#pragma unroll 1
  for (int j = 0; j < history; ++j) {
    float sum = 0.0f;
#pragma unroll 1
    for (int time = 0; time <= j && time < length; ++time) {
      if (!segments.same(time, 0)) break;
      sum += p.weight[channel * width + j - time] * gradient_at<T>(p, segments, batch, channel, time);
    }
    if (last.given && j >= length && segments.same(0, length - 1)) sum += to_float(last[j - length]);
    gradient[j] = from_float<T>(sum);
  }
}

// A lane's times of one channel, and what it adds to the gradients of weight and bias.
template <class T, int TAPS, bool SEGMENTED>
struct Strand {
  static constexpr int PAST = TAPS - 1;

  struct Loads {
    Vector<T, TAPS> before;
    Eight<T> now, out_gradient;
  };
  struct Rows {
    Row<T> x, initial, out_gradient, x_gradient, last_gradient;
    Segments segments;
    int shift;
    bool vectors;

    DEVICE Rows(const ConvBackward& p, int64_t batch, int64_t channel)
        : x(p.x, batch, channel, p.sizes.length),
          initial(p.initial, batch, channel, p.sizes.width - 1),
          out_gradient(p.out_gradient, batch, channel, p.sizes.length),
          x_gradient(p.x_gradient, batch, channel, p.sizes.length),
          last_gradient(p.last_gradient, batch, channel, p.sizes.width - 1),
          segments(p.segment, p.sizes.length, batch),
          shift(x.misalignment()),
          vectors(x.stride == 1 && out_gradient.aligned(shift) && x_gradient.aligned(shift)) {}

    DEVICE int start(int group) const { return group * BACKWARD_TIMES - shift; }
    // The same for all of a wave: nothing of the group, nor of what lies before it, is at an edge.
    DEVICE bool inside(int group) const {
      const int kept = last_gradient.given ? TAPS : 0;
      return vectors && start(group) >= TAPS && start(group) + BACKWARD_TIMES + kept <= x.length;
    }
    template <bool INSIDE>
    DEVICE void load(Loads& loads, int time) const {
      loads.before = x.template read<TAPS, INSIDE>(time - TAPS, vectors);
      loads.now = x.template read<8, INSIDE>(time, vectors);
      loads.out_gradient = out_gradient.template read<8, INSIDE>(time, vectors);
    }
    DEVICE void load(Loads& loads, int time, bool inside) const {
      inside ? load<true>(loads, time) : load<false>(loads, time);
    }
  };

  const Filter<TAPS> filter;
  const bool silu_after;
  float weight_gradient[TAPS] = {}, bias_gradient = 0.0f;
  // g at the first times of the vector that follows the wave's last one; on lane 0.
  float following[PAST];

  DEVICE Strand(const ConvBackward& p, int64_t channel)
      : filter(p.weight, p.bias, p.sizes.width, channel), silu_after(p.sizes.silu != 0) {}

  // Inputs from time - PAST on, and g from time on.
  template <bool INSIDE>
  DEVICE void compute(float (&x)[PAST + 8], float (&g)[8], const Loads& loads, const Rows& rows,
                      int time) const {
    join(x, loads.before, loads.now);
    if (!INSIDE) add_initial(x, rows.initial, time - PAST);
    loads.out_gradient.to_floats(g);
    if (silu_after) {
      float y[8];
      convolve<TAPS, SEGMENTED>(y, x, filter, rows.segments, time);
#pragma unroll
      for (int i = 0; i < 8; ++i) g[i] *= silu_slope(y[i]);
    }
    // Outside the row, out_gradient is 0, but its product with an infinite slope is not.
    if constexpr (!INSIDE) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!rows.x.contains(time + i)) g[i] = 0.0f;
    }
  }

  // Eight times and, from the lane to the right, the PAST times that follow them.
  template <bool INSIDE>
  DEVICE void step(const Loads& loads, const Rows& rows, int time) {
    float x[PAST + 8], own[8], g[8 + PAST], x_gradient[8] = {};
    compute<INSIDE>(x, own, loads, rows, time);
    const int lane = thread_index() % WAVE, right = (lane + 1) % WAVE;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      g[i] = own[i];
      bias_gradient += own[i];
    }
#pragma unroll
    for (int i = 0; i < PAST; ++i) {
      g[8 + i] = shuffle(lane == 0 ? following[i] : own[i], right);
      following[i] = own[i];
    }
    const Together<PAST + 8 + PAST, SEGMENTED> together(rows.segments, time - PAST);
    with_taps(filter, [&](auto exact) {
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        if (!filter.template used<exact>(k)) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (together.same(PAST + i, 2 * PAST + i - k)) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
          if (together.same(i + k, i + PAST)) weight_gradient[k] += g[i] * x[i + k];
        }
      }
    });
    if (!INSIDE) add_last(x_gradient, rows, time);
    rows.x_gradient.template write<INSIDE>(time, rows.vectors, x_gradient);
  }

  // The last inputs are also the last state.
  DEVICE void add_last(float (&x_gradient)[8], const Rows& rows, int time) const {
    const int length = rows.x.length, kept = length - rows.last_gradient.length;
    if (!rows.last_gradient.given || time + 8 <= kept) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (rows.last_gradient.contains(time + i - kept) && rows.segments.same(time + i, length - 1))
        x_gradient[i] += to_float(rows.last_gradient[time + i - kept]);
  }

  // Groups [begin, end) of BACKWARD_TIMES of one row, from the last to the first.
  DEVICE void walk(const Rows& rows, int begin, int end, int groups) {
    // Registers suffice for one group ahead where those for segments are not needed.
    constexpr bool AHEAD = !SEGMENTED;
    const int lane = thread_index() % WAVE;
    Loads next, loads;
    if (AHEAD) rows.load(next, rows.start(end - 1) + lane * 8, rows.inside(end - 1));
#pragma unroll
    for (int i = 0; i < PAST; ++i) following[i] = 0.0f;
    if (end < groups && lane == 0) {
      float x[PAST + 8], g[8];
      rows.template load<false>(loads, rows.start(end));
      compute<false>(x, g, loads, rows, rows.start(end));
#pragma unroll
      for (int i = 0; i < PAST; ++i) following[i] = g[i];
    }
#pragma unroll 1
    for (int group = end - 1; group >= begin; --group) {
      const int time = rows.start(group) + lane * 8;
      const bool inside = rows.inside(group);
      if (AHEAD) {
        loads = next;
        if (group > begin) rows.load(next, time - BACKWARD_TIMES, rows.inside(group - 1));
      } else {
        rows.load(loads, time, inside);
      }
      inside ? step<true>(loads, rows, time) : step<false>(loads, rows, time);
    }
  }
};

template <class T, int TAPS, bool SEGMENTED>
DEVICE void backward_along_time(const ConvBackward& p, float* sums) {
  const int64_t channel = quotient(block_index(), p.splits), split = block_index() - channel * p.splits;
  const int64_t groups = ceil_quotient(p.sizes.length + 7, BACKWARD_TIMES), all = p.sizes.batch * groups;
  const int wave = thread_index() / WAVE;
  const int64_t pieces = p.splits * WAVES, piece = split * WAVES + wave;
  const int64_t begin = quotient(all * piece, pieces), end = quotient(all * (piece + 1), pieces);

  using Lane = Strand<T, TAPS, SEGMENTED>;
  Lane lane(p, channel);
#pragma unroll 1
  for (int64_t stop = end; stop > begin;) {
    const int64_t batch = quotient(stop - 1, groups), row = batch * groups;
    const int64_t start = row > begin ? row : begin;
    const typename Lane::Rows rows(p, batch, channel);
    lane.walk(rows, static_cast<int>(start - row), static_cast<int>(stop - row), static_cast<int>(groups));
    if (p.initial_gradient.data && start == row && thread_index() % WAVE == 0)
      store_initial_gradient<T>(p, rows.segments, batch, channel);
    stop = start;
  }
#pragma unroll
  for (int k = 0; k <= TAPS; ++k) {
    const float sum = wave_sum(k < TAPS ? lane.weight_gradient[k] : lane.bias_gradient);
    if (thread_index() % WAVE == 0) sums[wave * (TAPS + 1) + k] = sum;
  }
  barrier();
  const int k = thread_index();
  if (k > TAPS || k < lane.filter.skip) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WAVES; ++i) sum += sums[i * (TAPS + 1) + k];
  const int64_t place = split * p.sizes.channels + channel;
  if (k == TAPS) {
    p.bias_partial[place] = sum;
  } else {
    p.weight_partial[place * p.sizes.width + k - lane.filter.skip] = sum;
  }
}

DEVICE void reduce(const ConvReduce& p) {
  const int64_t weights = p.channels * p.width, index = block_index() * THREADS + thread_index();
  if (index >= weights + p.channels) return;
  const bool bias = index >= weights;
  const int64_t place = bias ? index - weights : index, stride = bias ? p.channels : weights;
  const float* partial = bias ? p.bias_partial : p.weight_partial;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t split = 0; split < p.splits; ++split) sum += partial[split * stride + place];
  (bias ? p.bias_gradient : p.weight_gradient)[place] = sum;
}

}  // namespace conv
