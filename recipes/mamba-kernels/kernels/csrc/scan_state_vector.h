// The thread map of the backward pass and of the split kernels: a lane holds four adjacent states of one channel, a
// warp the 16 states of a state tile.
//
// With tensor cores the channels of a warp lie along the columns of an mma operand; without, the lanes of a channel are
// adjacent.
// Tiling: a warp has 8 channels (16 of 64 lanes) x 4 lanes x 4 adjacent states.
#pragma once

#include "scan_common.h"
#include "scan_mma.h"

// Steps of one vectorized access to an array over time; the backward sums collect as many.
constexpr int VECTOR_STEPS = 4;

struct VectorThreadMap {
  static constexpr int WARPS = THREADS / WARP_SIZE;
  static constexpr int WARP_CHANNELS = CHANNELS / WARPS;
  int lane, warp, column, warp_channel, state;

  DEVICE explicit VectorThreadMap(int thread) {
    lane = thread % WARP_SIZE;
    warp = thread / WARP_SIZE;
    column = lane % 4;
    warp_channel = HAS_MMA_TF32 ? lane % WARP_CHANNELS : lane / 4;
    state = (HAS_MMA_TF32 ? lane / WARP_CHANNELS : column) * 4;
  }
  // Within the block's tile.
  DEVICE int channel() const { return warp * WARP_CHANNELS + warp_channel; }
};

// B and C of a chunk over [time][state]: the lanes of a warp read few words at once, all of one time.
constexpr int STATE_VECTOR_ROW = STATE_TILE;
template <class T>
DEVICE void store_shared_projections(const ProjectionItems<T>& items, float* b, float* c) {
  float x[8];
  items.value.to_floats(x);
  float* to = (items.is_b() ? b : c) + items.time() * STATE_VECTOR_ROW + items.state();
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i * STATE_VECTOR_ROW] = x[i];
}

DEVICE void add_four(float (&x)[4], const float* from) {
  float y[4];
  load_float4(y, from);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] += y[i];
}

// How many of the lane's four states exist, and whether their access is vectorized.
struct StateVector {
  int valid;
  bool vectorized;

  DEVICE StateVector(const ScanSizes& s, const ChannelTile& tile, const VectorThreadMap& lane, int64_t state_tile) {
    const int64_t left = lane.channel() < tile.channels ? s.states - state_tile * STATE_TILE - lane.state : 0;
    valid = left < 0 ? 0 : left < 4 ? static_cast<int>(left) : 4;
    vectorized = s.states % 4 == 0 && valid == 4;
  }
  DEVICE void load(float (&x)[4], const float* at) const {
    if (vectorized) {
      load_float4(x, at);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = e < valid ? at[e] : 0.0f;
    }
  }
  DEVICE void store(float* at, const float (&x)[4]) const {
    if (vectorized) {
      store_float4(at, x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < valid) at[e] = x[e];
      }
    }
  }
};

// The lane's elements of a tensor (batch, channels, states).
struct StateVectorAccess {
  int64_t start;
  StateVector vector;

  DEVICE StateVectorAccess(const ScanSizes& s, const ChannelTile& tile, const VectorThreadMap& lane, int64_t state_tile)
      : start((tile.batch * s.channels + tile.first + lane.channel()) * s.states + state_tile * STATE_TILE +
              lane.state),
        vector(s, tile, lane, state_tile) {}
  DEVICE void load(float (&x)[4], const float* from) const { vector.load(x, from + start); }
  DEVICE void store(float* to, const float (&x)[4]) const { vector.store(to + start, x); }
};

// A log2(e) of the lane's elements; zero beyond the last state or channel, where h stays zero.
DEVICE void load_decay_rates(float (&a)[4], const float* source, const ScanSizes& s, const ChannelTile& tile,
                             const VectorThreadMap& lane, int64_t state_tile) {
  ChannelTile anywhere = tile;
  anywhere.batch = 0;
  StateVectorAccess(s, anywhere, lane, state_tile).load(a, source);
#pragma unroll
  for (int e = 0; e < 4; ++e) a[e] *= LOG2_E;
}
