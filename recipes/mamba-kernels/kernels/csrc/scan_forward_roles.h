// What threads of the scan's forward pass do: elementwise work, loading B and C, the recurrence of a state tile.
// Equation: out_t = (y_t + D u_t) silu(z_t).
// Tiling: a thread has eight adjacent items of a chunk, or four states of the recurrence.
#pragma once

#include "scan_forward_steps.h"

// The elementwise work on a thread's items of every chunk.
template <class T, bool NO_MMA, bool ALONG_TIME>
struct ForwardElementwise {
  const ForwardBlock& block;
  const ThreadItems<ALONG_TIME> items;
  // Items of the chunk that is prepared next, and of the chunk that is finished next.
  RawItems<T> u, delta, u_again, z;

  DEVICE ForwardElementwise(const ForwardBlock& block, int index) : block(block), items(index) {}

  DEVICE int valid(int chunk) const {
    return items.valid(block.tile.channels, block.p.sizes.length - int64_t{chunk} * CHUNK);
  }
  template <bool FULL>
  DEVICE void load(RawItems<T>& x, ForwardTensor tensor, const Sequence& from, int chunk) const {
    const T* start = block.s.rows.template items<T, FULL>(tensor, from, chunk, items);
    load_items<T, FULL>(x, start, from, valid(chunk), items);
  }
  DEVICE void fetch(int chunk) {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.is_full(chunk)) {
      load<true>(u, FORWARD_U, p.u, chunk);
      load<true>(delta, FORWARD_DELTA, p.delta, chunk);
    } else {
      load<false>(u, FORWARD_U, p.u, chunk);
      load<false>(delta, FORWARD_DELTA, p.delta, chunk);
    }
  }
  // dt and dt u.
  DEVICE void prepare(int chunk) const {
    if (chunk >= block.end) return;
    ForwardStage& stage = block.s.stage(chunk);
    const bool use_softplus = block.p.sizes.softplus != 0;
    float dt[8], dtu[8], bias[8];
    load_parameter(bias, block.s.bias, items);
    if (block.is_full(chunk)) {
      discretize<T, true>(dt, dtu, delta, u, bias, use_softplus, 8);
    } else {
      discretize<T, false>(dt, dtu, delta, u, bias, use_softplus, valid(chunk));
    }
    store_shared_items(stage.dt, dt, items);
    store_shared_items(stage.dtu, dtu, items);
  }

  DEVICE void fetch_again(int chunk) {
    const ScanForward& p = block.p;
    if (block.is_full(chunk)) {
      load<true>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<true>(z, FORWARD_Z, p.z, chunk);
    } else {
      load<false>(u_again, FORWARD_U, p.u, chunk);
      if (p.z.data) load<false>(z, FORWARD_Z, p.z, chunk);
    }
  }
  // The output, from the contraction over states.
  DEVICE void finish(int chunk) const {
    const ScanForward& p = block.p;
    const float scale = StateContraction<T, NO_MMA, SUM_BOTH_PARTS<T>>::SCALE;
    float y[8], v[8], d[8];
    load_parameter(d, block.s.d, items);
    load_contraction(y, block.s.stage(chunk).y, items);
    u_again.to_floats(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = y[i] * scale + d[i] * v[i];
    if (p.z.data) {
      z.to_floats(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] *= v[i] * sigmoid(v[i]);
    }
    const RowPointers<4>& rows = block.s.rows;
    if (block.is_full(chunk)) {
      // The stand-in of a missing channel is not stored.
      if (ALONG_TIME && items.channel() >= block.tile.channels) return;
      store_items<T, true>(rows.template items<T, true>(FORWARD_OUT, p.out, chunk, items), p.out, 8, y, items);
    } else {
      T* start = rows.template items<T, false>(FORWARD_OUT, p.out, chunk, items);
      store_items<T, false>(start, p.out, valid(chunk), y, items);
    }
  }
};

// A thread's items of B and C, one state tile of a chunk after the other.
template <class T>
struct ProjectionStream {
  const ForwardBlock& block;
  int chunk, state_tile = 0;
  int stage_index = 0;
  ProjectionItems<T> items;
  const T* start;

  DEVICE ProjectionStream(const ForwardBlock& block, int chunk, int index)
      : block(block), chunk(chunk), items(index), start(items.start(block.p.b, block.p.c, block.tile)) {}

  // Loads what store_shared() then writes to the next stage.
  DEVICE void fetch() {
    const ScanForward& p = block.p;
    if (chunk >= block.end) return;
    if (block.vectorized.projections(chunk)) {
      items.template load<true>(start, p.b, p.c, p.sizes, state_tile, chunk);
    } else {
      items.template load<false>(start, p.b, p.c, p.sizes, state_tile, chunk);
    }
    if (++state_tile == block.state_tiles) {
      state_tile = 0;
      ++chunk;
    }
  }
  DEVICE void store_shared() {
    ProjectionStage& stage = block.s.projections[stage_index];
    items.store_shared(stage.b, stage.c);
    stage_index = (stage_index + 1) % STAGES;
  }
};

// A thread's recurrence: states in `h`, or, with several state tiles, in `slots` by the chunk's parity.
template <class T, bool MULTI_TILE, bool NO_MMA, bool SEGMENTED>
struct ForwardRecurrence {
  const ForwardBlock& block;
  const MmaThreadMap lane;
  const StepMasks masks;
  const StateAccess address;
  float* slots;
  float a[4], h[4] = {};
  int stage_index = 0;

  DEVICE ForwardRecurrence(const ForwardBlock& block, float* slots)
      : block(block), masks(lane), address(block.p.sizes, block.tile, lane, 0, chunks()), slots(slots) {
    load_decay_rates(a, block.p.a, block.p.sizes, block.tile, lane, 0);
  }
  // Chunks of the whole sequence.
  DEVICE int64_t chunks() const { return (block.p.sizes.length + CHUNK - 1) / CHUNK; }
  DEVICE float* slot(int state_tile, int chunk) const {
    return slots + ((state_tile * FORWARD_COPIES + (chunk & (FORWARD_COPIES - 1))) * THREADS + thread_index()) * 4;
  }
  DEVICE void run(int chunk, int state_tile) {
    const ScanForward& p = block.p;
    if constexpr (MULTI_TILE) {
      load_decay_rates(a, p.a, p.sizes, block.tile, lane, state_tile);
      load_float4(h, slot(state_tile, chunk));
    }
    if (p.checkpoints) {
      const StateAccess of_state_tile(p.sizes, block.tile, lane, state_tile, chunks());
      (MULTI_TILE ? of_state_tile : address).store(p.checkpoints, chunk * p.sizes.states, h);
    }
    forward_steps<T, NO_MMA, SEGMENTED>(h, a, block.s.stage(chunk), block.s.projections[stage_index], lane, masks,
                                        state_tile > 0);
    stage_index = (stage_index + 1) % STAGES;
    if (!NO_MMA && !is_finite(h[0] + h[1] + h[2] + h[3])) block.s.non_finite[chunk & 1] = 1;
    if constexpr (MULTI_TILE) store_float4(slot(state_tile, chunk + 1), h[0], h[1], h[2], h[3]);
  }
};
