// A few more steps of the causal convolution from the last inputs that a state keeps, as generation needs.
#pragma once

#include "conv.h"

namespace conv {

// Where the state keeps its inputs: shifted, the newest last; or in a ring, time t at t % length.
struct Ring {
  int length;
  int past;
  bool ring;

  // Place of the input `back` steps before the first new one.
  DEVICE int place(int back) const {
    if (!ring) return length - back;
    const int place = (past - back) % length;
    return place < 0 ? place + length : place;
  }
};

// The state is a window, adjacent in memory: generation keeps one of as many inputs as the filter is wide.
template <class T, int TAPS>
DEVICE bool whole_state(const Row<T>& state, const Ring& ring) {
  const bool aligned = reinterpret_cast<uintptr_t>(state.data) % Vector<T, TAPS>::ALIGNMENT == 0;
  return !ring.ring && ring.length == TAPS && state.stride == 1 && aligned;
}

// The window holds the last inputs; at least one is new.
template <class T, int TAPS>
DEVICE void keep(const Row<T>& state, const Ring& ring, const Row<T>& x, const float (&window)[TAPS]) {
  const int steps = x.length;
  if (ring.ring) {
    for (int t = 0; t < steps; ++t) state[(ring.past + t) % ring.length] = x[t];
  } else if (whole_state<T, TAPS>(state, ring)) {
    store(&state[0], Vector<T, TAPS>::from_floats(window));
  } else if (ring.length <= TAPS) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k)
      if (k >= TAPS - ring.length) state[k - TAPS + ring.length] = from_float<T>(window[k]);
  } else {
    const int stay = ring.length > steps ? ring.length - steps : 0;
    for (int i = 0; i < stay; ++i) state[i] = state[i + steps];
    for (int i = stay; i < ring.length; ++i) state[i] = x[i - ring.length + steps];
  }
}

template <class T, int TAPS>
DEVICE void update(const ConvUpdate& p) {
  const ConvSizes& sizes = p.sizes;
  const int64_t index = block_index() * THREADS + thread_index();
  const int64_t batch = quotient(index, sizes.channels), channel = index - batch * sizes.channels;
  if (batch >= sizes.batch) return;
  const Row<T> x(p.x, batch, channel, sizes.length), out(p.out, batch, channel, sizes.length);
  // Under way before anything that is waited for.
  T next = x[0];
  const Filter<TAPS> filter(p.weight, p.bias, sizes.width, channel);
  const int64_t place = p.state_index ? p.state_index[batch] : batch;
  if (place < 0) {
    for (int t = 0; t < x.length; ++t) out[t] = T{};
    return;
  }
  const Row<T> state(p.state, place, channel, p.state_length);
  const Ring ring{state.length, p.past ? p.past[batch] : 0, p.past != nullptr};

  // The newest input comes in at the end.
  float window[TAPS] = {};
  if (whole_state<T, TAPS>(state, ring)) {
    state.template load_vector<TAPS>(0).to_floats(window);
  } else {
#pragma unroll
    for (int k = 1; k < TAPS; ++k) {
      // Read also where there is none, another's then: what is read under a condition is waited for.
      const float x = to_float(state[ring.place(smaller(TAPS - k, ring.length))]);
      window[k] = TAPS - k <= ring.length ? x : 0.0f;
    }
  }
  for (int t = 0; t < x.length; ++t) {
    const float newest = to_float(next);
    if (t + 1 < x.length) next = x[t + 1];
    float y = filter.bias;
#pragma unroll
    for (int k = 0; k < TAPS; ++k) {
      window[k] = k + 1 < TAPS ? window[k + 1] : newest;
      if (filter.template used<false>(k)) y += filter.weight[k] * window[k];
    }
    out[t] = from_float<T>(sizes.silu ? silu<T>(y * SILU_SCALE<T>) : y);
  }
  keep(state, ring, x, window);
}

}  // namespace conv
