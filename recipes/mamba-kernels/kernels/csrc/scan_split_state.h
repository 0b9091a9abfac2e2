// The aggregate of a split: the carry that leaves it when none enters; see scan_splits.h.
// Tiling: a block has a split of a tile of 32 channels and one state tile.
#pragma once

#include "scan_state_vector.h"
#include "scan_common.h"

// dt of thread items; zero outside the tensor, where the carry then stays as it is.
template <class T, bool FULL>
DEVICE void compute_dt(float (&dt)[8], const RawItems<T>& delta, const float (&bias)[8], bool use_softplus, int valid) {
  delta.to_floats(dt);
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] += bias[i];
  if (use_softplus) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dt[i] = softplus(dt[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) dt[i] = FULL || i < valid ? dt[i] : 0.0f;
}

// dy of thread items: the gradient of out through the gate.
template <class T, bool FULL>
DEVICE void apply_gate(float (&dy)[8], const RawItems<T>& gradient, const RawItems<T>& z, bool gated, int valid) {
  gradient.to_floats(dy);
  if (!gated) return;
  float v[8];
  z.to_floats(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) dy[i] = FULL || i < valid ? dy[i] * v[i] * sigmoid(v[i]) : 0.0f;
}

// Items of an input that no other block reads.
template <class T, bool FULL, class S>
DEVICE void load_input(RawItems<T>& x, const T* start, const Sequence& s, int valid, S items) {
  if constexpr (FULL) {
    x.load_no_allocate(start);
  } else {
    load_items<T, false>(x, start, s, valid, items);
  }
}

struct SplitShared {
  // A step's input: this times B forward, times C backward.
  float dt[CHANNELS * ROW], input[CHANNELS * ROW];
  float b[CHUNK * STATE_VECTOR_ROW], c[CHUNK * STATE_VECTOR_ROW];
  float continues[CHUNK], bias[CHANNELS];
  RowPointers<3> rows;
};

// Forward: the inputs are dt u.
template <class T>
struct ForwardSplit {
  using Params = ScanForward;
  static constexpr bool FORWARD = true;
  enum Tensor { DELTA, U };
  RawItems<T> delta, u;

  template <class S>
  DEVICE static void store_row_pointers(const ScanForward& p, SplitShared& s, const ChannelTile& tile, S items) {
    s.rows.template store_shared<T>(DELTA, p.delta, tile, items);
    s.rows.template store_shared<T>(U, p.u, tile, items);
  }
  template <bool FULL, class S>
  DEVICE void load(const ScanForward& p, const SplitShared& s, int64_t chunk, int valid, S items) {
    const T* delta_start = s.rows.template items<T, FULL>(DELTA, p.delta, chunk, items);
    const T* u_start = s.rows.template items<T, FULL>(U, p.u, chunk, items);
    load_items<T, FULL>(delta, delta_start, p.delta, valid, items);
    load_items<T, FULL>(u, u_start, p.u, valid, items);
  }
  template <bool FULL, class S>
  DEVICE void store_shared(const ScanForward& p, SplitShared& s, int valid, S items) const {
    float dt[8], dtu[8], bias[8];
    load_parameter(bias, s.bias, items);
    discretize<T, FULL>(dt, dtu, delta, u, bias, p.sizes.softplus != 0, valid);
    store_shared_items(s.dt, dt, items);
    store_shared_items(s.input, dtu, items);
  }
};

// Backward: the inputs are the gradients dy.
template <class T>
struct BackwardSplit {
  using Params = ScanBackward;
  static constexpr bool FORWARD = false;
  enum Tensor { DELTA, Z, OUT_GRADIENT };
  RawItems<T> delta, gradient, z;

  template <class S>
  DEVICE static void store_row_pointers(const ScanBackward& p, SplitShared& s, const ChannelTile& tile, S items) {
    s.rows.template store_shared<T>(DELTA, p.delta, tile, items);
    s.rows.template store_shared<T>(Z, p.z, tile, items);
    s.rows.template store_shared<T>(OUT_GRADIENT, p.out_gradient, tile, items);
  }
  template <bool FULL, class S>
  DEVICE void load(const ScanBackward& p, const SplitShared& s, int64_t chunk, int valid, S items) {
    const T* delta_start = s.rows.template items<T, FULL>(DELTA, p.delta, chunk, items);
    const T* gradient_start = s.rows.template items<T, FULL>(OUT_GRADIENT, p.out_gradient, chunk, items);
    const T* z_start = s.rows.template items<T, FULL>(Z, p.z, chunk, items);
    load_input<T, FULL>(delta, delta_start, p.delta, valid, items);
    load_input<T, FULL>(gradient, gradient_start, p.out_gradient, valid, items);
    if (p.z.data) load_input<T, FULL>(z, z_start, p.z, valid, items);
  }
  template <bool FULL, class S>
  DEVICE void store_shared(const ScanBackward& p, SplitShared& s, int valid, S items) const {
    float dt[8], dy[8], bias[8];
    load_parameter(bias, s.bias, items);
    compute_dt<T, FULL>(dt, delta, bias, p.sizes.softplus != 0, valid);
    apply_gate<T, FULL>(dy, gradient, z, p.z.data != nullptr, valid);
    store_shared_items(s.dt, dt, items);
    store_shared_items(s.input, dy, items);
  }
};

// Advances the carry over a chunk, from its first step or from its last.
template <bool FORWARD, bool SEGMENTED>
DEVICE void advance_chunk(float (&carry)[4], SplitDecay& split_decay, const float (&a)[4], const SplitShared& s,
                          const VectorThreadMap& lane) {
  const float* rows = FORWARD ? s.b : s.c;
#pragma unroll 2
  for (int offset = 0; offset < CHUNK; offset += VECTOR_STEPS) {
    const int group = FORWARD ? offset : CHUNK - VECTOR_STEPS - offset;
    float dt[VECTOR_STEPS], input[VECTOR_STEPS];
    load_float4(dt, s.dt + lane.channel() * ROW + group);
    load_float4(input, s.input + lane.channel() * ROW + group);
#pragma unroll
    for (int k = 0; k < VECTOR_STEPS; ++k) {
      const int i = FORWARD ? k : VECTOR_STEPS - 1 - k;
      float weight[4];
      load_float4(weight, rows + (group + i) * STATE_VECTOR_ROW + lane.state);
      const bool reset = SEGMENTED && s.continues[group + i] == 0.0f;
      split_decay.total_dt += dt[i];
      if (reset) split_decay.resets = 1.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float enters = input[i] * weight[e], decay = decay_factor(dt[i], a[e]);
        if constexpr (FORWARD) {
          carry[e] = reset ? enters : decay * carry[e] + enters;
        } else {
          carry[e] = reset ? 0.0f : (enters + carry[e]) * decay;
        }
      }
    }
  }
}

// Every split but the one that no split follows. A block has one state tile.
template <class Pass, class T, bool ALONG_TIME, bool SEGMENTED>
DEVICE void split_state(const typename Pass::Params& p) {
  SHARED SplitShared s;
  launch_dependent_grids();
  const ScanSizes& sizes = p.sizes;
  const int64_t followed = p.splits - 1, outermost_index = SplitTile::outermost_index(sizes),
                state_tile = outermost_index / followed;
  const SplitTile split_tile(sizes, p.splits, outermost_index % followed + (Pass::FORWARD ? 0 : 1));
  const ThreadItems<ALONG_TIME> items;
  const VectorThreadMap lane(thread_index());
  Pass::store_row_pointers(p, s, split_tile.tile, items);
  const ChannelParameter bias(p.delta_bias, split_tile.tile);
  barrier();

  const VectorizedChunks vectorized(sizes, p.b, p.c, ALONG_TIME || split_tile.tile.channels == CHANNELS);
  auto valid = [&](int64_t chunk) { return items.valid(split_tile.tile.channels, sizes.length - chunk * CHUNK); };
  Pass inputs;
  ProjectionItems<T> projections;
  const T* projections_start = projections.start(p.b, p.c, split_tile.tile);
  auto fetch = [&](int chunk) {
    if (vectorized.items(chunk)) {
      inputs.template load<true>(p, s, chunk, 8, items);
    } else {
      inputs.template load<false>(p, s, chunk, valid(chunk), items);
    }
    if (vectorized.projections(chunk)) {
      projections.template load<true>(projections_start, p.b, p.c, sizes, state_tile, chunk);
    } else {
      projections.template load<false>(projections_start, p.b, p.c, sizes, state_tile, chunk);
    }
  };
  constexpr int STEP = Pass::FORWARD ? 1 : -1;
  const int first = Pass::FORWARD ? split_tile.begin : split_tile.end - 1,
            last = Pass::FORWARD ? split_tile.end - 1 : split_tile.begin;
  float a[4], carry[4] = {};
  SplitDecay split_decay;
  load_decay_rates(a, p.a, sizes, split_tile.tile, lane, state_tile);
  fetch(first);
  bias.store_shared(s.bias);
  barrier();
  for (int chunk = first;; chunk += STEP) {
    if (vectorized.items(chunk)) {
      inputs.template store_shared<true>(p, s, 8, items);
    } else {
      inputs.template store_shared<false>(p, s, valid(chunk), items);
    }
    store_shared_projections(projections, s.b, s.c);
    if (SEGMENTED) store_continues(s.continues, p.segment, split_tile.tile, sizes.length, chunk);
    barrier();
    if (chunk != last) fetch(chunk + STEP);
    advance_chunk<Pass::FORWARD, SEGMENTED>(carry, split_decay, a, s, lane);
    if (chunk == last) break;
    barrier();
  }
  StateVectorAccess(sizes, split_tile.partial, lane, state_tile).store(p.split_states, carry);
  if (state_tile == 0 && lane.state == 0 && lane.channel() < split_tile.tile.channels) {
    split_decay.write(p.split_decays + SplitDecay::index(sizes, split_tile.partial, 0, lane.channel()));
  }
}
