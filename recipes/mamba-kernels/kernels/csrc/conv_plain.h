// The causal convolution where nothing is special, as in training: times adjacent, rows of whole vectors of eight that
// start on 16 bytes, at most four taps, no segments, no states. Kernels of their own: code that is not run is still
// read, and what shares a kernel shares its registers.
#pragma once

#include "conv_backward.h"
#include "conv_forward.h"

namespace conv {

// A vector of eight of a row's times and the four times before it, of which TAPS - 1 count; all as they are loaded.
template <class T, int TAPS>
struct Inputs {
  static constexpr int BEFORE = 4, PAST = TAPS - 1;
  Words<T, BEFORE> before;
  Words<T, 8> now;

  // Where no times are before, what is read in their place does not count.
  DEVICE void fetch(const T* from, bool later) {
    before = Words<T, BEFORE>::of(load<BEFORE>(later ? from - BEFORE : from));
    now = Words<T, 8>::of(load_eight(from));
  }
  DEVICE void to_floats(float (&x)[PAST + 8], bool later) const {
    float past[BEFORE], present[8];
    before.only_if(later).to_floats(past);
    now.to_floats(present);
#pragma unroll
    for (int i = 0; i < PAST; ++i) x[i] = past[BEFORE - PAST + i];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[PAST + i] = present[i];
  }
};

// The result before silu at the i-th time of a vector.
template <int TAPS>
DEVICE float convolved(const float (&x)[TAPS - 1 + 8], const Filter<TAPS>& filter, int i) {
  float y = filter.bias;
#pragma unroll
  for (int k = 0; k < TAPS; ++k) y += filter.weight[k] * x[i + k];
  return y;
}

template <class T>
DEVICE T* row_of(const Sequence& s, int64_t batch, int64_t channel) {
  return static_cast<T*>(s.data) + batch * s.batch + channel * s.channel;
}

// AHEAD: vectors that a lane loads ahead, and computes before it looks whether there are more.
template <class T, int TAPS, int AHEAD>
DEVICE void forward_plain(const ConvForward& p) {
  constexpr int STEP = TEAM * 8;
  const ConvSizes& sizes = p.sizes;
  const TeamPlace place(p);
  if (place.channel >= sizes.channels) return;

  const T* in = row_of<T>(p.x, place.batch, place.channel);
  T* out = row_of<T>(p.out, place.batch, place.channel);
  const int steps = static_cast<int>(p.steps), length = static_cast<int>(sizes.length);
  const int begin = place.piece * steps, stop = smaller(begin + steps, length);
  Inputs<T, TAPS> loads[AHEAD];
  int time = begin + lane() * 8;
  const T* from = in + time;
  T* to = out + time;
#pragma unroll
  for (int v = 0; v < AHEAD; ++v) {
    if (time + v * STEP < stop) loads[v].fetch(from + v * STEP, v > 0 || time > 0);
  }
  // After the loads, for it waits for its own.
  const bool silu_after = sizes.silu != 0;
  const Filter<TAPS> filter = Filter<TAPS>(p.weight, p.bias, TAPS, place.channel).scaled(silu_after ? SILU_SCALE : 1.0f);
  // Rolled: code for all vectors of a piece takes longer to read than to run.
#pragma unroll 1
  for (; time < stop; time += AHEAD * STEP, from += AHEAD * STEP, to += AHEAD * STEP) {
#pragma unroll
    for (int v = 0; v < AHEAD; ++v) {
      float x[TAPS - 1 + 8], y[8];
      loads[v].to_floats(x, v > 0 || time > 0);
      if (time + (v + AHEAD) * STEP < stop) loads[v].fetch(from + (v + AHEAD) * STEP, true);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = convolved(x, filter, i);
      if (silu_after) {
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = silu(y[i]);
      }
      if (time + v * STEP < stop) store_global(to + v * STEP, Eight<T>::from_floats(y));
    }
  }
}

// A wave's way through the rows of one channel, from the last time to the first.
template <class T, int TAPS>
struct PlainStrand {
  static constexpr int PAST = TAPS - 1, TIMES = BACKWARD_TIMES, AHEAD = DEPTH<T, TAPS, false>;
  struct Loads {
    Inputs<T, TAPS> inputs;
    Words<T, 8> out_gradient;

    DEVICE void fetch(const T* x, const T* gradient, int time) {
      inputs.fetch(x + time, time > 0);
      out_gradient = Words<T, 8>::of(load_eight(gradient + time));
    }
  };

  // Before silu the filter is scaled, as silu wants it, and g divided by the same: their product is not.
  const bool silu_after;
  const float scale;
  const Filter<TAPS> filter;
  float weight_gradient[TAPS] = {}, bias_gradient = 0.0f;
  // g at the first times of the vector that follows the wave's last one; on lane 0.
  float following[PAST];

  DEVICE PlainStrand(const ConvBackward& p, int64_t channel)
      : silu_after(p.sizes.silu != 0),
        scale(silu_after ? SILU_SCALE : 1.0f),
        filter(Filter<TAPS>(p.weight, p.bias, TAPS, channel).scaled(scale)) {}

  // The inputs of a vector, and g past silu; zero beyond the row's end.
  DEVICE void take(float (&x)[PAST + 8], float (&g)[8], const Loads& loads, int time, int length) const {
    loads.inputs.to_floats(x, time > 0);
    loads.out_gradient.to_floats(g);
    if (time < length) return;
#pragma unroll
    for (int i = 0; i < PAST + 8; ++i) x[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = 0.0f;
  }
  DEVICE void through_silu(float (&g)[8], const float (&x)[PAST + 8]) const {
    if (!silu_after) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] *= silu_slope(convolved(x, filter, i), 1.0f / SILU_SCALE);
  }

  // Adds to the sums; returns the gradient of x.
  DEVICE void back(float (&x_gradient)[8], const float (&x)[PAST + 8], const float (&own)[8]) {
    const int lane = thread_index() % WAVE, right = (lane + 1) % WAVE;
    float g[8 + PAST];
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
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x_gradient[i] = filter.weight[PAST] * g[i];
#pragma unroll
      for (int k = 0; k < TAPS; ++k) {
        weight_gradient[k] += g[i] * x[i + k];
        if (k < PAST) x_gradient[i] += filter.weight[k] * g[i + PAST - k];
      }
    }
  }

  // Groups [begin, end) of TIMES of one row.
  DEVICE void walk(const ConvBackward& p, int64_t batch, int64_t channel, int begin, int end) {
    const T* x = row_of<T>(p.x, batch, channel);
    const T* gradient = row_of<T>(p.out_gradient, batch, channel);
    T* out = row_of<T>(p.x_gradient, batch, channel);
    const int length = static_cast<int>(p.sizes.length), last = length - 8;
    const int own = thread_index() % WAVE * 8, first = begin * TIMES, after = end * TIMES;
    Loads loads[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i == 0 || after - (i + 1) * TIMES >= first) loads[i].fetch(x, gradient, smaller(after - (i + 1) * TIMES + own, last));
    }
#pragma unroll
    for (int i = 0; i < PAST; ++i) following[i] = 0.0f;
    if (after < length) {
      Loads next;
      next.fetch(x, gradient, after);
      float inputs[PAST + 8], g[8];
      take(inputs, g, next, after, length);
      through_silu(g, inputs);
#pragma unroll
      for (int i = 0; i < PAST; ++i) following[i] = g[i];
    }
#pragma unroll 1
    for (int group = after - TIMES;; group -= AHEAD * TIMES) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int start = group - i * TIMES, next = start - AHEAD * TIMES;
        if (start < first) return;
        float inputs[PAST + 8], g[8], x_gradient[8];
        take(inputs, g, loads[i], start + own, length);
        if (next >= first) loads[i].fetch(x, gradient, next + own);
        through_silu(g, inputs);
        back(x_gradient, inputs, g);
        if (start + own < length) store_global(out + start + own, Eight<T>::from_floats(x_gradient));
      }
    }
  }
};

template <class T, int TAPS>
DEVICE void backward_plain(const ConvBackward& p, float* sums) {
  using Lane = PlainStrand<T, TAPS>;
  const uint32_t block = static_cast<uint32_t>(block_index()), splits = static_cast<uint32_t>(p.splits);
  const uint32_t channel = splits == 1 ? block : block / splits, split = block - channel * splits;
  const int groups = (static_cast<int>(p.sizes.length) + Lane::TIMES - 1) / Lane::TIMES;
  const WaveShare share(p, groups, split);
  Lane lane(p, channel);
  share.each([&](int64_t batch, int begin, int end) { lane.walk(p, batch, channel, begin, end); });
  store_sums<TAPS>(p, sums, channel, split, 0, [&](int k) {
    return (k < TAPS ? lane.weight_gradient[k] : lane.bias_gradient) * lane.scale;
  });
}

}  // namespace conv
