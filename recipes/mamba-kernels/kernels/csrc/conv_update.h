// Convolution of a few further steps from a state of the last inputs, for generation.
// Tiling: a thread has a channel of a sequence, for all its further steps.
#pragma once

#include "conv_common.h"

namespace conv {

// The layout of a state: shifted, the newest input last; or circular, time t at t % length.
struct StateBuffer {
  int length;
  int past;
  bool circular;

  // Slot of the input `back` steps before the first new one.
  DEVICE int slot(int back) const {
    if (!circular) return length - back;
    const int slot = (past - back) % length;
    return slot < 0 ? slot + length : slot;
  }
};

// Whether the state is one aligned vector: generation keeps as many inputs as the filter has taps.
template <class T, int TAPS>
DEVICE bool is_vector_state(const Row<T>& state, const StateBuffer& buffer) {
  const bool aligned = reinterpret_cast<uintptr_t>(state.data) % Vector<T, TAPS>::ALIGNMENT == 0;
  return !buffer.circular && buffer.length == TAPS && state.stride == 1 && aligned;
}

// The window holds the last inputs; at least one is new.
template <class T, int TAPS>
DEVICE void store_state(const Row<T>& state, const StateBuffer& buffer, const Row<T>& x, const float (&window)[TAPS]) {
  const int steps = x.length;
  if (buffer.circular) {
    for (int t = 0; t < steps; ++t) state[(buffer.past + t) % buffer.length] = x[t];
  } else if (is_vector_state<T, TAPS>(state, buffer)) {
    store(&state[0], Vector<T, TAPS>::from_floats(window));
  } else if (buffer.length <= TAPS) {
#pragma unroll
    for (int k = 0; k < TAPS; ++k)
      if (k >= TAPS - buffer.length) state[k - TAPS + buffer.length] = from_float<T>(window[k]);
  } else {
    const int stay = buffer.length > steps ? buffer.length - steps : 0;
    for (int i = 0; i < stay; ++i) state[i] = state[i + steps];
    for (int i = stay; i < buffer.length; ++i) state[i] = x[i - buffer.length + steps];
  }
}

template <class T, int TAPS>
DEVICE void update(const ConvUpdate& p) {
  const ConvSizes& sizes = p.sizes;
  const int64_t index = block_index() * THREADS + thread_index();
  const int64_t batch = divide(index, sizes.channels), channel = index - batch * sizes.channels;
  if (batch >= sizes.batch) return;
  const Row<T> x(p.x, batch, channel, sizes.length), out(p.out, batch, channel, sizes.length);
  // Issued before anything that waits.
  T next = x[0];
  const Filter<TAPS> filter(p.weight, p.bias, sizes.width, channel);
  const int64_t slot = p.state_index ? p.state_index[batch] : batch;
  if (slot < 0) {
    for (int t = 0; t < x.length; ++t) out[t] = T{};
    return;
  }
  const Row<T> state(p.state, slot, channel, p.state_length);
  const StateBuffer buffer{state.length, p.past ? p.past[batch] : 0, p.past != nullptr};

  // The newest input enters at the end.
  float window[TAPS] = {};
  if (is_vector_state<T, TAPS>(state, buffer)) {
    state.template load_vector<TAPS>(0).to_floats(window);
  } else {
#pragma unroll
    for (int k = 1; k < TAPS; ++k) {
      // Read also where there is none: the load under a condition would be waited for.
      const float x = to_float(state[buffer.slot(minimum(TAPS - k, buffer.length))]);
      window[k] = TAPS - k <= buffer.length ? x : 0.0f;
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
  store_state(state, buffer, x, window);
}

}  // namespace conv
