// Selective scan, forward: h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t, y_t = C_t h_t + D u_t, out_t = y_t silu(z_t).
// Tiling: a block has 32 channels of one sequence, chunk after chunk; four warps run the recurrence, four the
//   elementwise work (without tensor cores the same warps do both).
#pragma once

#include "scan_forward_roles.h"
#include "scan_prefix.h"

// The loop of the elementwise warps, one barrier a state tile: beside the recurrence of a chunk they prepare the next
// chunk and finish the previous one. Returns as run_recurrence does.
template <class T, bool ALONG_TIME, bool NO_MMA, bool SEGMENTED>
DEVICE int run_elementwise(const ForwardBlock& block, int chunk) {
  const int index = thread_index() - THREADS;
  const int first = chunk;
  ProjectionStream<T> projections(block, chunk, index);
  ForwardElementwise<T, NO_MMA, ALONG_TIME> elementwise(block, index);
  auto prepare = [&](int chunk) {
    elementwise.prepare(chunk);
    if (SEGMENTED)
      store_continues(block.s.stage(chunk).continues, block.p.segment, block.tile, block.p.sizes.length, chunk, index);
  };
  elementwise.fetch(chunk);
  projections.fetch();
  // Before the first chunk the parameters are not there yet.
  if (!NO_MMA) barrier();
  prepare(chunk);
  projections.store_shared();
  elementwise.fetch(chunk + 1);
  projections.fetch();
  barrier();
  for (; chunk < block.end; ++chunk) {
    // All loaded values are used before more are loaded: waiting for one load can mean waiting for later ones too.
    projections.store_shared();
    prepare(chunk + 1);
    if (chunk > first) elementwise.finish(chunk - 1);
    projections.fetch();
    elementwise.fetch(chunk + 2);
    elementwise.fetch_again(chunk);
    barrier();
    for (int state_tile = 1; state_tile < block.state_tiles; ++state_tile) {
      projections.store_shared();
      projections.fetch();
      barrier();
    }
    if (!NO_MMA && block.s.non_finite[chunk & 1]) return chunk;
  }
  elementwise.finish(chunk - 1);
  return chunk;
}

// The loop of the recurrence warps. Returns the first chunk that is not finite, with the states before it; the caller
// repeats it without mma.
template <class T, bool MULTI_TILE, bool NO_MMA, bool SEGMENTED>
DEVICE int run_recurrence(const ForwardBlock& block, int chunk,
                          ForwardRecurrence<T, MULTI_TILE, NO_MMA, SEGMENTED>& states) {
  for (; chunk < block.end; ++chunk) {
    const float start[4] = {states.h[0], states.h[1], states.h[2], states.h[3]};
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      states.run(chunk, state_tile);
      barrier();
    }
    if (!NO_MMA && block.s.non_finite[chunk & 1]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) states.h[e] = start[e];
      return chunk;
    }
  }
  return chunk;
}

// Elementwise work and recurrence by the same warps.
template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void run_fused(const ForwardBlock& block, ForwardRecurrence<T, MULTI_TILE, true, SEGMENTED>& states) {
  ForwardElementwise<T, true, ALONG_TIME> elementwise(block, thread_index());
  ProjectionStream<T> projections(block, block.split_tile.begin, thread_index());
  elementwise.fetch(block.split_tile.begin);
  projections.fetch();
  for (int chunk = block.split_tile.begin; chunk < block.end; ++chunk) {
    elementwise.prepare(chunk);
    if (SEGMENTED)
      store_continues(block.s.stage(chunk).continues, block.p.segment, block.tile, block.p.sizes.length, chunk);
    elementwise.fetch(chunk + 1);
    elementwise.fetch_again(chunk);
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      if (state_tile > 0) barrier();
      projections.store_shared();
      barrier();
      projections.fetch();
      states.run(chunk, state_tile);
    }
    barrier();
    elementwise.finish(chunk);
  }
}

// Stores the split's exclusive prefix to [state tile][copy][thread][4], in the thread map of the recurrence.
template <bool SEGMENTED>
DEVICE void store_prefix(float* to, const ForwardBlock& block) {
  const VectorThreadMap lane(thread_index());
  wait_on_dependent_grids();
  for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile, to += FORWARD_COPIES * THREADS * 4) {
    float h[4];
    exclusive_prefix<true, SEGMENTED>(h, block.p, block.p.initial, block.split_tile, lane, state_tile);
#pragma unroll
    for (int e = 0; e < 4; e += MmaThreadMap::STATES_EACH)
      store_states(to + MmaThreadMap::offset_of(lane.channel(), lane.state + e), h + e);
  }
}

template <class T, bool MULTI_TILE, bool ALONG_TIME, bool SEGMENTED>
DEVICE void scan_forward(const ScanForward& p) {
  ForwardShared& s = *reinterpret_cast<ForwardShared*>(dynamic_shared());
  float* slots = dynamic_shared() + sizeof(ForwardShared) / sizeof(float);
  const ScanSizes& sizes = p.sizes;
  const SplitTile split_tile(sizes, p.splits, SplitTile::outermost_index(sizes));
  const ChannelTile& tile = split_tile.tile;
  const ForwardBlock block(p, s, split_tile,
                           MULTI_TILE ? static_cast<int>((sizes.states + STATE_TILE - 1) / STATE_TILE) : 1,
                           ALONG_TIME || tile.channels == CHANNELS);
  const ThreadItems<ALONG_TIME> items;
  s.rows.template store_shared<T>(FORWARD_U, p.u, tile, items);
  s.rows.template store_shared<T>(FORWARD_DELTA, p.delta, tile, items);
  s.rows.template store_shared<T>(FORWARD_Z, p.z, tile, items);
  s.rows.template store_shared<T>(FORWARD_OUT, p.out, tile, items);
  const ChannelParameter bias(p.delta_bias, tile), d(p.d, tile);
  if (thread_index() < 4) s.non_finite[thread_index()] = 0;
  barrier();
  if (WARP_SPECIALIZED && thread_index() >= THREADS) {
    deallocate_registers<FORWARD_REGISTERS - REALLOCATED_REGISTERS<T>>();
    const int chunk = run_elementwise<T, ALONG_TIME, false, SEGMENTED>(block, split_tile.begin);
    if (chunk < block.end) run_elementwise<T, ALONG_TIME, true, SEGMENTED>(block, chunk);
    return;
  }
  if (thread_index() < tile.channels) prefetch_l1(p.a + (tile.first + thread_index()) * sizes.states);
  bias.store_shared(s.bias);
  d.store_shared(s.d);
  barrier();
  allocate_registers<FORWARD_REGISTERS + REALLOCATED_REGISTERS<T>>();
  // With one state tile through the y of a stage that no chunk writes before the second.
  float* prefix =
      MULTI_TILE ? slots + (split_tile.begin & (FORWARD_COPIES - 1)) * THREADS * 4 : s.stage(split_tile.begin + 1).y;
  store_prefix<SEGMENTED>(prefix, block);
  if (WARP_SPECIALIZED) barrier();
  ForwardRecurrence<T, MULTI_TILE, true, SEGMENTED> states(block, slots);
  if constexpr (WARP_SPECIALIZED) {
    ForwardRecurrence<T, MULTI_TILE, false, SEGMENTED> finite(block, slots);
    load_float4(finite.h, prefix + thread_index() * 4);
    const int chunk = run_recurrence(block, split_tile.begin, finite);
#pragma unroll
    for (int e = 0; e < 4; ++e) states.h[e] = finite.h[e];
    if (chunk < block.end) {
      barrier();
      run_recurrence(block, chunk, states);
    }
  } else {
    load_float4(states.h, prefix + thread_index() * 4);
    run_fused<T, MULTI_TILE, ALONG_TIME, SEGMENTED>(block, states);
  }
  if (p.last && split_tile.split + 1 == p.splits) {
    for (int state_tile = 0; state_tile < block.state_tiles; ++state_tile) {
      if constexpr (MULTI_TILE) load_float4(states.h, states.slot(state_tile, block.end));
      StateAccess(sizes, tile, states.lane, state_tile, 1).store(p.last, 0, states.h);
    }
  }
}
