// Selective scan, backward. Chunks of 32 steps from last to first; each recomputes its states from the forward pass's
// checkpoint. With g_t = dL/dh_t = C_t dy_t + a_{t+1} g_{t+1}:
//   dB_t = sum over channels of dt u g_t          dC_t = sum over channels of dy_t h_t
//   d(dt u) = sum over states of B_t g_t          d(dt) = u d(dt u) + sum over states of A a_t g_t h_{t-1}
// Every sum has one order: results repeat bit for bit.
// Tiling: a block has 32 channels of one sequence, a warp 8 channels x 4 lanes x 4 states; a chunk's states are
//   computed again eight steps at a time.
// In the order of a chunk: scan_backward_items.h makes what the recurrence takes, scan_backward_steps.h runs it,
//   scan_backward_carry.h keeps what the chunk before needs, scan_backward_items.h makes the gradients of it.
#pragma once

#include "scan_backward_shared.h"
#include "scan_backward_steps.h"
#include "scan_backward_items.h"
#include "scan_prefix.h"

// The state before a chunk is copied without registers; with several state tiles the next copy would come too early.
template <bool MULTI_TILE>
constexpr bool COPIES_STATES = HAS_MMA_TF32 && !MULTI_TILE;

// Loads a state tile of a chunk: items of B and C, the state before it and, with several state tiles, A.
template <class T, bool MULTI_TILE>
DEVICE void load_state_tile(ProjectionItems<T>& projections, float (&a)[4], float (&h)[4], const ScanBackward& p,
                            BackwardShared& s, const ChannelTile& tile, int64_t state_tile, int chunk,
                            int full_chunks) {
  const ScanSizes& sizes = p.sizes;
  const int thread = reload_thread_index();
  const VectorThreadMap lane(thread);
  // As in ProjectionItems.
  const int kind = thread / (THREADS / 2), time = thread / STATE_TILE % 4 * 8;
  const T* row = global_pointer<const T>(s.projection_rows[kind][thread % STATE_TILE]);
  if (chunk < full_chunks) {
    projections.template load<true>(row + time, p.b, p.c, sizes, state_tile, chunk);
  } else {
    projections.template load<false>(row + time * (kind ? p.c.time : p.b.time), p.b, p.c, sizes, state_tile, chunk);
  }
  if (MULTI_TILE) load_decay_rates(a, p.a, sizes, tile, lane, state_tile);
  const float* states = global_pointer<const float>(s.checkpoint_rows[lane.channel()]);
  states += chunk * sizes.states + state_tile * STATE_TILE + lane.state;
  const StateVector access(sizes, tile, lane, state_tile);
  if (COPIES_STATES<MULTI_TILE> && access.vectorized) {
    SavedStates::copy(s, states);
  } else {
    access.load(h, states);
    if constexpr (COPIES_STATES<MULTI_TILE>) SavedStates().store_shared(s, 0, h);
  }
}

DEVICE void copy_states(float (&h)[4], float (&a)[4], const float (&from_h)[4], const float (&from_a)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    h[e] = from_h[e];
    a[e] = from_a[e];
  }
}

// Runs the split's chunks from `chunk` down; returns the first that is not finite. Carries are in the slots, or, with
// one state tile and no tensor cores, in `carry` and `a_gradient`.
template <class T, bool MULTI_TILE, bool ALONG_TIME, bool NO_MMA, bool SEGMENTED>
DEVICE int backward_chunks(const ScanBackward& p, BackwardShared& s, const CarryStorage& slots,
                           const SplitTile& split_tile, const VectorThreadMap& lane, int chunk, float (&carry)[4],
                           float (&a_gradient)[4]) {
  const ScanSizes& sizes = p.sizes;
  const ChannelTile& tile = split_tile.tile;
  const ThreadItems<ALONG_TIME> items;
  const int full_chunks = VectorizedChunks(sizes, p.b, p.c, tile.channels == CHANNELS).both();
  const int64_t state_tiles = MULTI_TILE ? (sizes.states + STATE_TILE - 1) / STATE_TILE : 1;
  auto valid = [&](int chunk) { return items.valid(tile.channels, sizes.length - int64_t(chunk) * CHUNK); };
  float h[4], a[4];
  BackwardInputs<T> inputs;
  ProjectionItems<T> projections;
  auto fetch = [&](int chunk) {
    chunk >= full_chunks ? inputs.fetch_partial(p, s, chunk, valid(chunk), items) : inputs.fetch_full(p, s, chunk, items);
  };
  auto fetch_state_tile = [&](int64_t state_tile, int chunk) {
    load_state_tile<T, MULTI_TILE>(projections, a, h, p, s, tile, state_tile, chunk, full_chunks);
  };
  if (!MULTI_TILE) load_decay_rates(a, p.a, sizes, tile, lane, 0);
  fetch(chunk);
  fetch_state_tile(0, chunk);
  for (; chunk >= split_tile.begin; --chunk) {
    const bool is_full = chunk < full_chunks;
    cp_async_wait();
    if constexpr (STAGES_INPUTS<T>) inputs.load_shared(s.inputs);
    if constexpr (COPIES_STATES<MULTI_TILE>) SavedStates().load_shared(h, s, 0);
    is_full ? store_shared_inputs<T, MULTI_TILE, true>(p, s, 8, inputs, items)
            : store_shared_inputs<T, MULTI_TILE, false>(p, s, valid(chunk), inputs, items);
    if (SEGMENTED) store_continues(s.continues, p.segment, tile, sizes.length, chunk);
    for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
      store_shared_projections(projections, s.b, s.c);
      barrier();
      float h_now[4], a_now[4];
      copy_states(h_now, a_now, h, a);
      if (MULTI_TILE && state_tile + 1 < state_tiles) fetch_state_tile(state_tile + 1, chunk);
      if constexpr (STORES_CARRY<MULTI_TILE>) slots.load(carry, state_tile, CARRY, chunk);
      // One sum of 4096 steps would be off by 1e-6 of itself.
      float of_chunk[4] = {};
      backward_chunk<T, MULTI_TILE, NO_MMA, SEGMENTED>(p, s, lane, state_tile, chunk, h_now, carry, of_chunk, a_now);
      slots.template add_chunk<MULTI_TILE>(carry, a_gradient, of_chunk, state_tile, chunk);
    }
    // Reloaded, because holding them would cost the recurrence 16 registers.
    if constexpr (!STAGES_INPUTS<T>) fetch(chunk);
    BackwardInputs<T> now = inputs;
    if constexpr (STAGES_INPUTS<T>) now.load_shared(s.inputs);
    // Prefetches what the next chunk starts with.
    if (chunk > split_tile.begin) {
      fetch(chunk - 1);
      fetch_state_tile(0, chunk - 1);
    }
    ChannelGradients<ALONG_TIME> terms;
    is_full ? store_gradients<T, true>(p, s, chunk, 8, now, terms, items)
            : store_gradients<T, false>(p, s, chunk, valid(chunk), now, terms, items);
    barrier();
    if (!NO_MMA && s.non_finite) return chunk;
    terms.add_to_totals(s);
  }
  return chunk;
}

template <class T, class S>
DEVICE void store_rows(const ScanBackward& p, RowPointers<7>& rows, const ChannelTile& tile, S items) {
  rows.template store_shared<T>(BACKWARD_U, p.u, tile, items);
  rows.template store_shared<T>(BACKWARD_DELTA, p.delta, tile, items);
  rows.template store_shared<T>(BACKWARD_Z, p.z, tile, items);
  rows.template store_shared<T>(BACKWARD_OUT_GRADIENT, p.out_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_U_GRADIENT, p.u_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_DELTA_GRADIENT, p.delta_gradient, tile, items);
  rows.template store_shared<T>(BACKWARD_Z_GRADIENT, p.z_gradient, tile, items);
}

template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_backward(const ScanBackward& p) {
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(dynamic_shared());
  const ScanSizes& sizes = p.sizes;
  const SplitTile split_tile(sizes, p.splits, SplitTile::outermost_index(sizes));
  const ChannelTile& tile = split_tile.tile;
  const ThreadItems<ALONG_TIME> items;
  const VectorThreadMap lane(thread_index());
  const int64_t state_tiles = MULTI_TILE ? (sizes.states + STATE_TILE - 1) / STATE_TILE : 1;
  const CarryStorage slots{p, split_tile.partial, lane,
                           dynamic_shared() + sizeof(BackwardShared) / sizeof(float) + (MULTI_TILE ? TILED_INPUT : 0)};
  store_rows<T>(p, s.rows, tile, items);
  const ChannelParameter bias(p.delta_bias, tile), d(p.d, tile);
  bias.store_shared(s.bias);
  d.store_shared(s.d);
  store_addresses<T>(p, s, tile);
  if (thread_index() < 64) s.ones[thread_index()] = thread_index() / 8 == thread_index() % 8 ? 1.0f : 0.0f;
  if (thread_index() == 0) s.non_finite = 0;
  clear_totals(s);
  float carry[4] = {}, a_gradient[4] = {};
  wait_on_dependent_grids();
  launch_dependent_grids();
  // A thread map of its own: one shared with the loop would stay in registers through it, and spill others.
  for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
    exclusive_prefix<false, SEGMENTED>(carry, p, p.last_gradient, split_tile, VectorThreadMap(reload_thread_index()),
                                       state_tile);
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      slots.store(carry, state_tile, CARRY, split_tile.end - 1);
      slots.store(a_gradient, state_tile, A_GRADIENT, split_tile.end - 1);
    }
  }
  barrier();

  int chunk = split_tile.end - 1;
  if constexpr (HAS_MMA_TF32) {
    chunk = backward_chunks<T, MULTI_TILE, ALONG_TIME, false, SEGMENTED>(p, s, slots, split_tile, lane, chunk, carry,
                                                                         a_gradient);
  }
  if (chunk >= split_tile.begin) {
    backward_chunks<T, MULTI_TILE, ALONG_TIME, true, SEGMENTED>(p, s, slots, split_tile, lane, chunk, carry,
                                                                a_gradient);
  }
  for (int64_t state_tile = 0; state_tile < state_tiles; ++state_tile) {
    if constexpr (STORES_CARRY<MULTI_TILE>) {
      slots.load(carry, state_tile, CARRY, split_tile.begin - 1);
      slots.load(a_gradient, state_tile, A_GRADIENT, split_tile.begin - 1);
    }
    const StateVectorAccess address(sizes, split_tile.partial, lane, state_tile);
    address.store(p.a_gradient, a_gradient);
    if (p.initial_gradient) address.store(p.initial_gradient, carry);
  }
  if (p.d_gradient) store_totals(p.d_gradient, s.d_total, sizes, split_tile.partial);
  if (p.bias_gradient) store_totals(p.bias_gradient, s.bias_total, sizes, split_tile.partial);
}
