// A lane's states in the thread map of the recurrence: decay rates, and access to tensors of states.
// Equation: none, it says which lane has which state.
// Tiling: that of MmaThreadMap in scan_mma.h.
// Alone: pytest recipes/mamba-kernels/tests/test_scan.py -k emulated
#pragma once

#include "scan_mma.h"

// A log2(e) of the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_decay_rates(float (&a)[4], const float* source, const ScanSizes& s, const ChannelTile& tile,
                             const MmaThreadMap& lane, int64_t state_tile) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int channel = lane.channel(e / MmaThreadMap::STATES_EACH);
    const int64_t n = state_tile * STATE_TILE + lane.state() + e % MmaThreadMap::STATES_EACH;
    const bool valid = channel < tile.channels && n < s.states;
    a[e] = valid ? source[(tile.first + channel) * s.states + n] * LOG2_E : 0.0f;
  }
}

// A lane's adjacent states.
DEVICE void load_states(float* h, const float* from) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    load_float2(h, from);
  } else {
    load_float4(h, from);
  }
}
DEVICE void store_states(float* to, const float* h) {
  if constexpr (MmaThreadMap::STATES_EACH == 2) {
    store_float2(to, h[0], h[1]);
  } else {
    store_float4(to, h[0], h[1], h[2], h[3]);
  }
}

// The lane's elements of a tensor (batch, channels, chunks, states).
struct StateAccess {
  int64_t start[MmaThreadMap::CHANNELS_EACH];
  int states;
  bool is_full;

  DEVICE StateAccess(const ScanSizes& s, const ChannelTile& tile, const MmaThreadMap& lane, int64_t state_tile,
                     int64_t chunks) {
    const int64_t n = state_tile * STATE_TILE + lane.state();
    states = n < s.states ? static_cast<int>(s.states - n < 4 ? s.states - n : 4) : 0;
#pragma unroll
    for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c) {
      const int channel = lane.channel(c);
      start[c] = ((tile.batch * s.channels + tile.first + channel) * chunks) * s.states + n;
      if (channel >= tile.channels) start[c] = -1;
    }
    is_full = tile.channels == CHANNELS && s.states % STATE_TILE == 0;
  }
  DEVICE void load(float (&h)[4], const float* from, int64_t offset) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        load_states(h + c * MmaThreadMap::STATES_EACH, from + start[c] + offset);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      h[e] = start[c] >= 0 && j < states ? from[start[c] + offset + j] : 0.0f;
    }
  }
  DEVICE void store(float* to, int64_t offset, const float (&h)[4]) const {
    if (is_full) {
#pragma unroll
      for (int c = 0; c < MmaThreadMap::CHANNELS_EACH; ++c)
        store_states(to + start[c] + offset, h + c * MmaThreadMap::STATES_EACH);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int c = e / MmaThreadMap::STATES_EACH, j = e % MmaThreadMap::STATES_EACH;
      if (start[c] >= 0 && j < states) to[start[c] + offset + j] = h[e];
    }
  }
};
