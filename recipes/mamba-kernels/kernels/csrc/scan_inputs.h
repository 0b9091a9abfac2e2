// What the recurrence takes, from a chunk's items: dt, dt u, parameters of channels, and where sequences start.
// Equation: dt = softplus(delta + bias).
// Tiling: a thread has eight adjacent items of a chunk.
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_common.h"

// dt and dt u of thread items; zero outside the tensor, where the state then stays as it is.
template <class T, bool FULL>
DEVICE void discretize(float (&dt)[8], float (&dtu)[8], const RawItems<T>& delta, const RawItems<T>& u,
                       const float (&bias)[8], bool use_softplus, int valid) {
  float x[8], v[8];
  delta.to_floats(x);
  u.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] = x[i] + bias[i];
  if (use_softplus) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dt[i] = softplus(dt[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!FULL && i >= valid) dt[i] = 0.0f;
    dtu[i] = FULL || i < valid ? dt[i] * v[i] : 0.0f;
  }
}

// A parameter of each channel, loaded early and stored to shared memory late.
struct ChannelParameter {
  float value = 0.0f;

  DEVICE ChannelParameter(const float* source, const ChannelTile& tile) {
    if (source && thread_index() < tile.channels) value = source[tile.first + thread_index()];
  }
  DEVICE void store_shared(float* to) const {
    if (thread_index() < CHANNELS) to[thread_index()] = value;
  }
};
// The parameter of each of a thread's items.
template <class S>
DEVICE void load_parameter(float (&x)[8], const float* values, S items) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = values[items.channel_of(i)];
}

// For each step of a chunk: 0 where a new sequence starts, else 1.
DEVICE void store_continues(float* continues, const int32_t* segment, const ChannelTile& tile, int64_t length,
                            int64_t chunk, int index = thread_index()) {
  const int64_t t = chunk * CHUNK + index;
  if (index < CHUNK) {
    const int32_t* s = segment + tile.batch * length;
    continues[index] = t > 0 && t < length && s[t] != s[t - 1] ? 0.0f : 1.0f;
  }
}
